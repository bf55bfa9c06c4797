"""Following the catalogue: what one process searches, always as new as the newest write."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.ann import Searcher, Selection
from index.catalogue import Catalogue
from index.delta import Block, after
from index.filters import Filter
from index.generations import Generation, GenerationError, open_generation
from index.items import Item
from index.reader import BundleRow, Changes

log = logging.getLogger(__name__)

_MASKS = 16
"""Filters whose matching images a state remembers; a mask of a million images is a megabyte."""


class Segment(NamedTuple):
    """A part of a state that is searched as a whole: the generation, or a block of the delta."""

    generation: Generation
    block: Block | None
    selection: Selection | None
    """The positions that may be answered; all of them when there is none."""

    @property
    def searcher(self) -> Searcher:
        return self.generation.searcher if self.block is None else self.block.searcher


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
        """Images that a compaction would move into the generation or out of it."""
        dead = int(np.count_nonzero(self.generation.alive)) - int(np.count_nonzero(self.alive))
        return sum(len(block) for block in self.blocks) + dead

    def segments(self, wanted: Filter | None) -> list[Segment]:
        """The parts to search, each with the positions that match the filter."""
        found = self.masks.get(wanted)
        if found is None:
            found = self._segments(wanted)
            while len(self.masks) >= _MASKS:
                self.masks.pop(next(iter(self.masks)), None)
            self.masks[wanted] = found
        return found

    def _segments(self, wanted: Filter | None) -> list[Segment]:
        generation = self.generation
        if wanted is None:
            whole = len(self.alive) == np.count_nonzero(self.alive)
            segments = [Segment(generation, None, None if whole else Selection(self.alive))]
            segments += [Segment(generation, block, block.selection) for block in self.blocks]
        else:
            matching = generation.columns.mask(wanted)
            for place, key in self.changed.items():
                matching[place] = wanted.matches(self.items[key].attributes)
            segments = [Segment(generation, None, Selection(matching[generation.owners] & self.alive))]
            for block in self.blocks:
                mask = [wanted.matches(self.items[key].attributes) for key in block.items.tolist()]
                segments.append(Segment(generation, block, Selection(np.array(mask, np.bool_) & block.alive)))
        return [segment for segment in segments if segment.selection is None or segment.selection.count]

    def item(self, key: int, owner: int) -> Item:
        """An item by its key, and by its place in the generation."""
        newer = self.items.get(key)
        return self.generation.item(owner) if newer is None else newer

    def living(self) -> Iterator[int]:
        """The keys of all images that can be found, for checks."""
        yield from self.generation.keys[self.alive].tolist()
        for block in self.blocks:
            yield from block.keys[block.alive].tolist()


class Follower:
    """Keeps one bundle's state as new as the catalogue; any thread may ask for it."""

    def __init__(self, catalogue: Catalogue, root: Path, bundle: BundleRow, on_damage: Callable[[], None]) -> None:
        self._catalogue = catalogue
        self._root = root
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._opening: threading.Thread | None = None
        self._damaged: str | None = None
        self._version = -1
        self._state = self._start(bundle)

    def state(self, version: int) -> State:
        """The newest state; `version` is the catalogue's, looked at before."""
        if version == self._version:
            return self._state
        with self._lock:
            current = self._catalogue.watch.current()
            bundle = self._catalogue.watch.bundle(self._state.bundle.id)
            if bundle is None or self._state.change < current.forgotten:
                # Too far behind to follow: some removals are no longer listed.
                self._state = self._start(bundle or self._state.bundle)
            elif bundle.generation not in (None, self._state.generation.name, self._damaged):
                self._open_aside(bundle)
            changes = self._catalogue.watch.changes(self._state.bundle.key, self._state.change)
            self._state = self._state.following(changes)
            self._version = version
            return self._state

    def _start(self, bundle: BundleRow) -> State:
        """From the generation on disk, or else from the catalogue itself: slower to begin with, but exact."""
        while bundle.generation not in (None, self._damaged):
            try:
                return self._opened(bundle)
            except GenerationError as error:
                newer = self._catalogue.watch.bundle(bundle.id) or bundle
                if newer.generation == bundle.generation:
                    self._tell_damage(bundle, error)
                bundle = newer  # or else it was replaced while we looked
        with self._catalogue.reading() as reader:
            return State.of(bundle, Generation.in_memory(reader, bundle.key, bundle.dimension))

    def _opened(self, bundle: BundleRow) -> State:
        generation, _ = open_generation(self._root / str(bundle.generation))
        return State.of(bundle, generation)

    def _tell_damage(self, bundle: BundleRow, error: GenerationError) -> None:
        log.warning("%s Until then searches are exact, from the catalogue.", error)
        self._damaged = bundle.generation
        self._on_damage()

    def _open_aside(self, bundle: BundleRow) -> None:
        """Opens a newer generation beside the searches, which go on with the old one and the delta."""
        if self._opening is None:
            self._opening = threading.Thread(target=self._adopt, args=(bundle,), name="open-generation", daemon=True)
            self._opening.start()

    def _adopt(self, bundle: BundleRow) -> None:
        try:
            state = self._opened(bundle)
            with self._lock:
                changes = self._catalogue.watch.changes(bundle.key, state.change)
                self._state = state.following(changes)
        except GenerationError as error:
            if (self._catalogue.read.bundle(bundle.id) or bundle).generation == bundle.generation:
                self._tell_damage(bundle, error)
        finally:
            self._opening = None
            self._version = -1  # the next search looks again

    def settle(self) -> None:
        """Waits for a generation that is being opened."""
        opening = self._opening
        if opening:
            opening.join()
