"""Applies the store's changes to a collection that is being searched.

Searches that run know nothing of the changes after their view. So only changes of some age are applied: every search
that started before them has ended. A killed applier leaves the collection between two revisions; whoever reads it masks
everything that has changed since the last one recorded, and the next applier repeats the step.
"""

import time
from collections import Counter, defaultdict

import numpy as np

from index.gallery.store.base import BundleRow, Changes, ItemStore
from index.gallery.types import Progress
from index.gallery.vectors.qdrant.built import QdrantBuiltIndex
from index.gallery.vectors.qdrant.collection import Collection, CollectionState, step_name
from index.gallery.vectors.qdrant.payload import attribute_fields, make_point
from index.gallery.vectors.qdrant.settings import QdrantSettings
from index.gallery.vectors.qdrant.upload import choose_fields, measure, to_list, upload

_KEYS = 5000
"""Keys of a request."""


def apply_changes(store: ItemStore, bundle: BundleRow, built: QdrantBuiltIndex, on_progress: Progress) -> None:
    """Applies all changes up to now, some at a time, and records each step in the store."""
    collection, settings = built.collection, built.settings
    name, revision, state = built.name, built.revision, built.state
    done = 0
    collection.restore_confirmations()
    while True:
        changes = _read(store, bundle, collection, revision, settings.apply_batch)
        if changes.revision == revision:
            return
        following = step_name(collection.name, changes.revision)
        count = len(changes.removed) + len(changes.images)
        if count:
            time.sleep(settings.apply_delay)
        state = state.model_copy(update={"last": name, "next": following, "is_complete": False})
        collection.record(state)
        if count:
            state = _apply(collection, state, changes, settings)
        else:
            collection.mark(changes.revision)
        state = state.model_copy(update={"is_complete": True})
        collection.record(state)
        is_empty = not state.images
        store.set_index(bundle.key, None if is_empty else following, changes.revision)
        # From now on a store that names an earlier index was restored: it lacks what the collection has.
        state = state.model_copy(update={"last": following})
        collection.record(state)
        name, revision, done = following, changes.revision, done + count
        on_progress(done, done)
        if changes.is_last or is_empty:
            return


def _read(store: ItemStore, bundle: BundleRow, collection: Collection, since: int, limit: int) -> Changes:
    """Reads the next changes. Where removals are no longer listed, compares all images."""
    changes = store.read.changes(bundle.key, since, limit, whole_items=True)
    if since >= changes.forgotten:
        return changes
    with store.open_reader() as reader:
        changes = reader.changes(bundle.key, since, whole_items=True)
        held = np.fromiter((key for key, _ in collection.items()), np.int64)
        gone = np.setdiff1d(held, reader.image_keys(bundle.key))
    return changes._replace(removed=sorted({*changes.removed, *gone.tolist()}))


def _apply(
    collection: Collection, state: CollectionState, changes: Changes, settings: QdrantSettings
) -> CollectionState:
    """Applies changes; a repetition has the same result."""
    # Read before they are removed: another image may have to become the first of their items.
    items = set(collection.owners(changes.removed).values()) | {row.item for row in changes.images}
    rows = {row.key: row for row in changes.images}
    for start in range(0, len(changes.removed), _KEYS):
        collection.delete(changes.removed[start : start + _KEYS])
    upload(
        collection,
        [make_point(row, changes.items[row.item], to_list(row.vector), is_first=False) for row in changes.images],
        settings,
    )
    collection.mark(changes.revision)
    collection.require(changes.revision)
    largest = _mark_firsts(collection, sorted(items))
    names: Counter[tuple[str, str]] = Counter()
    for key in {row.item for row in changes.images}:
        names.update(attribute_fields(changes.items[key].attributes))
    fields = choose_fields(names, settings.indexed_attributes, state.fields)
    collection.index_attributes(fields[len(state.fields) :])
    state = state.model_copy(
        update={
            "images": collection.count(),
            "newest_key": max(state.newest_key, *rows, 0),
            "max_images_per_item": max(state.max_images_per_item, largest),
            "fields": fields,
        }
    )
    is_outgrown = (state.images > settings.exact_up_to) != (state.kind == "hnsw")
    return measure(collection, state, settings) if is_outgrown or state.images > 2 * state.measured else state


def _mark_firsts(collection: Collection, items: list[int]) -> int:
    """Marks exactly one image of each of some items as its first; returns the largest number of images of one."""
    largest = 0
    for start in range(0, len(items), _KEYS):
        images: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        for key, item, is_first in collection.firsts(items[start : start + _KEYS]):
            images[item].append((key, is_first))
        wrong: dict[bool, list[int]] = {True: [], False: []}
        for own in images.values():
            first = min(own)[0]
            for key, is_first in own:
                if is_first != (key == first):
                    wrong[key == first].append(key)
        for value, keys in wrong.items():
            if keys:
                collection.set_first(keys, value)
        largest = max(largest, *map(len, images.values()), 0)
    return largest
