"""Builds the next generation of a bundle from the store, by extending the last one where that is possible."""

import os
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.files import temporary_file
from index.gallery.errors import IndexDamaged
from index.gallery.store.base import BundleRow, ItemStore
from index.gallery.types import Progress
from index.gallery.vectors.faiss import builder
from index.gallery.vectors.faiss.generation import (
    DEAD,
    INDEX_FILE,
    Generation,
    Manifest,
    Records,
    open_generation,
    pack,
    read_records,
    write_generation,
)
from index.gallery.vectors.faiss.searcher import Plan, open_index, read_index
from index.gallery.vectors.faiss.settings import FaissSettings


class _Base(NamedTuple):
    """A generation to extend, and the keys of its positions, DEAD where one is no longer valid."""

    generation: Generation
    plan: Plan
    keys: NDArray[np.int64]


def build_generation(
    root: Path,
    store: ItemStore,
    bundle: BundleRow,
    settings: FaissSettings,
    rebuild: bool,
    on_progress: Progress,
) -> str | None:
    """Builds the next generation and records it in the store; one build may run at a time.

    Returns its name, that of the last one when nothing changed, or None for a bundle without images.
    """
    with temporary_file(root / "vectors") as scratch, temporary_file(root / "storage") as storage:
        with store.open_reader() as reader:
            bundle = reader.bundle(bundle.id) or bundle
            last = None if rebuild else _open_last(root, bundle)
            if last and last[0].revision == reader.revision() and _is_good(last[1], settings):
                return bundle.index_name
            records = read_records(reader, bundle.key)
            base = _base(*last, records, settings) if last else None
            since = base.generation.revision if base else 0
            fresh = records.keys[records.revisions > since]
            vectors = _allocate(scratch, (len(fresh), bundle.dimension))
            reader.vectors(bundle.key, since, vectors)
        name = None
        if len(records.keys):
            name = _write(root, bundle, records, base, fresh, vectors, settings, storage, on_progress)
    if len(records.keys) and name is None:
        # Until that is done, searches continue with the last generation and its delta.
        return build_generation(root, store, bundle, settings, True, on_progress)
    store.set_index(bundle.key, name, records.revision)
    return name


def _allocate(path: Path, shape: tuple[int, int]) -> NDArray[np.float16]:
    """Allocates vectors in a file: they may exceed the memory."""
    if not shape[0]:
        return np.empty(shape, np.float16)
    with path.open("wb") as file:
        # Allocated now: a page of a memory map that finds no space when it is written would end the process.
        os.posix_fallocate(file.fileno(), 0, 2 * shape[0] * shape[1])
    return np.memmap(path, np.float16, "r+", shape=shape)


def _open_last(root: Path, bundle: BundleRow) -> tuple[Generation, Manifest] | None:
    """Opens the last generation, if there is one and it is intact."""
    if bundle.index_name is None:
        return None
    try:
        return open_generation(root / bundle.index_name)
    except IndexDamaged:
        return None


def _base(generation: Generation, manifest: Manifest, records: Records, settings: FaissSettings) -> _Base | None:
    """Returns the last generation, if it can be extended to the store's revision."""
    # A position stays valid while its image has the same vector.
    kept = records.keys[records.revisions <= generation.revision]
    keys = np.where(np.isin(generation.keys, kept), generation.keys, DEAD)
    dead = int(np.count_nonzero(keys == DEAD))
    if not _is_suitable(manifest.plan, len(records.keys), len(keys), dead, settings):
        return None
    if settings.choose_lists(len(records.keys)) > settings.max_list_growth**0.5 * (generation.searcher.lists or inf):
        return None  # the lists have become too long
    return _Base(generation, manifest.plan, keys)


def _is_good(manifest: Manifest, settings: FaissSettings) -> bool:
    return _is_suitable(manifest.plan, manifest.images, manifest.images + manifest.dead, manifest.dead, settings)


def _is_suitable(plan: Plan, images: int, positions: int, dead: int, settings: FaissSettings) -> bool:
    """Returns whether an index is of the right kind for so many images, and has not too many dead positions."""
    return plan.kind == settings.choose_kind(images) and dead <= settings.max_dead_share * positions


def _write(
    root: Path,
    bundle: BundleRow,
    records: Records,
    base: _Base | None,
    fresh: NDArray[np.int64],
    vectors: NDArray[np.float16],
    settings: FaissSettings,
    scratch: Path,
    on_progress: Progress,
) -> str | None:
    """Returns the name of what was written; None when the base should not be extended after all.

    An extension is measured with the new vectors only. A few unusual photos must not make every search scan all
    vectors: a build from scratch measures with a sample of all of them.
    """
    target = settings.recall_target
    if base:
        path = root / str(bundle.index_name) / INDEX_FILE
        index = open_index(path) if base.plan.kind == "ivf" else read_index(path)
        plan = base.plan.model_copy(update={"target": target})
        built = builder.extend(index, plan, vectors, settings=settings, scratch=scratch, on_progress=on_progress)
        if built.plan.scans and not plan.scans:
            return None
        keys = np.concatenate((base.keys, fresh[built.order]))
    else:
        built = builder.build(vectors, target=target, settings=settings, scratch=scratch, on_progress=on_progress)
        keys = fresh[built.order]
    name = _unused_name(root, f"{records.revision:012d}-{bundle.id}", bundle.index_name)
    write_generation(
        root / name,
        bundle_id=bundle.id,
        dimension=bundle.dimension,
        revision=records.revision,
        index=built.index,
        plan=built.plan,
        arrays=pack(records, keys),
    )
    return name


def _unused_name(root: Path, name: str, last: str | None) -> str:
    """Returns the name, with a number if a generation of the same revision has it.

    A damaged one may still be open elsewhere; the name of a lost one is known to others as damaged.
    """
    number = 1
    chosen = name
    while chosen == last or (root / chosen).exists():
        number += 1
        chosen = f"{name}.{number}"
    return chosen
