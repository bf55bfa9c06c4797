"""What a search reads: one bundle's vectors as of one revision, in segments that are searched one by one."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from sys import getsizeof

import numpy as np
from numpy.typing import NDArray

from index.gallery.expiry import expiry_of, hide_expired
from index.gallery.filters import Filter
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow, Changes, StoreReader
from index.gallery.types import Item, StoredImage
from index.gallery.vectors.base import BuiltIndex, LocalSegment, Positions, Queries, Results, Segment
from index.gallery.vectors.delta import Block, apply_changes
from index.gallery.vectors.faiss.searcher import AllowList
from index.items import values_of


class BlockSegment(LocalSegment):
    """The images of a delta block that may be returned."""

    def __init__(self, block: Block, items: Mapping[int, Item], selection: AllowList | None) -> None:
        self._block = block
        self._items = items
        self._selection = selection
        self.count = len(block) if selection is None else selection.count

    def search(self, queries: Queries, count: int, *, filtered: bool) -> Results:
        return self._block.searcher.search(queries, count, self._selection, filtered=filtered)

    def keys(self, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._block.keys[positions], self._block.items[positions]

    def item(self, position: int) -> Item:
        return self._items[int(self._block.items[position])]

    def image(self, position: int) -> StoredImage:
        name, digest = self._block.images[position]
        return StoredImage.model_construct(id=name, digest=digest)

    def positions(self) -> Positions:
        return np.arange(len(self._block)) if self._selection is None else np.flatnonzero(self._selection.mask)

    def vectors(self, positions: Positions) -> NDArray[np.float16]:
        return self._block.vectors[positions]


def _memory_of(item: Item) -> int:
    """Returns the memory of an item's texts; all other parts are small."""
    values = chain.from_iterable(map(values_of, item.attributes.values()))
    return sum(map(getsizeof, chain((item.title, item.url), item.attributes, values)))


@dataclass(frozen=True)
class View:
    """One bundle's vectors as of one revision: the built index, and the delta since."""

    bundle: BundleRow
    index: BuiltIndex
    revision: int
    settings: GallerySettings
    blocks: tuple[Block, ...] = ()
    items: Mapping[int, Item] = field(default_factory=dict)
    """By key: the items of the delta's images."""
    expiries: tuple[int, ...] = ()
    """Instants at which items expire, or did, that were added or changed since the index was built; sorted."""
    changed_bytes: int = 0
    """The memory that the items took which were added or changed since the index was built."""
    _segments: dict[Filter | None, list[Segment]] = field(default_factory=dict)
    """A cache; everything else never changes."""

    def apply(self, changes: Changes) -> "View":
        """Returns the view after some more changes."""
        if changes.revision == self.revision:
            return self
        moved = [*changes.removed, *(row.key for row in changes.images)]
        blocks = apply_changes(self.blocks, moved, changes.images, self.bundle.dimension, self.settings.delta_block)
        items = {**self.items, **changes.items}
        if len(changes.items) > len(changes.images) or changes.removed:
            # Items without an image in the delta are dropped: otherwise memory would grow with every put and delete.
            used = {key for block in blocks for key in block.items[block.alive].tolist()}
            items = {key: item for key, item in items.items() if key in used}
        expiries = {expiry for item in changes.items.values() if (expiry := expiry_of(item.attributes)) is not None}
        return replace(
            self,
            expiries=tuple(sorted(expiries.union(self.expiries))) if expiries else self.expiries,
            index=self.index.after(moved, changes.items),
            revision=changes.revision,
            blocks=blocks,
            items=items,
            changed_bytes=self.changed_bytes + sum(map(_memory_of, changes.items.values())),
            _segments={},
        )

    def catch_up(self, reader: StoreReader) -> "View":
        """Returns the view as of the instant of a reader of `ItemStore.open_reader`.

        Where some removals are no longer listed, the images that are gone are found by comparing all of them.
        """
        changes = reader.changes(self.bundle.key, self.revision, whole_items=self.index.whole_items)
        if self.revision < changes.forgotten:
            keys = [segment.keys(segment.positions())[0] for segment in self.segments(None)]
            gone = np.setdiff1d(np.concatenate([*keys, np.empty(0, np.int64)]), reader.image_keys(self.bundle.key))
            changes = changes._replace(removed=gone.tolist())
        return self.apply(changes)

    @cached_property
    def pending(self) -> int:
        """The number of images and items that were added, changed or removed since the index was built."""
        return sum(len(block) for block in self.blocks) + self.index.masked

    @property
    def is_compaction_due(self) -> bool:
        """Whether the index should be brought up to date; an engine may decide so when changes become old."""
        is_lost = self.index.name is None and self.bundle.index_name is not None
        return is_lost or self.changed_bytes > self.settings.max_delta_bytes or self.index.is_due(self.pending)

    @cached_property
    def has_several_images(self) -> bool:
        """Whether an item may be found by more than one image."""
        return bool(self.blocks) or self.index.max_images_per_item > 1

    def newest_expiry(self, instant: int) -> int | None:
        """Returns the newest instant, up to a given one, at which items expired; None if none has.

        It stays the same until another item expires, and so does a filter that hides what expired until then.
        """
        position = bisect_right(self.expiries, instant)
        found = self.index.newest_expiry(instant), self.expiries[position - 1] if position else None
        return max((expiry for expiry in found if expiry is not None), default=None)

    def segments(self, filter: Filter | None, expired: int | None = None) -> list[Segment]:
        """Returns the segments to search, restricted to the images whose items match the filter.

        Leaves out items that have expired at an instant, if there is one: `newest_expiry` of the time of the search.
        """
        if expired is not None:
            filter = hide_expired(filter, expired)
        found = self._segments.get(filter)
        if found is None:
            candidates = [self.index.segment(filter), *(self._block_segment(block, filter) for block in self.blocks)]
            found = [segment for segment in candidates if segment.count]
            if filter is None or filter.length <= self.settings.cached_length:
                # A copy of the keys: other threads add to the cache concurrently.
                for oldest in list(self._segments)[: 1 - self.settings.cached_filters]:
                    self._segments.pop(oldest, None)
                self._segments[filter] = found
        return found

    def _block_segment(self, block: Block, filter: Filter | None) -> BlockSegment:
        if filter is None:
            return BlockSegment(block, self.items, block.selection)
        matching = [
            alive and filter.matches(self.items[key].attributes)
            for key, alive in zip(block.items.tolist(), block.alive.tolist(), strict=True)
        ]
        return BlockSegment(block, self.items, AllowList(np.array(matching, np.bool_)))
