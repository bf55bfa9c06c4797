"""A collection as of a revision: without what was removed or replaced since, which the delta holds."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.gallery.errors import IndexDamaged, SearchError
from index.gallery.filters import Filter
from index.gallery.types import Attribute, Facet, IndexStats, Item, StoredImage
from index.gallery.vectors.base import GROUP_SIZE, LocalSegment, Positions, Queries, Results
from index.gallery.vectors.faiss.masked import MaskedGeneration
from index.gallery.vectors.faiss.searcher import EXACT, Searcher, exact_index
from index.gallery.vectors.qdrant.collection import (
    SCORE_ERROR,
    Collection,
    CollectionState,
    Content,
    Neighbours,
)
from index.gallery.vectors.qdrant.conditions import translate, translate_for_counting
from index.gallery.vectors.qdrant.payload import Record
from index.gallery.vectors.qdrant.settings import QdrantSettings

ENGINE = "qdrant"
_MASK_ALLOWANCE = 64
"""Points that a search fetches at first for those that are masked."""
_FIRST_ALLOWANCE, _RANK_ALLOWANCE = 2, 16
"""Points that a search fetches in addition, because exact scores change the order of near ones: at first, and when the
order is not certain with these."""
_MAX_WHOLE = 32
"""Points that a search returns with their vectors; of more, only those are fetched that may be among the first."""
_MAX_NEAR = 256
"""Points with nearly equal scores among which a search looks for the best."""
_MAX_SCANS = 8
"""Query vectors for which a deep page lets Qdrant compare all vectors, and reads all scores of each. For more, it reads
the vectors instead, once."""
_BLOCK = 1024
"""Points that are read at a time to be filtered: those that match only Qdrant's wider filter may be many."""
_WIDEN_FACTOR = 4
_Ranked = list[tuple[int, float]]
"""Points with their exact scores, best first."""


@dataclass(frozen=True)
class QdrantBuiltIndex:
    """Implements `BuiltIndex`. Opening one costs one request, so a new one is opened after each applied step."""

    collection: Collection
    name: str
    revision: int
    state: CollectionState
    settings: QdrantSettings
    opened: float = field(default_factory=time.monotonic)
    first_expiry: int | None = None
    """An instant before which no item expires; None if none does."""
    gone: frozenset[int] = frozenset()
    """Keys of images that were removed, replaced or added since: the delta holds what there is of them."""
    whole_items: bool = True

    @property
    def max_images_per_item(self) -> int:
        return self.state.max_images_per_item

    @property
    def masked(self) -> int:
        return sum(key <= self.state.newest_key for key in self.gone)

    def after(self, removed: Sequence[int], items: Mapping[int, Item]) -> "QdrantBuiltIndex":
        return replace(self, gone=self.gone.union(removed))

    def segment(self, filter: Filter | None) -> "QdrantSegment":
        return QdrantSegment(self, filter)

    def facets(
        self, count: int, names: Sequence[str] = (), *, filter: Filter | None = None, contains: str = ""
    ) -> Iterator[Facet]:
        known = self.collection.names(translate_for_counting(None), self.state.fields)
        matching = translate_for_counting(filter)
        for name in [name for name in names if name in known] if names else known:
            yield self.collection.facet(name, count, matching, contains)

    def newest_expiry(self, instant: int) -> int | None:
        return instant if self.first_expiry is not None and self.first_expiry <= instant else None

    def is_due(self, pending: int) -> bool:
        is_old = time.monotonic() - self.opened > self.settings.max_age
        return pending > self.settings.min_pending or (pending > 0 and is_old)

    def stats(self, pending: int) -> IndexStats:
        state = self.state
        return IndexStats(
            engine=ENGINE,
            name=self.name,
            revision=self.revision,
            pending=pending,
            kind=state.kind,
            recall=state.recall,
            target=state.target,
            effort=state.effort,
        )


class LoadedVectors(MaskedGeneration):
    """The store's vectors in memory, while there is no collection to open."""

    def stats(self, pending: int) -> IndexStats:
        return super().stats(pending).model_copy(update={"engine": ENGINE})


class QdrantSegment:
    """The images of a collection that may be returned; their keys are the positions.

    Results come with their records, which are kept for the hits: each search has a segment of its own.
    """

    def __init__(self, index: QdrantBuiltIndex, filter: Filter | None, condition: Any | None = None) -> None:
        """`condition` is the filter as Qdrant's, if it was translated before."""
        self._index = index
        self._filter = filter
        self._condition = translate(filter) if condition is None else condition
        self._records: dict[int, Record] = {}
        self._owners: dict[int, int] = {}
        self.count = index.state.images
        """An upper bound: how many match a filter, and are not masked, is not known."""

    def session(self) -> "QdrantSegment":
        return QdrantSegment(self._index, self._filter, self._condition)

    def is_empty(self) -> bool:
        if not self._filter:
            return self.count <= self._index.masked
        for _, points in self._pages(np.ones((1, self._index.state.dimension), np.float32), 1):
            return not points
        return True

    def search(self, queries: Queries, count: int, *, filtered: bool) -> Results:
        scores = np.full((len(queries), count), -np.inf, np.float32)
        positions = np.full((len(queries), count), -1, np.int64)
        for row, points in self._pages(queries, count):
            for column, (key, score) in enumerate(points[:count]):
                scores[row, column], positions[row, column] = score, key
        return scores, positions

    def _pages(self, queries: Queries, count: int) -> Iterator[tuple[int, _Ranked]]:
        """Yields for each query at least the `count` nearest points that may be returned, or all there are.

        A search that finds fewer points than it asked for is repeated by comparing all vectors. One whose order is not
        certain asks for more, up to a depth: thousands may have nearly equal scores.
        """
        limit = count + _FIRST_ALLOWANCE + min(_MASK_ALLOWANCE, len(self._index.gone))
        effort = self._effort(limit)
        wanted, pending = count, list(range(len(queries)))
        while pending:
            contents: dict[int, Content] = {}
            answers = self._index.collection.search(
                queries[pending],
                limit,
                filter=self._condition,
                effort=effort,
                contents=contents if limit * len(pending) <= _MAX_WHOLE else None,
            )
            # Fewer than the limit are all there are.
            near = [self._near_best(points, wanted if len(points) == limit else limit) for points in answers]
            found = self._fetch({key for own in near for key in own}, contents)
            is_deep = limit >= count + _RANK_ALLOWANCE if effort else limit > _WIDEN_FACTOR * count + _MAX_NEAR
            left, is_short = [], False
            for row, points, own in zip(pending, answers, near, strict=True):
                ranked = self._rank(queries[row], [key for key in own if key in found], found)
                is_all = len(points) < limit and not effort
                if is_all or (len(ranked) >= count and (is_deep or _is_final(ranked, points, count))):
                    yield row, ranked
                else:
                    left.append(row)
                    is_short = is_short or len(points) < limit
            pending = left
            if effort and is_short:
                effort = 0
            elif limit < count + _RANK_ALLOWANCE:
                limit = count + _RANK_ALLOWANCE
            else:  # of the first points some may match only Qdrant's wider filter: then all are compared
                bound = self._index.settings.exhaustive_up_to
                if pending and self._filter and limit > bound + len(self._index.gone):
                    raise SearchError(
                        f"The filter has to be compared with more than {bound:,} images.",
                        "Add a condition: texts with the same beginning are compared one by one.",
                    )
                limit = wanted = _WIDEN_FACTOR * limit
            effort = self._effort(limit) if effort else 0

    def _near_best(self, points: Neighbours, count: int) -> list[int]:
        """Returns the points that may be among the first `count`: Qdrant's scores are only nearly exact."""
        kept = [(key, score) for key, score, _ in points if key not in self._index.gone]
        if len(kept) <= count:
            return [key for key, _ in kept]
        last = kept[count - 1][1] - 2 * SCORE_ERROR
        return [key for row, (key, score) in enumerate(kept) if row < count or score >= last]

    def _fetch(self, keys: Iterable[int], contents: dict[int, Content]) -> dict[int, bytes]:
        """Returns vectors, and keeps the records; leaves out what matches only Qdrant's wider filter."""
        found: dict[int, bytes] = {}
        missing = [key for key in keys if key not in contents]
        known = [{key: contents[key] for key in keys if key in contents}]
        read = (self._index.collection.contents(block, self._index.settings.timeout) for block in _blocks(missing))
        for part in chain(known, read):
            for key, (record, vector) in part.items():
                if self._filter is None or self._filter.matches(record.attributes):
                    self._records[key], found[key] = record, vector
        return found

    def _rank(self, query: NDArray[np.float32], keys: list[int], vectors: Mapping[int, bytes]) -> _Ranked:
        """Ranks by the arithmetic of the delta, so that a score is the same before and after an image was applied."""
        if not keys:
            return []
        index = exact_index(self._join([vectors[key] for key in keys]))
        scores, order = Searcher(index, EXACT).search(query[None], len(keys))
        return [(keys[row], score) for score, row in zip(scores[0].tolist(), order[0].tolist(), strict=True)]

    def _effort(self, limit: int) -> int:
        state, settings = self._index.state, self._index.settings
        if state.kind == "exact" or not state.effort:
            return 0
        return max(limit, state.effort * (settings.filtered_factor if self._filter else 1))

    def keys(self, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        owners = [self._owner(key) for key in positions.tolist()]
        return positions, np.array(owners, np.int64)

    def _owner(self, key: int) -> int:
        record = self._records.get(key)
        return record.item if record else self._owners[key]

    def item(self, position: int) -> Item:
        return self._record(position).parse()[0]

    def image(self, position: int) -> StoredImage:
        return self._record(position).parse()[1]

    def group_size(self, attribute: str) -> float:
        return GROUP_SIZE

    def values(self, attribute: str, positions: Positions) -> list[Attribute | None]:
        self.hold(positions)
        return [self._records[key].attributes.get(attribute) for key in positions.tolist()]

    def _record(self, key: int) -> Record:
        if key not in self._records:
            self.hold(np.array([key]))
        return self._records[key]

    def hold(self, positions: Positions) -> None:
        missing = [key for key in positions.tolist() if key not in self._records]
        if missing:
            found = self._index.collection.records(missing)
            self._check(missing, found)
            self._records.update(found)

    def _check(self, keys: Sequence[int], found: Mapping[int, object]) -> None:
        lost = [key for key in keys if key not in found]
        if lost:
            raise IndexDamaged(
                f"The collection {self._index.collection.name} has lost image {lost[0]}.",
                "Rebuild it: lookalike gallery compact --rebuild.",
            )

    def scores(self, queries: Queries, best: float, count: int) -> tuple[Positions, NDArray[np.float64]]:
        index = self._index
        bound = index.settings.exhaustive_up_to
        too_many = SearchError(f"This search has more than {bound:,} images to page through.", "Narrow it by a filter.")
        if len(queries) > _MAX_SCANS:
            if index.collection.count(self._condition) > bound:
                raise too_many
            return LocalSegment.scores(self, queries, best, count)
        limit = min(bound + 1, index.state.images + len(index.gone) + 1)
        rough: dict[int, float] = {}
        for query in queries:
            (points,) = index.collection.search(
                query[None], limit, filter=self._condition, owners=True, timeout=index.settings.write_timeout
            )  # fmt: skip
            if len(points) > bound:
                raise too_many
            for key, score, item in points:
                if key not in index.gone:
                    rough[key] = max(score, rough.get(key, -np.inf))
                    self._owners[key] = item
        if self._filter:
            rough = {key: rough[key] for key, _ in self._matching(list(rough))}
        keys = np.array(sorted(rough, key=lambda key: -rough[key]), np.int64)
        scores = np.array([rough[key] for key in keys.tolist()], np.float64)
        near = self._near(keys, scores, best, count)
        vectors = self.vectors(keys[near]).astype(np.float64)
        scores[near] = (vectors @ queries.T.astype(np.float64)).max(axis=1, initial=-np.inf)
        return keys, scores

    def _matching(self, keys: Sequence[int]) -> Iterator[tuple[int, Record]]:
        """Yields those points that match the filter, and not only Qdrant's wider one."""
        for block in _blocks(keys):
            for key, record in self._index.collection.records(block).items():
                if self._filter is None or self._filter.matches(record.attributes):
                    yield key, record

    def _near(self, keys: Positions, scores: NDArray[np.float64], best: float, count: int) -> slice:
        """Returns the images that may be among those of the first `count` items from a score on, whatever the error."""
        first = int(np.searchsorted(-scores, -(best + SCORE_ERROR)))
        before = {self._owner(key) for key in keys[:first].tolist()}
        items: set[int] = set()
        for key, score in zip(keys[first:].tolist(), scores[first:].tolist(), strict=True):
            if self._owner(key) not in before:
                items.add(self._owner(key))
            if len(items) > count:
                return slice(first, int(np.searchsorted(-scores, -(score - 2 * SCORE_ERROR), side="right")))
        return slice(first, len(keys))

    def positions(self) -> Positions:
        """Returns all keys, of images that match if there is a filter."""
        owners = {
            key: item for key, item in self._index.collection.items(self._condition) if key not in self._index.gone
        }
        if self._filter is not None:
            owners = {key: record.item for key, record in self._matching(list(owners))}
        self._owners = owners
        return np.sort(np.fromiter(owners, np.int64, len(owners)))

    def vectors(self, positions: Positions) -> NDArray[np.float16]:
        keys = positions.tolist()
        found = self._index.collection.contents(keys)
        self._check(keys, found)
        self._records = {key: record for key, (record, _) in found.items()}  # only the last: they may be millions
        return self._join([found[key][1] for key in keys])

    def _join(self, vectors: Iterable[bytes]) -> NDArray[np.float16]:
        """Returns vectors in half precision, as they are stored."""
        numbers = np.frombuffer(b"".join(vectors), "<f4")
        return numbers.reshape(-1, self._index.state.dimension).astype(np.float16)


def _blocks(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(keys), _BLOCK):
        yield keys[start : start + _BLOCK]


def _is_final(ranked: _Ranked, points: Neighbours, count: int) -> bool:
    """Whether no point after the last one that Qdrant returned can be among the first `count`."""
    return ranked[count - 1][1] >= points[-1][1] + SCORE_ERROR
