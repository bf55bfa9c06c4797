"""A generation without what was removed or replaced since it was built."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import Filter
from index.gallery.types import Attribute, Facet, IndexStats, Item, StoredImage
from index.gallery.vectors.base import LocalSegment, Positions, Queries, Results
from index.gallery.vectors.faiss.generation import Generation
from index.gallery.vectors.faiss.searcher import AllowList, stored_vectors
from index.gallery.vectors.faiss.settings import FaissSettings


class GenerationSegment(LocalSegment):
    """The images of a generation that may be returned."""

    def __init__(self, generation: Generation, items: Mapping[int, Item], selection: AllowList | None) -> None:
        """`items` replace those of the generation; without a selection all positions may be returned."""
        self._generation = generation
        self._items = items
        self._selection = selection
        self.count = generation.searcher.count if selection is None else selection.count

    def search(self, queries: Queries, count: int, *, filtered: bool) -> Results:
        return self._generation.searcher.search(queries, count, self._selection, filtered=filtered)

    def keys(self, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        generation = self._generation
        return generation.keys[positions], generation.item_keys[generation.owners[positions]]

    def item(self, position: int) -> Item:
        row = int(self._generation.owners[position])
        newer = self._items.get(int(self._generation.item_keys[row]))
        return self._generation.item(row) if newer is None else newer

    def image(self, position: int) -> StoredImage:
        return self._generation.image(position)

    def values(self, attribute: str, positions: Positions) -> list[Attribute | None]:
        rows = self._generation.owners[positions]
        values = self._generation.columns.values(attribute, rows)
        if values is None:
            return super().values(attribute, positions)
        if self._items:
            newer = map(self._items.get, self._generation.item_keys[rows].tolist())
            values = [item.attributes.get(attribute) if item else old for item, old in zip(newer, values, strict=True)]
        return values

    def group_size(self, attribute: str) -> float:
        generation = self._generation
        return generation.columns.group_size(attribute) * generation.images / max(1, len(generation.item_keys))

    def positions(self) -> Positions:
        return np.arange(self.count) if self._selection is None else np.flatnonzero(self._selection.mask)

    def vectors(self, positions: Positions) -> NDArray[np.float16]:
        return stored_vectors(self._generation.searcher.storage)[positions]


@dataclass(frozen=True)
class MaskedGeneration:
    """A generation as of a later revision: positions that are still valid, and items that changed."""

    generation: Generation
    settings: FaissSettings
    bytes: int
    alive: NDArray[np.bool_]
    """Whether the image of each position still exists, with that vector."""
    items: Mapping[int, Item] = field(default_factory=dict)
    """Items of the generation that changed, by key."""
    rows: Mapping[int, int] = field(default_factory=dict)
    """Their rows in the generation, by key."""
    whole_items: bool = False

    @property
    def name(self) -> str | None:
        return self.generation.name

    @property
    def revision(self) -> int:
        return self.generation.revision

    @property
    def max_images_per_item(self) -> int:
        return self.generation.max_images_per_item

    @property
    def masked(self) -> int:
        return self.generation.images - int(np.count_nonzero(self.alive)) + len(self.items)

    def after(self, removed: Sequence[int], items: Mapping[int, Item]) -> Self:
        alive = self.alive
        positions = self.generation.positions(removed) if removed else ()
        if len(positions):
            alive = alive.copy()
            alive[positions] = False
        rows = self.generation.item_rows(list(items))
        return replace(
            self,
            alive=alive,
            items={**self.items, **{key: items[key] for key in rows}},
            rows={**self.rows, **rows},
        )

    def segment(self, filter: Filter | None) -> GenerationSegment:
        if filter is not None:
            matching = self.generation.columns.mask(filter)
            for key, row in self.rows.items():
                matching[row] = filter.matches(self.items[key].attributes)
            selection: AllowList | None = AllowList(matching[self.generation.owners] & self.alive)
        else:
            selection = None if self.alive.all() else AllowList(self.alive)
        return GenerationSegment(self.generation, self.items, selection)

    def facets(
        self, count: int, names: Sequence[str] = (), *, filter: Filter | None = None, contains: str = ""
    ) -> Iterator[Facet]:
        return self.generation.columns.facets(count, names, filter=filter, contains=contains)

    def newest_expiry(self, instant: int) -> int | None:
        expiries = self.generation.expiries
        position = bisect_right(expiries, instant)
        return expiries[position - 1] if position else None

    def is_due(self, pending: int) -> bool:
        if self.name is None:  # never built: everything is pending
            return self.settings.is_compaction_due(0, self.generation.images + pending)
        return self.settings.is_compaction_due(self.generation.images, pending)

    def stats(self, pending: int) -> IndexStats:
        plan = self.generation.searcher.plan
        return IndexStats(
            engine="faiss",
            name=self.name,
            revision=self.revision,
            pending=pending,
            kind=plan.kind,
            recall=plan.recall,
            target=plan.target,
            effort=plan.effort,
            bytes=self.bytes,
            device=(gpu.device if (gpu := self.generation.searcher.gpu) else None) or "cpu",
        )
