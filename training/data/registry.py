"""The specifications that name a data set: `sample`, `folder:DIR`, `table:FILE`, and the published ones."""

from collections.abc import Callable
from pathlib import Path

from index._util.files import cache_folder
from training.callbacks import Progress
from training.data.benchmarks import load_cars, load_cub, load_inshop, load_sop
from training.data.dataset import Box, DataSet, Photo, check_usable
from training.data.folders import load_folder, read_folder
from training.data.sample_shop import read_shop, write_shop
from training.data.tables import load_table, parse_spec, read_table
from training.errors import TrainingError

_LOADERS: dict[str, Callable[[Path], DataSet]] = {
    "folder": load_folder,
    "table": load_table,
    "cub": load_cub,
    "cars": load_cars,
    "sop": load_sop,
    "inshop": load_inshop,
}


def load_data(spec: str, *, on_progress: Progress | None = None) -> DataSet:
    """Loads the data set that a specification names; its remarks report what is missing."""
    kind, _, rest = spec.partition(":")
    if kind == "sample":
        return shop_data(write_shop(Path(rest).expanduser() if rest else default_shop(), on_progress=on_progress))
    if kind in _LOADERS and rest:
        return check_usable(_LOADERS[kind](Path(rest).expanduser()))
    raise TrainingError(
        f"Unknown data {spec!r}.",
        "Use sample[:DIR], folder:DIR (one folder per product), table:FILE, cub:DIR, cars:DIR, sop:DIR or inshop:DIR.",
    )


def display_name(spec: str) -> str:
    """Returns the data set of a specification without its path, such as `table catalogue.csv`, for bundles."""
    kind, _, rest = spec.partition(":")
    if kind not in ("folder", "table"):
        return kind
    path = parse_spec(Path(rest)).file if kind == "table" else Path(rest)
    return f"{kind} {path.name}".rstrip()


def load_search(queries: str, gallery: str) -> DataSet:
    """Loads photos to search with and photos to find, matched by label; both only for measuring.

    Each is a folder or a table. A photo that is in both never finds itself.
    """
    asked, remarks = _read_photos(queries)
    found, more = _read_photos(gallery)
    in_gallery = {_identity(photo) for photo in found}
    in_both = {_identity(photo) for photo in asked} & in_gallery
    photos = [photo._replace(is_query=True, is_gallery=_identity(photo) in in_both) for photo in asked]
    photos += [photo._replace(is_query=False, is_gallery=True) for photo in found if _identity(photo) not in in_both]
    return check_usable(DataSet(f"{queries} against {gallery}", (), tuple(photos), (*remarks, *more)))


def _read_photos(spec: str) -> tuple[tuple[Photo, ...], tuple[str, ...]]:
    kind, separator, rest = spec.partition(":")
    if not separator or kind not in ("folder", "table"):
        kind, rest = "folder" if Path(spec).expanduser().is_dir() else "table", spec
    return (read_folder if kind == "folder" else read_table)(Path(rest).expanduser())


def _identity(photo: Photo) -> tuple[str, Box | None, str]:
    return str(photo.path.resolve()), photo.box, photo.label


def default_shop() -> Path:
    """Returns the default folder of the sample shop, shared by all runs."""
    return cache_folder() / "sample-shop"


def shop_data(directory: Path) -> DataSet:
    """Learns from the gallery photos of a sample shop's trained products; their query photos stay new to the model."""
    photos = read_shop(directory)
    train = [photo for photo in photos if photo.split == "train" and photo.role == "gallery"]
    test = [photo for photo in photos if photo.split == "unseen"]
    return DataSet(
        "sample",
        tuple(Photo(directory / photo.image, photo.item_id) for photo in train),
        tuple(Photo(directory / photo.image, photo.item_id) for photo in test),
    )
