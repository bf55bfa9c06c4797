"""The sample shop on disk: photos, a catalogue and a description, written atomically."""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from index._util.files import atomic_directory, atomic_write_text
from index._util.system import exclusive_lock, usable_cores
from index.errors import LookalikeError
from training.callbacks import Progress
from training.data.sample_shop.products import NAMES, Product, design_products
from training.data.sample_shop.render import Model
from training.data.sample_shop.scenes import take_photo

GENERATOR = 1
"""Increased whenever the same seed would give other photos, so that an old shop is not taken for a new one."""

DESCRIPTION, CATALOGUE, PHOTOS = "shop.json", "catalogue.csv", "photos"
JPEG_QUALITY = 88


class ShopPhoto(NamedTuple):
    """A row of the catalogue: a photo and the attributes of the product it shows."""

    item_id: str
    image: str  # relative to the shop's folder, with forward slashes
    title: str
    category: str
    colour: str
    pattern: str
    brand: str
    price: float
    split: str  # "train", or "unseen": a product that is never trained on
    role: str  # "gallery", or "query": a new photo to search with


def write_shop(
    directory: Path,
    *,
    seed: int = 7,
    workers: int | None = None,
    on_progress: Progress | None = None,
    products_per_family: int = 12,
    photos_per_product: int = 10,
) -> Path:
    """Renders a shop into `directory`; a complete one with the same description is kept.

    The photos depend on the seed alone, not on the number of worker processes. The shop is built under a temporary
    name and renamed when it is complete; concurrent writers wait for each other.
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
    directory.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(directory.parent):
        if _is_complete(directory, description):  # another process has just written it
            return directory
        _remove_leftovers(directory)
        with atomic_directory(directory) as building:
            (building / PHOTOS).mkdir()
            _render_all(products, building, photos_per_product, workers or usable_cores(), on_progress)
            atomic_write_text(building / CATALOGUE, _catalogue(products, photos_per_product))
            atomic_write_text(building / DESCRIPTION, json.dumps(description, indent=2) + "\n")
    return directory


def read_shop(directory: Path) -> list[ShopPhoto]:
    """Returns the catalogue of a shop, one row per photo."""
    path = Path(directory) / CATALOGUE
    if not path.is_file():
        raise LookalikeError(
            f"{directory} holds no sample shop ({CATALOGUE} is missing).", "Write one with write_shop first."
        )
    with path.open(newline="", encoding="utf-8") as file:
        return [_parse_row(row) for row in csv.DictReader(file)]


def _parse_row(row: dict[str, str]) -> ShopPhoto:
    price = float(row.pop("price"))
    return ShopPhoto(**row, price=price)


def render_photo(product: Product, photo_number: int) -> Image.Image:
    """Returns a photo of a product as `write_shop` saves it; number 0 is its plain catalogue picture."""
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


def _render_product(product: Product, folder: Path, photos: int) -> int:
    (folder / PHOTOS / product.item_id).mkdir()
    for number in range(photos):
        render_photo(product, number).save(folder / _photo_name(product, number), quality=JPEG_QUALITY, subsampling=0)
    return photos


def _render_all(
    products: list[Product],
    folder: Path,
    photos: int,
    workers: int,
    on_progress: Progress | None,
) -> None:
    done = 0
    for count in _run_workers(products, folder, photos, workers):
        done += count
        if on_progress:
            on_progress(done, len(products) * photos)


def _run_workers(products: list[Product], folder: Path, photos: int, workers: int) -> Iterator[int]:
    if workers == 1:
        for product in products:
            yield _render_product(product, folder, photos)
        return
    # New interpreters, not forks: the caller may hold threads and a loaded torch, which a fork would break.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_exit_with_parent)
    try:
        for future in as_completed([pool.submit(_render_product, product, folder, photos) for product in products]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _exit_with_parent() -> None:
    """Ends this worker when its parent process is killed; it would wait for work forever."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
        return False  # absent or damaged: it is written again


def _remove_leftovers(directory: Path) -> None:
    """Removes the folders of killed writers; the caller holds the lock, so that no other process uses them."""
    for suffix in ("tmp", "old"):
        for folder in directory.parent.glob(f".{glob.escape(directory.name)}.*.{suffix}"):
            shutil.rmtree(folder)
