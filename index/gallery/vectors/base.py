"""The second seam of a gallery: the vector index, derived from the store and disposable.

An index may be behind the store, never wrong: the gallery searches what changed since (the delta) exactly, and masks
what was removed or replaced. So a write is visible to the next search, whatever the engine's own consistency.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import Filter
from index.gallery.store.base import BundleRow, StoreReader
from index.gallery.types import Attribute, BuildReport, Facet, HitRecords, IndexStats, Item, Progress

Queries = NDArray[np.float32]
Positions = NDArray[np.int64]
Results = tuple[NDArray[np.float32], Positions]
"""Scores and positions of shape (queries, count), best first, padded with the score -inf and the position -1."""
GROUP_SIZE = 3.0
"""The estimate where nothing is known."""
_IMAGE_CHUNK = 512
"""Images that are compared at a time: their vectors fit into the processor's cache."""


class Segment(HitRecords, Protocol):
    """Images that are searched together; a position is valid for the segment that returned it."""

    @property
    def count(self) -> int:
        """The number of images that a search may return, or an upper bound where counting costs a request."""

    def session(self) -> "Segment":
        """Returns the segment for one search: an engine elsewhere keeps in it what it has fetched for the hits."""

    def is_empty(self) -> bool:
        """Whether a search would return nothing; `count` may be a bound."""

    def search(self, queries: Queries, count: int, *, filtered: bool) -> Results:
        """Returns the nearest positions of each query, padded only if the segment has fewer.

        They may be approximate. `filtered` if a user's filter restricts the segment.
        """

    def keys(self, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the store's keys of the images and of their items."""

    def positions(self) -> Positions:
        """Returns every position that a search may return."""

    def vectors(self, positions: Positions) -> NDArray[np.float16]: ...

    def values(self, attribute: str, positions: Positions) -> list[Attribute | None]:
        """Returns the value of an attribute of each position's item; None if the item does not have it."""

    def group_size(self, attribute: str) -> float:
        """Estimates how many images the items with the same value of an attribute have; only speed depends on it."""

    def scores(self, queries: Queries, best: float, count: int) -> tuple[Positions, NDArray[np.float64]]:
        """Returns every position that a search may return, and its best score over some query vectors.

        The order need be exact only for the best images of `count` items, of those that have none above the score
        `best`. Raises SearchError if the positions are too many for the engine.
        """

    def hold(self, positions: Positions) -> None:
        """Keeps the records of some positions of `scores`, as they are now, for hits."""


class LocalSegment:
    """The parts of a segment that are the same for all engines with the vectors in this process."""

    def session(self) -> Self:
        return self

    def is_empty(self: Segment) -> bool:
        return not self.count

    def group_size(self, attribute: str) -> float:
        return GROUP_SIZE

    def values(self: Segment, attribute: str, positions: Positions) -> list[Attribute | None]:
        return [self.item(position).attributes.get(attribute) for position in positions.tolist()]

    def scores(self: Segment, queries: Queries, best: float, count: int) -> tuple[Positions, NDArray[np.float64]]:
        # In double precision, where the order of a sum never decides how a score is rounded: the pages of a search must
        # agree on every rank, also when a compaction moves an image.
        positions, columns = self.positions(), queries.T.astype(np.float64)
        found = np.empty(len(positions), np.float64)
        for first in range(0, len(positions), _IMAGE_CHUNK):
            chunk = slice(first, first + _IMAGE_CHUNK)
            found[chunk] = (self.vectors(positions[chunk]).astype(np.float64) @ columns).max(axis=1)
        return positions, found

    def hold(self, positions: Positions) -> None:
        """Does nothing: records are read in place, and never change."""


class BuiltIndex(Protocol):
    """What an engine has built of one bundle's vectors, as of one revision; immutable."""

    @property
    def name(self) -> str | None:
        """Identifies what was built; None if it only stands in for an index that is missing or damaged."""

    @property
    def revision(self) -> int: ...

    @property
    def max_images_per_item(self) -> int: ...

    @property
    def whole_items(self) -> bool:
        """Whether the delta must hold all images of a changed item: the index finds them by what the item was."""

    @property
    def masked(self) -> int:
        """The number of its images that `after` removed, and of its items that it replaced."""

    def after(self, removed: Sequence[int], items: Mapping[int, Item]) -> Self:
        """Returns the index without some images, and with newer items; both by the store's keys.

        With `whole_items` it holds no image of these items any more.
        """

    def segment(self, filter: Filter | None) -> Segment:
        """Returns the images whose items match a filter."""

    def facets(
        self, count: int, names: Sequence[str] = (), *, filter: Filter | None = None, contains: str = ""
    ) -> Iterator[Facet]:
        """Yields the attributes of these names or, without any, those that most items have, at most MAX_FACETS.

        Counts the items that match a filter, and of their values those that contain a text in any case.
        """

    def newest_expiry(self, instant: int) -> int | None:
        """Returns the newest instant, up to a given one, at which items of the index expired; None if none has.

        A later instant up to the given one serves as well. The items may have changed since.
        """

    def is_due(self, pending: int) -> bool:
        """Whether a compaction pays off, with so many pending changes."""

    def stats(self, pending: int) -> IndexStats: ...


class VectorIndex(Protocol):
    """Builds and opens the indexes of a gallery's bundles."""

    @property
    def engine(self) -> str:
        """The engine's name for the statistics."""

    def open(self, bundle: BundleRow) -> BuiltIndex:
        """Opens what the store names as the bundle's index; raises IndexDamaged, or IndexUnavailable for now."""

    def load(self, reader: StoreReader, bundle: BundleRow) -> BuiltIndex:
        """Returns an exact index of the store's vectors, in memory, while there is none to open.

        Raises IndexUnavailable if they are too many for that.
        """

    def build(
        self, bundle_id: str, *, rebuild: bool = False, wait: bool = True, on_progress: Progress = ...
    ) -> BuildReport | None:
        """Brings a bundle's index up to the store's revision and records it there.

        One build of a gallery runs at a time. Returns None for a bundle without images, and, unless it is to `wait`,
        when another process is building. `rebuild` builds from scratch instead of extending the last index.
        """

    def is_building(self) -> bool:
        """Whether some process is building."""

    def newest_revision(self) -> int:
        """Returns the highest revision of all that was built, also of what the store does not name; 0 without any."""

    def clean(self) -> None:
        """Removes what no bundle of the store uses any more."""

    def close(self) -> None:
        """Releases connections; what was opened before can no longer be searched if it needs them."""

    def files(self, bundle: BundleRow) -> dict[str, Path]:
        """Returns name to path of the files that a snapshot needs to open the bundle's index; raises IndexDamaged."""
