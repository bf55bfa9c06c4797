"""Searches a view: ranks items by their best image over all segments, with filters, groups and pages.

A page asks each segment for its nearest images, which is fast and, on a large index, approximate. Its cursor names the
items that were returned, and the next page leaves them out: what one page missed appears on a later one. When the
items become too many to name, a page compares the query with all images instead. That is exact, so its cursor is the
rank of its last image, and costs the same however far the page is from the first.

What a page returns once is called an owner of images: an item or, with `group_by`, all items with the same value of an
attribute. A group is represented by its best image, as an item is.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.cursors import PageStart
from index.gallery.filters import Filter
from index.gallery.groups import owner_keys
from index.gallery.types import Hit
from index.gallery.vectors.base import Segment
from index.gallery.vectors.view import View
from index.items import MAX_TOP

_WIDEN_FACTOR = 4
_MAX_FETCH = 16 * MAX_TOP
"""Images of a segment that are ranked one by one; when that is not enough, a page compares all images."""
SCORE_UNIT = 10**6
"""Scores are rounded to millionths: a compaction may change the order of a sum, and with it the last digits."""
_MAX_GROUP = 16
"""Images per group that a search allows for at first; groups that lie together may have more."""
_GROUPED_ITEMS = 4 * MAX_TOP
"""Items that a page of groups needs in their exact order, for engines that have to fetch them."""
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


Candidate = tuple[int, int, int, Segment, int]
"""An image: its rank (the negative rounded score), its key, its owner's key, and its segment and position."""


class Query(NamedTuple):
    """What to search for, apart from the vectors."""

    top: int
    filter: Filter | None = None
    min_score: float | None = None
    excluded: frozenset[int] = frozenset()
    """Keys of items to leave out."""
    start: PageStart | None = None
    group_by: str | None = None
    """The attribute of whose values each is returned once."""
    represented: frozenset[int] = frozenset()
    """Keys of owners to leave out, because other items stand for them."""
    max_seen: int = MAX_TOP
    """Owners that a cursor may name."""
    expired: int | None = None
    """The instant of `View.segments` from which items are hidden; None if nothing has expired."""

    @property
    def skipped(self) -> frozenset[int]:
        """Keys of owners that must not be returned: those left out and those of earlier pages."""
        skipped = self.represented if self.group_by else self.represented | self.excluded
        return skipped | self.start.seen if self.start else skipped

    @property
    def skipped_count(self) -> int:
        """An upper bound of the owners and items that must not be returned."""
        return len(self.excluded) + len(self.represented) + (len(self.start.seen) if self.start else 0)

    @property
    def worst_rank(self) -> int | None:
        return None if self.min_score is None else -math.ceil(self.min_score * SCORE_UNIT - 1e-9)


class Candidates(NamedTuple):
    """The best image of each of the best owners, best first."""

    best: list[Candidate]
    has_more: bool
    start_after: Callable[[int, frozenset[int]], PageStart]
    """Returns where a page begins after the first so many of them; it leaves out some other owners as well."""


Page = tuple[list[Hit], Callable[[], PageStart] | None]
"""The hits of a page, and what returns the start of the next one; None after the last."""


def search_view(view: View, groups: Sequence[NDArray[np.float32]], query: Query) -> list[Page]:
    """Returns a page for each group of query vectors; an image counts by its nearest vector."""
    pages: list[Page] = []
    for best, has_more, start_after in find_candidates(view, groups, query):
        following = partial(start_after, len(best), frozenset()) if has_more else None
        pages.append(([make_hit(candidate) for candidate in best], following))
    return pages


def find_candidates(view: View, groups: Sequence[NDArray[np.float32]], query: Query) -> list[Candidates]:
    """Returns the best owners for each group of query vectors; an image counts by its nearest vector."""
    segments, start = [segment.session() for segment in view.segments(query.filter, query.expired)], query.start
    if start and (start.after or len(start.seen) + query.top > query.max_seen):
        return [_search_exhaustively(segments, group, query) for group in groups]
    # One more than wanted shows whether another page follows.
    fetch = query.top + query.skipped_count + 1
    if query.group_by:
        sizes = [segment.group_size(query.group_by) for segment in segments]
        fetch = round(min(_MAX_FETCH / 2, fetch * min(_MAX_GROUP, 0.5 + max(sizes, default=0.0))))
    elif view.has_several_images:
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


def _search_group(group: NDArray[np.float32], query: Query, results: list[_SegmentResult], fetch: int) -> Candidates:
    """Widens the search until enough distinct owners are found: one product must not fill the list."""
    top, worst = query.top, query.worst_rank
    while True:
        best = _best_images(_rank_candidates(results, query), query, worst)
        ends = [result.end for result in results if result.end is not None]
        # From this rank on the order is not final: the next image of a segment may be as good or better.
        horizon = round(max(ends) * -SCORE_UNIT) if ends else None
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
    return Candidates(best[:top], len(best) > top, partial(_start_after, query, best))


def _start_after(query: Query, best: list[Candidate], count: int, others: frozenset[int]) -> PageStart:
    seen = query.start.seen if query.start else frozenset()
    return PageStart(seen.union(others, (owner for _, _, owner, _, _ in best[:count])))


def make_hit(candidate: Candidate) -> Hit:
    rank, _, _, segment, position = candidate
    return Hit(to_score(rank), segment, position)


def to_score(rank: int) -> float:
    return max(-1.0, min(1.0, -rank / SCORE_UNIT))


def _rank_candidates(results: list[_SegmentResult], query: Query) -> list[Candidate]:
    """Returns all images best first; equal scores by key, so that the same search returns the same list."""
    candidates: list[Candidate] = []
    for segment, scores, positions, _ in results:
        keys, items = segment.keys(positions)
        ranks = np.rint(scores * np.float64(-SCORE_UNIT)).astype(np.int64)
        owners = owner_keys(segment, positions, items, query.group_by) if query.group_by else items.tolist()
        found = zip(ranks.tolist(), keys.tolist(), owners, repeat(segment), positions.tolist())
        if query.group_by and query.excluded:
            kept = (~_is_in(items, query.excluded)).tolist()
            candidates += compress(found, kept)
        else:
            candidates += found
    candidates.sort(key=_rank_and_key)
    return candidates


_rank_and_key = itemgetter(0, 1)


def _is_in(keys: NDArray[np.int64], wanted: frozenset[int]) -> NDArray[np.bool_]:
    return np.isin(keys, np.fromiter(wanted, np.int64, len(wanted)))


def _best_images(ranked: list[Candidate], query: Query, worst: int | None) -> list[Candidate]:
    """Returns the best image of each owner, to one after the end of the page."""
    seen = set(query.skipped)
    best: list[Candidate] = []
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
    owners: NDArray[np.int64]

    def best_rows(self, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Returns the best image of each of the `count` best owners among some rows, best first."""
        fetch = count
        while True:
            near = rows
            if fetch < len(rows):
                near = rows[self.ranks[rows] <= np.partition(self.ranks[rows], fetch)[fetch]]
            near = near[np.lexsort((self.keys[near], self.ranks[near]))]
            first = np.sort(np.unique(self.owners[near], return_index=True)[1])
            if len(first) >= count or len(near) == len(rows):
                return near[first[:count]]
            fetch *= _WIDEN_FACTOR

    def up_to(self, rank: int, key: int) -> NDArray[np.bool_]:
        """Marks the images that rank before another, and that image itself."""
        marked: NDArray[np.bool_] = (self.ranks < rank) | ((self.ranks == rank) & (self.keys <= key))
        return marked


def _search_exhaustively(segments: Sequence[Segment], group: NDArray[np.float32], query: Query) -> Candidates:
    """Returns a page by the scores of all images: it takes the same time and memory wherever it begins."""
    start = query.start or PageStart()
    best_score = start.after[0] / -SCORE_UNIT if start.after and not query.group_by else math.inf
    # The last items of the pages before are ranked again, so that this page can name those that come later.
    positions, images = _rank_all(segments, group, best_score, query)
    is_open = ~_is_in(images.owners, query.skipped)
    if start.after:
        is_open &= ~np.isin(images.owners, images.owners[images.up_to(*start.after)])
    if query.worst_rank is not None:
        is_open &= images.ranks <= query.worst_rank
    best = images.best_rows(np.flatnonzero(is_open), query.top + 1)
    firsts = np.cumsum([0, *map(len, positions)])
    chosen = [(row, int(np.searchsorted(firsts, row, side="right")) - 1) for row in best[: query.top].tolist()]
    for number, segment in enumerate(segments):
        segment.hold(positions[number][[row - firsts[number] for row, own in chosen if own == number]])
    ranks, keys, owners = (column[best[: query.top]].tolist() for column in images)
    places = [int(positions[own][row - firsts[own]]) for row, own in chosen]
    found: list[Candidate] = list(zip(ranks, keys, owners, (segments[own] for _, own in chosen), places, strict=True))

    def start_after(count: int, others: frozenset[int]) -> PageStart:
        after = found[count - 1][:2] if count else start.after
        seen = np.flatnonzero(_is_in(images.owners, start.seen | others))
        seen = images.best_rows(seen, len(seen))
        if after:
            seen = seen[~images.up_to(*after)[seen]]
        return PageStart(frozenset(images.owners[seen].tolist()), after)

    return Candidates(found, len(best) > query.top, start_after)


def _rank_all(
    segments: Sequence[Segment], group: NDArray[np.float32], best: float, query: Query
) -> tuple[list[NDArray[np.int64]], _Images]:
    """Returns positions of each segment, and their images with the rank by their nearest query vector."""
    places: list[NDArray[np.int64]] = []
    columns: list[list[NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in _Images._fields]
    count = _GROUPED_ITEMS if query.group_by else query.top + query.skipped_count + 1
    for segment in segments:
        positions, scores = segment.scores(group, best, count)
        keys, owners = segment.keys(positions)
        ranks = np.rint(scores * -SCORE_UNIT).astype(np.int64)
        if query.group_by:
            kept = ~_is_in(owners, query.excluded)
            positions, ranks, keys = positions[kept], ranks[kept], keys[kept]
            owners = np.array(owner_keys(segment, positions, owners[kept], query.group_by), np.int64)
        places.append(positions)
        for column, part in zip(columns, (ranks, keys, owners), strict=True):
            column.append(part)
    return places, _Images(*map(np.concatenate, columns))
