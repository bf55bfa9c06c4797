"""What a search looks at: one bundle's vectors as of one change, in parts that are searched one by one."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import Filter
from index.gallery.store.sqlite_reader import BundleRow, Changes
from index.gallery.types import Item, StoredImage
from index.gallery.vectors.delta import Block, after
from index.gallery.vectors.faiss.generation import Generation
from index.gallery.vectors.faiss.searcher import AllowList, Searcher

_MASKS = 16
"""Filters whose matching images a state remembers; a mask of a million images is a megabyte."""


class GenerationPart:
    """The generation, with the positions of it that may be answered; all of them without a selection."""

    def __init__(self, state: "State", selection: AllowList | None) -> None:
        self.searcher: Searcher = state.generation.searcher
        self.selection = selection
        self._generation = state.generation
        self._newer = state.items

    def keys(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The keys of images and of their items."""
        generation = self._generation
        return generation.keys[positions], generation.item_keys[generation.owners[positions]]

    def item(self, position: int) -> Item:
        owner = int(self._generation.owners[position])
        newer = self._newer.get(int(self._generation.item_keys[owner]))
        return self._generation.item(owner) if newer is None else newer

    def image(self, position: int) -> StoredImage:
        return self._generation.image(position)


class BlockPart:
    """A block of the delta, likewise."""

    def __init__(self, state: "State", block: Block, selection: AllowList | None) -> None:
        self.searcher = block.searcher
        self.selection = selection
        self._block = block
        self._items = state.items

    def keys(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The keys of images and of their items."""
        return self._block.keys[positions], self._block.items[positions]

    def item(self, position: int) -> Item:
        return self._items[int(self._block.items[position])]

    def image(self, position: int) -> StoredImage:
        return self._block.images[position]


Segment = GenerationPart | BlockPart


@dataclass(frozen=True)
class State:
    """One bundle's vectors as of one change: a generation, and what came or went since it was built."""

    bundle: BundleRow
    generation: Generation
    change: int
    alive: NDArray[np.bool_]
    """Of each position of the generation whether its image is still there, with that vector."""
    blocks: tuple[Block, ...] = ()
    items: dict[int, Item] = field(default_factory=dict)
    """Items that are newer than the generation, by key. Shared by the states of a generation: it only grows."""
    changed: dict[int, int] = field(default_factory=dict)
    """Those of them that the generation holds too: their place there to their key."""
    masks: dict[Filter | None, list[Segment]] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: BundleRow, generation: Generation) -> "State":
        return cls(bundle, generation, generation.change, generation.alive)

    def following(self, changes: Changes) -> "State":
        """The state after some more changes."""
        if changes.change == self.change:
            return self
        moved = [*changes.removed, *(row.key for row in changes.images)]
        alive = self.alive
        positions = self.generation.positions(moved) if moved else ()
        if len(positions):
            alive = alive.copy()
            alive[positions] = False
        self.items.update(changes.items)
        return replace(
            self,
            change=changes.change,
            alive=alive,
            blocks=after(self.blocks, moved, changes.images, self.bundle.dimension),
            changed=self.changed | self.generation.owners_of(list(changes.items)),
            masks={},
        )

    @property
    def pending(self) -> int:
        """Images that came or went since the generation was built, and items of it that changed."""
        dead = int(np.count_nonzero(self.generation.alive)) - int(np.count_nonzero(self.alive))
        return sum(len(block) for block in self.blocks) + dead + len(self.changed)

    def segments(self, wanted: Filter | None) -> list[Segment]:
        """The parts to search, each with the positions that match the filter."""
        found = self.masks.get(wanted)
        if found is None:
            found = self._segments(wanted)
            # Copied at one go: other threads add to it meanwhile.
            for oldest in list(self.masks)[: 1 - _MASKS]:
                self.masks.pop(oldest, None)
            self.masks[wanted] = found
        return found

    def _segments(self, wanted: Filter | None) -> list[Segment]:
        generation = self.generation
        if wanted is None:
            whole = len(self.alive) == np.count_nonzero(self.alive)
            segments: list[Segment] = [GenerationPart(self, None if whole else AllowList(self.alive))]
            segments += [BlockPart(self, block, block.selection) for block in self.blocks]
        else:
            matching = generation.columns.mask(wanted)
            for place, key in self.changed.items():
                matching[place] = wanted.matches(self.items[key].attributes)
            segments = [GenerationPart(self, AllowList(matching[generation.owners] & self.alive))]
            for block in self.blocks:
                mask = [wanted.matches(self.items[key].attributes) for key in block.items.tolist()]
                segments.append(BlockPart(self, block, AllowList(np.array(mask, np.bool_) & block.alive)))
        return [segment for segment in segments if (segment.selection or segment.searcher).count]
