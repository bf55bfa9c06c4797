"""The gallery: items, images and vectors, searchable. Other packages use the names that are exported here."""

from pathlib import Path

from index.errors import LookalikeError
from index.gallery.backup import restore_gallery
from index.gallery.errors import StoreError
from index.gallery.gallery import Gallery
from index.gallery.settings import GallerySettings
from index.gallery.store.sqlite import STORE_FILE, SQLiteStore, check_not_emptied
from index.gallery.store.sqlite_jobs import LOCK_FILE
from index.gallery.types import BuildReport, GalleryStats, Hit, IndexStats, Progress, SearchResult, no_progress
from index.gallery.vectors.faiss.index import FaissIndex
from index.gallery.vectors.faiss.settings import FaissSettings
from index.gallery.verify import Fault

__all__ = [
    "BuildReport",
    "Gallery",
    "GalleryStats",
    "Hit",
    "IndexStats",
    "SearchResult",
    "check_gallery",
    "open_gallery",
    "restore_gallery",
    "verify_gallery",
]


def open_gallery(
    address: str | Path,
    *,
    create: bool = False,
    maintain: bool = False,
    settings: GallerySettings | None = None,
    faiss_settings: FaissSettings | None = None,
) -> Gallery:
    """Opens the gallery at an address; `create` allows a new one.

    A path is a folder with SQLite and FAISS. With `maintain` the gallery compacts itself in the background: for a
    process that keeps running.
    """
    check_gallery(address, create=create)
    directory = Path(address)
    store = SQLiteStore(directory, settings)
    index = FaissIndex(directory, store, faiss_settings)
    return Gallery(store, index, address=str(address), maintain=maintain, settings=settings)


def check_gallery(address: str | Path, *, create: bool = False) -> None:
    """Refuses an address that has no gallery and, with `create`, one where none can be created."""
    if "://" in str(address):
        raise LookalikeError(f"The address {address} names an unknown engine.", "Name a folder.")
    directory = Path(address)
    if (directory / STORE_FILE).is_file():
        return
    check_not_emptied(directory)
    # These files may appear just now, when another process creates the same gallery.
    if directory.exists() and not (
        directory.is_dir() and all(path.name.startswith((STORE_FILE, LOCK_FILE)) for path in directory.iterdir())
    ):
        raise LookalikeError(f"{directory} is not a gallery.", "Name an empty or a new folder, or a gallery.")
    if not create:
        raise LookalikeError(f"No gallery at {directory}.", "Create one with `lookalike reindex`.")


def verify_gallery(address: str | Path, *, on_progress: Progress = no_progress) -> list[Fault]:
    """Returns everything that is wrong with a gallery; a store that cannot be opened is a fault like others."""
    try:
        with open_gallery(address) as gallery:
            return gallery.verify(on_progress=on_progress)
    except StoreError as error:
        return [Fault(error.problem, error.remedy)]
