"""Searches a view: ranks items by their best image over all segments, with filters and pages.

A page asks each segment for its nearest images, which is fast and, on a large index, approximate. Its cursor names the
items that were returned, and the next page leaves them out: what one page missed appears on a later one. When the
items become too many to name, a page compares the query with all images instead. That is exact, so its cursor is the
rank of its last image, and costs the same however far the page is from the first.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.cursors import PageStart
from index.gallery.filters import Filter
from index.gallery.types import Hit
from index.gallery.vectors.base import Segment
from index.gallery.vectors.view import View
from index.items import MAX_TOP

_WIDEN_FACTOR = 4
_MAX_FETCH = 16 * MAX_TOP
"""Images of a segment that are ranked one by one; when that is not enough, a page compares all images."""
_SCORE_UNIT = 10**6
"""Scores are rounded to millionths: a compaction may change the order of a sum, and with it the last digits."""
_LARGE_GROUP = 16
"""Query vectors of one group beyond which each fetches fewer images at first: their results are put together."""
_QUERY_CHUNK = 64
"""Query vectors of one group that are searched at a time, which bounds the memory for an item with many images."""


class _SegmentResult(NamedTuple):
    """The images of one segment that are nearest to a group of query vectors, each with its best score."""

    segment: Segment
    scores: NDArray[np.float32]
    positions: NDArray[np.int64]
    end: float | None
    """The best score that an image can have which was not returned; None when all were returned."""


_Candidate = tuple[int, int, int, Segment, int]
"""An image: its rank (the negative rounded score), its key, its item's key, and its segment and position."""


class Query(NamedTuple):
    """What to search for, apart from the vectors."""

    top: int
    filter: Filter | None = None
    min_score: float | None = None
    excluded: frozenset[int] = frozenset()
    """Keys of items to leave out."""
    start: PageStart | None = None
    expired: int | None = None
    """The instant of `View.segments` from which items are hidden; None if nothing has expired."""

    @property
    def skipped(self) -> frozenset[int]:
        """Keys of items that must not be returned: those left out and those of earlier pages."""
        return self.excluded | self.start.seen if self.start else self.excluded

    @property
    def worst_rank(self) -> int | None:
        return None if self.min_score is None else -math.ceil(self.min_score * _SCORE_UNIT - 1e-9)


Page = tuple[list[Hit], Callable[[], PageStart] | None]
"""The hits of a page, and what returns the start of the next one; None after the last."""


def search_view(view: View, groups: Sequence[NDArray[np.float32]], query: Query) -> list[Page]:
    """Returns a page for each group of query vectors; an image counts by its nearest vector."""
    segments, start = [segment.session() for segment in view.segments(query.filter, query.expired)], query.start
    if start and (start.after or len(start.seen) + query.top > MAX_TOP):
        return [_search_exhaustively(segments, group, query) for group in groups]
    # One more than wanted shows whether another page follows.
    fetch = query.top + len(query.skipped) + 1
    if view.has_several_images:
        fetch *= 2
    if len(groups) == 1 or any(len(group) > 1 for group in groups):
        answers = []
        for group in groups:
            first = math.ceil(fetch * _LARGE_GROUP / max(_LARGE_GROUP, len(group)))
            answers.append(_search_group(group, query, _search_segments(segments, group, first, query), first))
        return answers
    # Many single queries are searched in one call, which FAISS runs on all cores.
    vectors, filtered = np.concatenate(groups), query.filter is not None
    results = [(one, *one.search(vectors, min(fetch, one.count), filtered=filtered)) for one in segments]
    answers = []
    for row, group in enumerate(groups):
        own = [_collect(one, scores[row : row + 1], found[row : row + 1], fetch) for one, scores, found in results]
        answers.append(_search_group(group, query, own, fetch))
    return answers


def _search_segments(
    segments: Sequence[Segment], group: NDArray[np.float32], fetch: int, query: Query
) -> list[_SegmentResult]:
    results = []
    for segment in segments:
        count, filtered = min(fetch, segment.count), query.filter is not None
        result = _collect(segment, *segment.search(group[:_QUERY_CHUNK], count, filtered=filtered), fetch)
        for start in range(_QUERY_CHUNK, len(group), _QUERY_CHUNK):
            chunk = group[start : start + _QUERY_CHUNK]
            result = _merge(result, _collect(segment, *segment.search(chunk, count, filtered=filtered), fetch))
        results.append(result)
    return results


def _collect(segment: Segment, scores: NDArray[np.float32], positions: NDArray[np.int64], fetch: int) -> _SegmentResult:
    """Returns each image once, with its best score over the rows of a search."""
    is_partial = fetch < segment.count
    if len(scores) == 1 and positions[0, -1] >= 0:  # the common case, without array operations
        return _SegmentResult(segment, scores[0], positions[0], scores[0, -1] if is_partial else None)
    found = positions >= 0
    ends = scores[found[:, -1], -1].tolist() if is_partial else []
    return _best_of(segment, scores[found], positions[found], ends)


def _merge(one: _SegmentResult, other: _SegmentResult) -> _SegmentResult:
    return _best_of(
        one.segment,
        np.concatenate((one.scores, other.scores)),
        np.concatenate((one.positions, other.positions)),
        [end for end in (one.end, other.end) if end is not None],
    )


def _best_of(
    segment: Segment, scores: NDArray[np.float32], positions: NDArray[np.int64], ends: list[float]
) -> _SegmentResult:
    """Returns each image once, with its highest score; only the best, if they are too many to rank."""
    order = np.lexsort((-scores, positions))
    unique, first = np.unique(positions[order], return_index=True)
    best = scores[order][first]
    if len(best) > _MAX_FETCH:
        order = np.argpartition(-best, _MAX_FETCH)
        ends.append(float(best[order[_MAX_FETCH]]))
        best, unique = best[order[:_MAX_FETCH]], unique[order[:_MAX_FETCH]]
    return _SegmentResult(segment, best, unique, max(ends, default=None))


def _search_group(group: NDArray[np.float32], query: Query, results: list[_SegmentResult], fetch: int) -> Page:
    """Widens the search until enough distinct items are found: one product must not fill the list."""
    top, worst = query.top, query.worst_rank
    while True:
        best = _best_images(_rank_candidates(results), query, worst)
        ends = [result.end for result in results if result.end is not None]
        # From this rank on the order is not final: the next image of a segment may be as good or better.
        horizon = round(max(ends) * -_SCORE_UNIT) if ends else None
        if horizon is None or (len(best) > top and best[top - 1][0] < horizon):
            break
        is_last = worst is not None and horizon > worst and len(best) <= top
        if is_last and query.start is None:
            break
        fetch *= _WIDEN_FACTOR
        # The end of the pages is checked with all images: an approximate search may have missed some.
        if is_last or fetch > _MAX_FETCH:
            return _search_exhaustively([result.segment for result in results], group, query)
        results = _search_segments([result.segment for result in results], group, fetch, query)
    hits = [_hit(rank, segment, position) for rank, _, _, segment, position in best[:top]]
    if len(best) <= top:
        return hits, None
    return hits, partial(_start_after, query, best)


def _start_after(query: Query, best: list[_Candidate]) -> PageStart:
    seen = query.start.seen if query.start else frozenset()
    return PageStart(seen.union(item for _, _, item, _, _ in best[: query.top]))


def _hit(rank: int, segment: Segment, position: int) -> Hit:
    return Hit(max(-1.0, min(1.0, -rank / _SCORE_UNIT)), segment, position)


def _rank_candidates(results: list[_SegmentResult]) -> list[_Candidate]:
    """Returns all images best first; equal scores by key, so that the same search returns the same list."""
    candidates: list[_Candidate] = []
    for segment, scores, positions, _ in results:
        keys, items = segment.keys(positions)
        ranks = np.rint(scores * np.float64(-_SCORE_UNIT)).astype(np.int64)
        candidates += zip(ranks.tolist(), keys.tolist(), items.tolist(), repeat(segment), positions.tolist())
    candidates.sort(key=_rank_and_key)
    return candidates


_rank_and_key = itemgetter(0, 1)


def _best_images(ranked: list[_Candidate], query: Query, worst: int | None) -> list[_Candidate]:
    """Returns the best image of each item, to one after the end of the page."""
    seen = set(query.skipped)
    best: list[_Candidate] = []
    for candidate in ranked:
        if candidate[2] in seen:
            continue
        if len(best) > query.top or (worst is not None and candidate[0] > worst):
            break
        seen.add(candidate[2])
        best.append(candidate)
    return best


# Exhaustive pages


class _Images(NamedTuple):
    """All images of some segments, one after the other."""

    ranks: NDArray[np.int64]
    keys: NDArray[np.int64]
    items: NDArray[np.int64]

    def best_rows(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Returns the best image of each of the `count` best items among some rows, best first."""
        fetch = count
        while True:
            near = rows
            if fetch < len(rows):
                near = rows[self.ranks[rows] <= np.partition(self.ranks[rows], fetch)[fetch]]
            near = near[np.lexsort((self.keys[near], self.ranks[near]))]
            first = np.sort(np.unique(self.items[near], return_index=True)[1])
            if len(first) >= count or len(near) == len(rows):
                return near[first[:count]]
            fetch *= _WIDEN_FACTOR

    def up_to(self, rank: int, key: int) -> NDArray[np.bool_]:
        """Marks the images that rank before another, and that image itself."""
        marked: NDArray[np.bool_] = (self.ranks < rank) | ((self.ranks == rank) & (self.keys <= key))
        return marked


def _search_exhaustively(segments: Sequence[Segment], group: NDArray[np.float32], query: Query) -> Page:
    """Returns a page by the scores of all images: it takes the same time and memory wherever it begins."""
    start = query.start or PageStart()
    best_score = start.after[0] / -_SCORE_UNIT if start.after else math.inf
    # The last items of the pages before are ranked again, so that this page can name those that come later.
    positions, images = _rank_all(segments, group, best_score, query.top + len(query.skipped) + 1)
    done = np.fromiter(query.skipped, np.int64, len(query.skipped))
    if start.after:
        done = np.concatenate((done, images.items[images.up_to(*start.after)]))
    is_open = ~np.isin(images.items, done)
    if query.worst_rank is not None:
        is_open &= images.ranks <= query.worst_rank
    best = images.best_rows(np.flatnonzero(is_open), query.top + 1)
    firsts = np.cumsum([0, *map(len, positions)])
    chosen = [(row, int(np.searchsorted(firsts, row, side="right")) - 1) for row in best[: query.top].tolist()]
    for number, segment in enumerate(segments):
        segment.hold(positions[number][[row - firsts[number] for row, own in chosen if own == number]])
    hits = [_hit(int(images.ranks[row]), segments[own], int(positions[own][row - firsts[own]])) for row, own in chosen]
    if len(best) <= query.top:
        return hits, None
    last = best[query.top - 1]
    after = int(images.ranks[last]), int(images.keys[last])
    seen = np.flatnonzero(np.isin(images.items, list(start.seen)))
    seen = images.best_rows(seen, len(seen))
    later = frozenset(images.items[seen[~images.up_to(*after)[seen]]].tolist())
    return hits, partial(PageStart, later, after)


def _rank_all(
    segments: Sequence[Segment], group: NDArray[np.float32], best: float, count: int
) -> tuple[list[NDArray[np.int64]], _Images]:
    """Returns every position of each segment, and all images with the rank by their nearest query vector."""
    found = [segment.scores(group, best, count) for segment in segments]
    ranks = [np.rint(scores * -_SCORE_UNIT).astype(np.int64) for _, scores in found]
    pairs = [segment.keys(own) for segment, (own, _) in zip(segments, found, strict=True)]
    columns = ranks, [keys for keys, _ in pairs], [items for _, items in pairs]
    images = _Images(*(np.concatenate([np.empty(0, np.int64), *parts]) for parts in columns))
    return [own for own, _ in found], images
