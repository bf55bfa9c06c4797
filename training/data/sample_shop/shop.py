"""The sample shop on disk: photos, a catalogue and a description, written whole or not at all."""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from index._util.files import atomic_write_text, fsync_directory
from index._util.system import is_running
from index.errors import LookalikeError
from training.data.sample_shop.products import NAMES, Product, design_products
from training.data.sample_shop.render import Model
from training.data.sample_shop.scenes import take_photo

GENERATOR = 1
"""Raised whenever the same seed would give other photos, so that an old shop is not taken for a new one."""

DESCRIPTION, CATALOGUE, PHOTOS = "shop.json", "catalogue.csv", "photos"
JPEG_QUALITY = 88


class ShopPhoto(NamedTuple):
    """One row of the catalogue: a photo and what is known of the product it shows."""

    item_id: str
    image: str  # relative to the shop's folder, with forward slashes
    title: str
    category: str
    colour: str
    pattern: str
    brand: str
    price: float
    split: str  # "train", or "unseen": a product that training never meets
    role: str  # "gallery", or "query": a new photo to search with


def write_shop(
    directory: Path,
    *,
    seed: int = 7,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    products_per_family: int = 12,
    photos_per_product: int = 10,
) -> Path:
    """Photographs a shop into `directory`; one of the same description that is already there is kept as it is.

    The photos depend on the seed alone, not on how many processes take them. `on_progress` hears (done, all)
    photos. The shop is built beside `directory` and renamed when it is complete.
    """
    _check_size(products_per_family, photos_per_product)
    directory = Path(directory).absolute()
    products = design_products(seed, products_per_family)
    description = {
        "generator": GENERATOR,
        "seed": seed,
        "products_per_family": products_per_family,
        "photos_per_product": photos_per_product,
        "products": len(products),
        "photos": len(products) * photos_per_product,
    }
    if _is_complete(directory, description):
        return directory
    if (
        directory.exists()
        and not (directory / DESCRIPTION).is_file()
        and (not directory.is_dir() or any(directory.iterdir()))
    ):
        raise LookalikeError(
            f"{directory} holds something other than a sample shop.", "Choose a new or an empty folder."
        )

    _remove_leftovers(directory)
    building = _beside(directory, "building")
    try:
        (building / PHOTOS).mkdir(parents=True)
        _photograph_all(products, building, photos_per_product, workers or _available_cores(), on_progress)
        atomic_write_text(building / CATALOGUE, _catalogue(products, photos_per_product))
        atomic_write_text(building / DESCRIPTION, json.dumps(description, indent=2) + "\n")
        _put_in_place(building, directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def read_shop(directory: Path) -> list[ShopPhoto]:
    """The catalogue of a shop, one row for each photo."""
    path = Path(directory) / CATALOGUE
    if not path.is_file():
        raise LookalikeError(
            f"{directory} holds no sample shop ({CATALOGUE} is missing).", "Write one with write_shop first."
        )
    with path.open(newline="", encoding="utf-8") as file:
        return [_photo_of(row) for row in csv.DictReader(file)]


def _photo_of(row: dict[str, str]) -> ShopPhoto:
    price = float(row.pop("price"))
    return ShopPhoto(**row, price=price)


def render_photo(product: Product, photo_number: int) -> Image.Image:
    """One photo of a product, as `write_shop` would save it; number 0 is its plain catalogue picture."""
    return take_photo(product, _model(product), photo_number)


@lru_cache(maxsize=2)
def _model(product: Product) -> Model:
    return product.model()


def _check_size(products_per_family: int, photos_per_product: int) -> None:
    if not 1 <= products_per_family <= len(NAMES):
        raise LookalikeError(f"products_per_family is {products_per_family}.", f"Give a number from 1 to {len(NAMES)}.")
    if not 2 <= photos_per_product <= 100:
        raise LookalikeError(f"photos_per_product is {photos_per_product}.", "Give a number from 2 to 100.")


def _photo_name(product: Product, number: int) -> str:
    return f"{PHOTOS}/{product.item_id}/{number:02d}.jpg"


def _photograph(product: Product, folder: Path, photos: int) -> int:
    (folder / PHOTOS / product.item_id).mkdir()
    for number in range(photos):
        render_photo(product, number).save(folder / _photo_name(product, number), quality=JPEG_QUALITY, subsampling=0)
    return photos


def _photograph_all(
    products: list[Product],
    folder: Path,
    photos: int,
    workers: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    done = 0
    for count in _photographed(products, folder, photos, workers):
        done += count
        if on_progress:
            on_progress(done, len(products) * photos)


def _photographed(products: list[Product], folder: Path, photos: int, workers: int) -> Iterator[int]:
    if workers == 1:
        for product in products:
            yield _photograph(product, folder, photos)
        return
    # New interpreters, not forks: the caller may hold threads and a loaded torch, which a fork would break.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_leave_with_parent)
    try:
        for future in as_completed([pool.submit(_photograph, product, folder, photos) for product in products]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_with_parent() -> None:
    """Ends this worker when the process that asked for it is killed; it would wait for work for ever."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rows(products: list[Product], photos: int) -> Iterator[ShopPhoto]:
    queries = max(1, round(photos * 0.2))
    for p in products:
        for number in range(photos):
            role = "query" if number >= photos - queries else "gallery"
            image = _photo_name(p, number)
            yield ShopPhoto(p.item_id, image, p.title, p.category, p.colour, p.pattern, p.brand, p.price, p.split, role)


def _catalogue(products: list[Product], photos: int) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ShopPhoto._fields)
    for row in _rows(products, photos):
        writer.writerow([f"{value:.2f}" if isinstance(value, float) else value for value in row])
    return text.getvalue()


def _is_complete(directory: Path, description: dict[str, Any]) -> bool:
    try:
        if json.loads((directory / DESCRIPTION).read_text(encoding="utf-8")) != description:
            return False
        rows = read_shop(directory)
        return len(rows) == description["photos"] and all((directory / r.image).stat().st_size for r in rows)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, LookalikeError):
        return False  # absent or damaged: it is written anew


def _beside(directory: Path, purpose: str) -> Path:
    return directory.with_name(f".{directory.name}.{os.getpid()}.{purpose}")


def _remove_leftovers(directory: Path) -> None:
    """Clears away what writers that were killed left beside the shop."""
    for purpose in ("building", "replaced"):
        for folder in directory.parent.glob(f".{glob.escape(directory.name)}.*.{purpose}"):
            owner = folder.name.split(".")[-2]
            if owner.isdigit() and (int(owner) == os.getpid() or not is_running(int(owner))):
                shutil.rmtree(folder)


def _put_in_place(building: Path, directory: Path) -> None:
    replaced = _beside(directory, "replaced")
    if directory.exists():
        directory.rename(replaced)
    building.rename(directory)
    fsync_directory(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)
