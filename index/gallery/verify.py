"""Verifies a gallery, from the store's pages to the vectors that a search compares.

The store is the source of truth, so everything else is compared with it, all of one instant, while others read and
write.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.system import LockError
from index.errors import LookalikeError
from index.gallery.errors import RESTORE, IndexDamaged, IndexUnavailable, StoreError
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow, FullImageRow, ItemStore, StoreReader
from index.gallery.types import Item, Progress
from index.gallery.vectors.base import Segment, VectorIndex
from index.gallery.vectors.view import View

_EXAMPLES = 3
_UNFOUND = "{count} images of the store are found by no search: {examples}"
_GONE = "{count} images are found by searches, but are not in the store: {examples}"
_RECORD = "{count} images have another item, id or digest in the index than in the store: {examples}"
_VECTOR = "{count} images have another vector in the index than in the store: {examples}"
_NO_VECTOR = "{count} images have no vector of the active bundle, so no search finds them: {examples}"
_NO_VECTOR_REMEDY = (
    "If a job is running, wait for its end. Otherwise re-index the source that holds them with bundle {bundle_id}, "
    "or send them again."
)
_REPEAT = (
    "Restore a snapshot, or repeat the writes: lookalike reindex. Then delete the copy of the log, if there is one."
)

_DELETE_HISTORY = "Searches are not affected. Delete jobs.sqlite, or the copy of it, while no job runs."


class Fault(NamedTuple):
    """Something wrong with a gallery, and what to do about it."""

    problem: str
    remedy: str


def find_faults(
    store: ItemStore, index: VectorIndex, settings: GallerySettings, *, address: str, on_progress: Progress
) -> list[Fault]:
    """Returns everything that is wrong: checks every byte of the indexes, and compares every image."""
    faults: list[Fault] = []
    try:
        wrong = store.problems()
        faults += [Fault(f"{problem}.", RESTORE) for problem in wrong]
        faults += [Fault(f"{problem}.", _REPEAT) for problem in find_lost_writes(store, index)]
        faults += _job_faults(store)
        active = store.read.head().bundle
        for bundle in store.read.bundles():
            faults += _copy_faults(store, bundle.id)
            is_active = active is not None and bundle.id == active.id
            compact = f"lookalike gallery compact {address}" if is_active else None
            if not is_active or wrong:
                faults += _index_faults(store, index, bundle.id, compact)
            else:
                faults += _index_faults(store, index, bundle.id, compact, _Comparison(settings, on_progress))
            if is_active:
                faults += _missing_vectors(store, bundle.id)
    except (StoreError, IndexUnavailable) as error:
        faults.append(Fault(error.problem, error.remedy))
    return faults


def _job_faults(store: ItemStore) -> list[Fault]:
    try:
        lost = _lost_since("a job ended", store.jobs.newest_revision(), store)
        damaged = store.jobs.problems()
    except (StoreError, LockError) as error:
        return [Fault(error.problem, f"Searches are not affected. {error.remedy}")]
    return [*(Fault(f"{it}.", _REPEAT) for it in lost), *(Fault(f"{it}.", _DELETE_HISTORY) for it in damaged)]


def find_lost_writes(store: ItemStore, index: VectorIndex) -> list[str]:
    """Returns the evidence, without that of the jobs, that the store lacks acknowledged writes; it may be intact."""
    return store.lost_writes() + _lost_since("an index was built", index.newest_revision(), store)


def _lost_since(event: str, revision: int, store: ItemStore) -> list[str]:
    current = store.read.revision()  # read after the other one: a writer may be at work
    if revision <= current:
        return []
    return [f"The store is at revision {current:,}, but {event} at revision {revision:,}: later writes were lost"]


def _copy_faults(store: ItemStore, bundle_id: str) -> list[Fault]:
    """Returns what is wrong with the copy of a bundle, if the store keeps one."""
    if not store.has_bundle(bundle_id):
        return []
    remedy = f"Replace it with a copy of the bundle {bundle_id}."
    try:
        found = store.load_bundle(bundle_id).id
    except LookalikeError as error:
        return [Fault(error.problem, remedy)]
    return [] if found == bundle_id else [Fault(f"The copy of bundle {bundle_id} is the bundle {found}.", remedy)]


def _missing_vectors(store: ItemStore, bundle_id: str) -> list[Fault]:
    """Returns a fault if images have no vector of the active bundle."""
    with store.open_reader() as reader:
        missing = ["/".join(names) for names in reader.image_ids_without(bundle_id)]
    return [Fault(f"{_format(_NO_VECTOR, missing)}.", _NO_VECTOR_REMEDY.format(bundle_id=bundle_id))] if missing else []


class _Comparison(NamedTuple):
    """How to compare an index with the store."""

    settings: GallerySettings
    on_progress: Progress


def _index_faults(
    store: ItemStore, index: VectorIndex, bundle_id: str, compact: str | None, comparison: _Comparison | None = None
) -> list[Fault]:
    """Returns what is wrong with the index of a bundle; `compact` is the command that rebuilds it."""
    while True:
        with store.open_reader() as reader:
            bundle = reader.bundle(bundle_id)
            if bundle is None or bundle.index_name is None:
                return []
            try:
                built = index.open(bundle)
            except IndexDamaged as error:
                now = store.read.bundle(bundle_id)
                if now is None or now.index_name != bundle.index_name:
                    continue  # a compaction replaced it in between
                remedy = f"Rebuild it: {compact}." if compact else "It is rebuilt when its bundle is activated."
                return [Fault(error.problem, remedy)]
            if comparison is None:
                return []
            view = View(bundle, built, built.revision, comparison.settings).catch_up(reader)
            problems = _differences(reader, bundle, view, comparison.on_progress)
            remedy = f"Rebuild the index: {compact} --rebuild; if nobody edited the files by hand, restore a snapshot."
            return [Fault(f"{problem}.", remedy) for problem in problems]


def _differences(reader: StoreReader, bundle: BundleRow, view: View, on_progress: Progress) -> list[str]:
    """Compares what searches can return with the store, image by image."""
    found: dict[str, list[str]] = defaultdict(list)
    searchable = _SearchableImages(view.segments(None))
    total, done = reader.image_count(bundle.key), 0
    for rows in reader.full_images(bundle.key):
        entries = searchable.mark_seen([row.key for row in rows])
        found[_UNFOUND] += [_label(row) for row, entry in zip(rows, entries.tolist(), strict=True) if entry < 0]
        for number, segment in enumerate(searchable.segments):
            own = np.flatnonzero((entries >= 0) & (searchable.segment_of[entries] == number))
            if len(own):
                _compare(segment, searchable.positions[entries[own]], [rows[row] for row in own.tolist()], found)
        done += len(rows)
        on_progress(done, total)
    found[_GONE] += [f"the image with key {key}" for key in searchable.keys[~searchable.seen].tolist()]
    return [_format(problem, examples) for problem, examples in found.items() if examples]


class _SearchableImages:
    """All images that a search can return, by key, with their segments and positions."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments
        positions = [segment.positions() for segment in segments]
        keys = np.concatenate([one.keys(at)[0] for one, at in zip(segments, positions, strict=True)] or [_NONE])
        order = np.argsort(keys, kind="stable")
        self.keys = keys[order]
        self.positions = np.concatenate(positions or [_NONE])[order]
        counts = np.array([len(at) for at in positions], np.int64)
        self.segment_of = np.repeat(np.arange(len(segments), dtype=np.int16), counts)[order]
        self.seen = np.zeros(len(keys), np.bool_)

    def mark_seen(self, keys: Iterable[int]) -> NDArray[np.int64]:
        """Marks the entries of some keys as seen; returns the index of each entry, -1 if there is none."""
        wanted = np.array(list(keys), np.int64)
        entries = np.searchsorted(self.keys, wanted)
        known = entries < len(self.keys)
        known[known] = self.keys[entries[known]] == wanted[known]
        self.seen[entries[known]] = True
        return np.where(known, entries, -1)


_NONE = np.empty(0, np.int64)


def _compare(
    segment: Segment, positions: NDArray[np.int64], rows: list[FullImageRow], found: dict[str, list[str]]
) -> None:
    """Compares images of one segment with their rows; the bytes of vectors must be the same."""
    stored = segment.vectors(positions)
    truth = np.frombuffer(b"".join(row.vector for row in rows), "<f2").reshape(stored.shape)
    other = (stored.view(np.uint16) != truth.view(np.uint16)).any(axis=1) | ~np.isfinite(truth).all(axis=1)
    found[_VECTOR] += [_label(rows[index]) for index in np.flatnonzero(other).tolist()]
    items = segment.keys(positions)[1].tolist()
    last = -1
    for row, position, item in zip(rows, positions.tolist(), items, strict=True):
        image = segment.image(position)
        same = (item, image.id, image.digest) == (row.item, row.id, row.digest)
        # The images of an item mostly follow each other: it is parsed once.
        if same and item != last:
            same = _same_item(segment.item(position), row)
            last = item if same else -1
        if not same:
            found[_RECORD].append(_label(row))


def _same_item(item: Item, row: FullImageRow) -> bool:
    # As JSON: in Python True, 1 and 1.0 are equal.
    attributes = (json.dumps(one, sort_keys=True) for one in (item.attributes, json.loads(row.attributes)))
    return (item.id, item.title, item.url) == (row.item_id, row.title, row.url) and len(set(attributes)) == 1


def _label(row: FullImageRow) -> str:
    return f"{row.item_id}/{row.id}"


def _format(problem: str, examples: list[str]) -> str:
    more = " and others" if len(examples) > _EXAMPLES else ""
    return problem.format(count=f"{len(examples):,}", examples=", ".join(examples[:_EXAMPLES]) + more)
