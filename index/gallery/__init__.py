"""The gallery: items, images and vectors, searchable. Other packages use the names that are exported here."""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from index._util.files import cache_folder
from index._util.imports import require
from index.errors import LookalikeError
from index.gallery.addresses import parse_address, redact
from index.gallery.backup import restore_gallery
from index.gallery.errors import StoreError
from index.gallery.gallery import Gallery
from index.gallery.settings import GallerySettings
from index.gallery.store.sqlite import STORE_FILE, SQLiteStore, check_not_emptied
from index.gallery.store.sqlite_jobs import LOCK_FILE
from index.gallery.types import BuildReport, GalleryStats, Hit, IndexStats, Progress, SearchResult, no_progress
from index.gallery.vectors.base import VectorIndex
from index.gallery.vectors.faiss.gpu import POOL
from index.gallery.vectors.faiss.index import FaissIndex
from index.gallery.vectors.faiss.settings import FaissSettings
from index.gallery.vectors.qdrant.settings import QdrantAddress
from index.gallery.verify import Fault

__all__ = [
    "CACHE_VARIABLE",
    "BuildReport",
    "Gallery",
    "GalleryStats",
    "Hit",
    "IndexStats",
    "SearchResult",
    "check_gallery",
    "open_gallery",
    "redact",
    "restore_gallery",
    "verify_gallery",
]


if TYPE_CHECKING:
    from index.gallery.store.postgres import PostgresStore

CACHE_VARIABLE = "LOOKALIKE_CACHE"


def open_gallery(
    address: str | Path,
    *,
    create: bool = False,
    maintain: bool = False,
    cache: Path | None = None,
    settings: GallerySettings | None = None,
    faiss_settings: FaissSettings | None = None,
) -> Gallery:
    """Opens the gallery at an address; `create` allows a new one.

    A path is a folder with SQLite and FAISS; postgresql://... is a database, whose indexes FAISS builds in the folder
    `cache` of this machine, by default that of LOOKALIKE_CACHE; index/gallery/addresses.py has the other forms. With
    `maintain` the gallery compacts itself in the background: for a process that keeps running.
    """
    parts = parse_address(address)
    gpus = POOL if maintain else None
    if not parts.is_folder:
        if parts.vectors:
            QdrantAddress.parse(parts.vectors)  # before anything is created
        store = _open_postgres(parts.store, cache, parts.vectors is not None, create, settings)
        try:
            index = (
                _open_qdrant(parts.vectors, store)
                if parts.vectors
                else FaissIndex(store.cache, store, faiss_settings, gpus)
            )
            return Gallery(store, index, address=str(address), maintain=maintain, cache=cache, settings=settings)
        except BaseException:
            store.close()
            raise
    check_gallery(address, create=create)
    directory = Path(address)
    folder = SQLiteStore(directory, settings)
    return Gallery(
        folder,
        FaissIndex(directory, folder, faiss_settings, gpus),
        address=str(address),
        maintain=maintain,
        settings=settings,
    )


def _open_postgres(
    address: str, cache: Path | None, shared_index: bool, create: bool, settings: GallerySettings | None
) -> "PostgresStore":
    require("psycopg", "cluster")
    from index.gallery.store.postgres import PostgresStore

    folder = cache or Path(os.environ.get(CACHE_VARIABLE) or cache_folder())
    return PostgresStore(address, folder, shared_index=shared_index, create=create, settings=settings)


def _open_qdrant(address: str, store: "PostgresStore") -> VectorIndex:
    require("qdrant_client", "cluster")
    qdrant = import_module("index.gallery.vectors.qdrant.index")
    index: VectorIndex = qdrant.QdrantIndex(address, store, store.build_lock, identity=store.identity)
    return index


def check_gallery(address: str | Path, *, create: bool = False) -> None:
    """Refuses a folder that has no gallery and, with `create`, one where none can be created."""
    if not parse_address(address).is_folder:
        return  # only the server knows
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
