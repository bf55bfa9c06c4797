"""Pinned items: read from the store, because a search need not find them."""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from index.gallery.expiry import is_expired
from index.gallery.filters import Filter
from index.gallery.groups import group_key
from index.gallery.search import SCORE_UNIT, to_score
from index.gallery.store.base import StoreReader
from index.gallery.types import Hit, Item, StoredImage, StoredItem
from index.rankings import Explanation


class Pin:
    """A pinned item, and the vectors of its images; where its hit reads them."""

    def __init__(self, stored: StoredItem, vectors: dict[str, NDArray[np.float32]]) -> None:
        self._item = stored.item
        self._images = [image for image in stored.images if image.id in vectors]
        self._vectors = np.stack([vectors[image.id] for image in self._images])

    def item(self, position: int) -> Item:
        return self._item

    def image(self, position: int) -> StoredImage:
        return self._images[position]

    def hit(self, group: NDArray[np.float32], *, explain: bool) -> Hit:
        """Returns the hit of its image that is nearest to some query vectors."""
        scores = (self._vectors.astype(np.float64) @ group.T.astype(np.float64)).max(axis=1)
        position = int(scores.argmax())
        hit = Hit(to_score(round(scores[position] * -SCORE_UNIT)), self, position)
        if explain:
            hit.explanation = Explanation(
                similarity=hit.score,
                shares=[],
                score=hit.score,
                similarity_place=None,
                reason="pinned",
                detail="The ranking pins it.",
            )
        return hit


class PinReader:
    """The pinned items of a ranking that match a search, one per group."""

    def __init__(
        self,
        reader: StoreReader,
        item_ids: Sequence[str],
        bundle: int,
        *,
        filter: Filter | None,
        now: int,
        exclude: Collection[str],
        group_by: str | None,
    ) -> None:
        self._reader = reader
        self._bundle = bundle
        self._filter = filter
        self._now = now
        self._exclude = exclude
        self._group_by = group_by
        self.count = len(item_ids)
        self._ids = item_ids
        self._groups: dict[int, str] = {}
        if group_by:
            for item_id in item_ids:
                stored = self._read(item_id)
                key = self._group(stored) if stored else None
                if key is not None and self._vectors(item_id):
                    self._groups.setdefault(key, item_id)

    @property
    def groups(self) -> frozenset[int]:
        """The keys of the groups that pinned items stand for."""
        return frozenset(self._groups)

    def take(self, start: int, count: int) -> tuple[list[Pin], int]:
        """Returns up to `count` pins from a number on, and the number after them."""
        pins: list[Pin] = []
        for number in range(start, self.count):
            if len(pins) == count:
                return pins, number
            stored = self._read(self._ids[number])
            if stored and self._groups.get(self._group(stored) or 0, stored.item.id) == stored.item.id:
                vectors = self._vectors(stored.item.id)
                if vectors:
                    pins.append(Pin(stored, vectors))
        return pins, self.count

    def _read(self, item_id: str) -> StoredItem | None:
        stored = None if item_id in self._exclude else self._reader.get_item(item_id)
        if stored is None or is_expired(stored.item.attributes, self._now):
            return None
        return stored if self._filter is None or self._filter.matches(stored.item.attributes) else None

    def _vectors(self, item_id: str) -> dict[str, NDArray[np.float32]]:
        return self._reader.item_vectors(item_id, self._bundle)

    def _group(self, stored: StoredItem) -> int | None:
        value = stored.item.attributes.get(self._group_by) if self._group_by else None
        return None if value is None else group_key(value)
