"""The vector index of a gallery on one machine: FAISS generations in a folder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

from index._util.system import exclusive_lock, exclusive_lock_if_free
from index.gallery.errors import IndexBuildError, IndexDamaged
from index.gallery.store.base import BundleRow, ItemStore, StoreReader
from index.gallery.types import BuildReport, Progress, no_progress
from index.gallery.vectors.faiss import settings as defaults
from index.gallery.vectors.faiss.compaction import build_generation
from index.gallery.vectors.faiss.generation import (
    INDEX_FILE,
    MANIFEST_FILE,
    RECORDS_FILE,
    Generation,
    Manifest,
    open_generation,
    read_manifest,
)
from index.gallery.vectors.faiss.gpu import GpuPool, load_vectors
from index.gallery.vectors.faiss.masked import MaskedGeneration
from index.gallery.vectors.faiss.settings import FaissSettings

GENERATIONS = "generations"
GENERATION_FILES = (INDEX_FILE, RECORDS_FILE, MANIFEST_FILE)
_LOCK = "compaction.lock"


class FaissIndex:
    """Generations of a gallery's bundles; several processes may share the folder."""

    engine = "faiss"

    def __init__(
        self, directory: Path, store: ItemStore, settings: FaissSettings | None = None, gpus: GpuPool | None = None
    ) -> None:
        """With `gpus` opened indexes are searched there if they fit: for a process that searches for long."""
        self._gpus = gpus
        self._directory = directory
        self._root = directory / GENERATIONS
        self._store = store
        self._settings = settings or defaults.DEFAULT

    def open(self, bundle: BundleRow) -> MaskedGeneration:
        generation = self._open_checked(bundle)
        if self._gpus:
            searcher = generation.searcher
            searcher.gpu = load_vectors(self._gpus, searcher.storage, self._settings)
        size = _size(self._root / str(bundle.index_name))
        return MaskedGeneration(generation, self._settings, size, generation.alive)

    def _open_checked(self, bundle: BundleRow) -> Generation:
        generation, manifest = open_generation(self._root / str(bundle.index_name), self._settings)
        _check_manifest(bundle, manifest)
        return generation

    def load(self, reader: StoreReader, bundle: BundleRow) -> MaskedGeneration:
        generation = Generation.in_memory(reader, bundle)
        return MaskedGeneration(generation, self._settings, 0, generation.alive)

    def build(
        self, bundle_id: str, *, rebuild: bool = False, wait: bool = True, on_progress: Progress = no_progress
    ) -> BuildReport | None:
        with self._lock(wait=wait) as is_locked:
            bundle = self._store.read.bundle(bundle_id)
            if not is_locked or bundle is None:
                return None
            try:
                self._root.mkdir(exist_ok=True)
                self._remove_unused()
                name = build_generation(self._root, self._store, bundle, self._settings, rebuild, on_progress)
                self._remove_unused()
            except OSError as error:
                raise IndexBuildError(
                    f"The next generation of {self._directory} could not be written: {error}.",
                    "Free space on its disk and compact again; searches continue, and nothing is lost.",
                ) from error
            if name is None or not (self._root / name).exists():  # the bundle was dropped meanwhile
                return None
            return _report(read_manifest(self._root / name), is_new=name != bundle.index_name)

    def is_building(self) -> bool:
        with self._lock(wait=False) as is_locked:
            return not is_locked

    def newest_revision(self) -> int:
        return max(map(_revision, self._paths()), default=0)

    def clean(self) -> None:
        with self._lock(wait=True):
            self._remove_unused()

    def close(self) -> None:
        """Does nothing: files are released with what was opened."""

    def files(self, bundle: BundleRow) -> dict[str, Path]:
        if bundle.index_name is None:
            return {}
        self._open_checked(bundle)  # every byte
        return {
            f"{GENERATIONS}/{bundle.index_name}/{name}": self._root / bundle.index_name / name
            for name in GENERATION_FILES
        }

    @contextmanager
    def _lock(self, *, wait: bool) -> Iterator[bool]:
        """Holds the lock that only one process has; without `wait`, yields false when another one has it."""
        path = self._directory / _LOCK
        if wait:
            with exclusive_lock(path, timeout=inf):
                yield True
        else:
            with exclusive_lock_if_free(path) as is_locked:
                yield is_locked

    def _paths(self) -> list[Path]:
        return list(self._root.iterdir()) if self._root.is_dir() else []

    def _remove_unused(self) -> None:
        """Removes generations that no bundle names, and what a killed build left.

        A process that still searches one of them keeps its files until it closes them. One that is newer than the store
        is kept: it holds the last copy of writes that the store has lost.
        """
        named = {bundle.index_name for bundle in self._store.read.bundles()}
        revision = self._store.read.revision()
        for path in self._paths():
            if path.name not in named and _revision(path) <= revision:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _revision(path: Path) -> int:
    """Returns the revision in the name of a generation; 0 for other files."""
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _check_manifest(bundle: BundleRow, manifest: Manifest) -> None:
    """Refuses an intact generation that is not the one that the store names."""
    pairs = {
        "name": (manifest.name, bundle.index_name),
        "bundle": (manifest.bundle_id, bundle.id),
        "revision": (manifest.revision, bundle.index_revision),
        "dimension": (manifest.dimension, bundle.dimension),
    }
    for field, (found, expected) in pairs.items():
        if found != expected:
            raise IndexDamaged(
                f"The generation {bundle.index_name} has {field} {found}, not {expected}.",
                "Rebuild it: lookalike gallery compact.",
            )


def _report(manifest: Manifest, *, is_new: bool) -> BuildReport:
    plan = manifest.plan
    return BuildReport(
        name=manifest.name,
        revision=manifest.revision,
        images=manifest.images,
        is_new=is_new,
        kind=plan.kind,
        recall=plan.recall,
        target=plan.target,
        effort=plan.effort,
        scans=plan.scans,
    )


def _size(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.iterdir())
    except FileNotFoundError as error:  # a compaction may remove the files at any time
        raise IndexDamaged(
            f"The generation {directory} was removed: {error}.", "Rebuild it: lookalike gallery compact."
        ) from None
