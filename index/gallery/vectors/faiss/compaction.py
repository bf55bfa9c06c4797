"""Compaction: the next generation of a bundle, built from the catalogue beside the searches.

`python -m index.compaction GALLERY` is how a gallery runs it in a process of its own: it takes neither the
interpreter's lock nor the memory of whoever answers searches.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.files import temporary_sibling
from index.errors import LookalikeError
from index.gallery.store.sqlite import Catalogue
from index.gallery.store.sqlite_reader import BundleRow
from index.gallery.vectors.faiss import builder as building
from index.gallery.vectors.faiss import searcher as ann
from index.gallery.vectors.faiss import settings as defaults
from index.gallery.vectors.faiss.generation import (
    DEAD,
    INDEX_FILE,
    Generation,
    GenerationError,
    Manifest,
    Records,
    open_generation,
    pack,
    read_records,
    write_generation,
)

CATALOGUE_FILE = "catalogue.sqlite"
GENERATIONS = "generations"
_LOCK = "compaction.lock"

RECALL_TARGET = 0.98
_PENDING_AT_LEAST, _PENDING_SHARE = 2048, 64
"""Changes that are worth a compaction: so many, or one in so many images, whichever is more."""
_MOST_DEAD = 0.25
"""Share of dead positions beyond which an index is built anew: they cost memory, and steps of a search."""

Progress = Callable[[int, int], None]


class CompactionError(LookalikeError):
    """The next generation could not be written; the last one stays."""

    kind = "compaction"


class _Last(NamedTuple):
    generation: Generation
    manifest: Manifest


class _Base(NamedTuple):
    """A generation to extend: its index in memory, and the keys of its positions that are still good."""

    generation: Generation
    plan: ann.Plan
    keys: NDArray[np.int64]


def is_due(images: int, pending: int) -> bool:
    """Whether searches would gain from a compaction."""
    return pending > max(_PENDING_AT_LEAST, images // _PENDING_SHARE)


@contextmanager
def compaction_lock(directory: Path, *, wait: bool) -> Iterator[bool]:
    """The one lock of a gallery, between processes; without `wait`, answers False when another one has it."""
    with (directory / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def compact(
    directory: Path,
    catalogue: Catalogue,
    bundle: BundleRow,
    *,
    target: float = RECALL_TARGET,
    rebuild: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> str | None:
    """Builds and names the next generation of a bundle; the caller holds the lock.

    Answers its name, that of the last one when nothing changed, or none for a bundle without images.
    """
    root = directory / GENERATIONS
    root.mkdir(exist_ok=True)
    clean(root, catalogue)
    scratch = temporary_sibling(root / "vectors")
    try:
        with catalogue.reading() as reader:
            bundle = reader.bundle(bundle.id) or bundle
            last = None if rebuild else _last(root, bundle)
            if last and last.generation.change == reader.change() and _is_good(last.manifest):
                return bundle.generation  # all else that is read below is for what changed
            records = read_records(reader, bundle.key)
            base = _base(last, records) if last else None
            since = base.generation.change if base else 0
            fresh = records.keys[records.changes > since]
            vectors = _scratch(scratch, (len(fresh), bundle.dimension))
            reader.vectors(bundle.key, since, vectors)
        name = None
        if len(records.keys):
            name = _write(root, bundle, records, base, fresh, vectors, target, on_progress)
    except OSError as error:
        raise CompactionError(
            f"The next generation of {directory} could not be written: {error}.",
            "Free space on its disk and compact again; searches go on, and nothing is lost.",
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
    if len(records.keys) and name is None:
        # Until it is done, the last generation and its delta go on to be searched.
        return compact(directory, catalogue, bundle, target=target, rebuild=True, on_progress=on_progress)
    catalogue.set_generation(bundle.key, name, records.change)
    clean(root, catalogue)
    return name


def _scratch(path: Path, shape: tuple[int, int]) -> NDArray[np.float16]:
    """Room for vectors on disk: there may be more of them than memory."""
    if not shape[0]:
        return np.empty(shape, np.float16)
    with path.open("wb") as file:
        # Taken at once: a page of a map that finds no room when it is written would end the process.
        os.posix_fallocate(file.fileno(), 0, 2 * shape[0] * shape[1])
    return np.memmap(path, np.float16, "r+", shape=shape)


def _last(root: Path, bundle: BundleRow) -> _Last | None:
    """The last generation, if there is one and it is whole."""
    if bundle.generation is None:
        return None
    try:
        return _Last(*open_generation(root / bundle.generation))
    except GenerationError:
        return None


def _base(last: _Last, records: Records) -> _Base | None:
    """The last generation, if it can be extended to what the catalogue holds now."""
    generation = last.generation
    # A position stays good while its image has the same vector.
    kept = records.keys[records.changes <= generation.change]
    keys = np.where(np.isin(generation.keys, kept), generation.keys, DEAD)
    if not _fits(last.manifest.plan, len(records.keys), len(keys), int(np.count_nonzero(keys == DEAD))):
        return None
    return _Base(generation, last.manifest.plan, keys)


def _is_good(manifest: Manifest) -> bool:
    return _fits(manifest.plan, manifest.images, manifest.images + manifest.dead, manifest.dead)


def _fits(plan: ann.Plan, images: int, positions: int, dead: int) -> bool:
    """Whether an index is of the kind for so many images, and not too full of positions that have gone."""
    return plan.kind == defaults.DEFAULT.choose_kind(images) and dead <= _MOST_DEAD * positions


def _write(
    root: Path,
    bundle: BundleRow,
    records: Records,
    base: _Base | None,
    fresh: NDArray[np.int64],
    vectors: NDArray[np.float16],
    target: float,
    on_progress: Progress,
) -> str | None:
    """Answers the name of what was written; none when the base should not be extended after all.

    An extension is measured with what is new alone. Some odd pictures must not make every search compare with all
    vectors: a build measures with a sample of the whole gallery.
    """
    if base:
        index = ann.read_index(root / str(bundle.generation) / INDEX_FILE)
        plan: Any = base.plan.model_copy(update={"target": target})
        built = building.extend(index, plan, vectors, on_progress=on_progress)
        if built.plan.scans and not plan.scans:
            return None
        keys = np.concatenate((base.keys, fresh[built.order]))
    else:
        built = building.build(vectors, target=target, on_progress=on_progress)
        keys = fresh[built.order]
    name = _unused_name(root, f"{records.change:012d}-{bundle.id}", bundle.generation)
    write_generation(
        root / name,
        bundle_id=bundle.id,
        dimension=bundle.dimension,
        change=records.change,
        index=built.index,
        plan=built.plan,
        arrays=pack(records, keys),
    )
    return name


def _unused_name(root: Path, name: str, last: str | None) -> str:
    """The name, or with a number when a generation of the same change has it.

    Others may have that one open if it is damaged; if it was lost, they know its name as one not to look for again.
    """
    number = 1
    chosen = name
    while chosen == last or (root / chosen).exists():
        number += 1
        chosen = f"{name}.{number}"
    return chosen


def clean(root: Path, catalogue: Catalogue) -> None:
    """Removes generations that no bundle names, and what a killed compaction left; under the lock.

    A process that still searches one of them keeps its files until it closes them.
    """
    named = {bundle.generation for bundle in catalogue.read.bundles()}
    for path in root.iterdir():
        if path.name not in named:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(directory: Path) -> None:
    """Compacts the live bundle, unless another process is at it."""
    os.nice(10)
    catalogue = Catalogue(directory / CATALOGUE_FILE)
    try:
        with compaction_lock(directory, wait=False) as mine:
            bundle = catalogue.read.current().bundle
            if mine and bundle:
                compact(directory, catalogue, bundle)
    finally:
        catalogue.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except LookalikeError as error:
        sys.exit(str(error))
