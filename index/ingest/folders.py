"""Folders of photos: every folder that holds photos is a product, at any depth."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".heif", ".tif", ".tiff", ".gif", ".bmp"}
UNSUPPORTED_SUFFIXES = {".jxl", ".jp2"}
"""Of photos that are not read: a re-index rejects them, so that nobody misses them unnoticed."""


class ProductFolder(NamedTuple):
    """A folder below a root that holds photos, or that holds nothing to descend into."""

    id: str
    """Its path relative to the root: it does not change when a folder of the same name is added elsewhere."""
    path: Path
    photos: list[Path]
    others: list[Path]
    """Files that are not photos."""
    error: OSError | None = None
    """Why it could not be listed."""


def product_folders(root: Path, permits: Callable[[Path], bool] = lambda path: True) -> Iterator[ProductFolder]:
    """Yields the folders below `root` that hold photos, and the empty ones, by name.

    Hidden files and folders are left out: macOS leaves a `._` twin of each file on other disks. A folder that
    `permits` refuses is yielded as its own single photo, and not listed.
    """
    folders, _ = _list_folder(root)
    for folder in folders:
        yield from _products_of(root, folder, frozenset([os.path.realpath(root)]), permits)


def _products_of(
    root: Path, path: Path, above: frozenset[str], permits: Callable[[Path], bool]
) -> Iterator[ProductFolder]:
    """Yields the folder itself, if it holds photos or nothing, and those below it; `above` are the folders it is in."""
    found = ProductFolder(path.relative_to(root).as_posix(), path, [], [])
    real = os.path.realpath(path)
    if real in above:  # a link that leads back
        return
    if not permits(path):
        yield found._replace(photos=[path])
        return
    try:
        folders, files = _list_folder(path)
    except OSError as error:
        yield found._replace(error=error)
        return
    photos = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    if photos or not folders:
        others = [file for file in files if file.suffix.lower() not in IMAGE_SUFFIXES]
        yield found._replace(photos=photos, others=others)
    for folder in folders:
        yield from _products_of(root, folder, above | {real}, permits)


def _list_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the folders and the files of a folder, by name, without hidden ones."""
    with os.scandir(folder) as entries:
        shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    folders = [Path(entry.path) for entry in shown if entry.is_dir()]
    return folders, [Path(entry.path) for entry in shown if not entry.is_dir()]
