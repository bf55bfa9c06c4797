"""Searches a view: ranks items by their best image over all segments, with filters and pages."""

import base64
import json
import math
from collections.abc import Sequence
from hashlib import blake2b
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.errors import SearchError
from index.gallery.filters import Filter
from index.gallery.types import Hit
from index.gallery.vectors.base import Segment
from index.gallery.vectors.view import View

_WIDEN_FACTOR = 4
_SCORE_UNIT = 10**6
"""Scores are rounded to millionths: a compaction may change the order of a sum, and with it the last digits."""
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


class PageStart(NamedTuple):
    """Where a page begins: after how many items, and after which rank and image key."""

    offset: int
    rank: int
    key: int


class Query(NamedTuple):
    """What to search for, apart from the vectors."""

    top: int
    filter: Filter | None = None
    min_score: float | None = None
    excluded: frozenset[int] = frozenset()
    """Keys of items to leave out."""
    start: PageStart | None = None


def search_view(
    view: View, groups: Sequence[NDArray[np.float32]], query: Query
) -> list[tuple[list[Hit], PageStart | None]]:
    """Returns the hits and the next page of each group of query vectors; an image counts by its nearest vector."""
    # One more than wanted shows whether another page follows.
    fetch = (query.start.offset if query.start else 0) + query.top + len(query.excluded) + 1
    if view.has_several_images:
        fetch *= 2
    segments = view.segments(query.filter)
    if len(groups) == 1 or any(len(group) > 1 for group in groups):
        return [_search_group(group, query, _search_segments(segments, group, fetch, query), fetch) for group in groups]
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
        if len(group) == 1:
            results.append(_collect(segment, *segment.search(group, count, filtered=filtered), fetch))
            continue
        chunks = [group[start : start + _QUERY_CHUNK] for start in range(0, len(group), _QUERY_CHUNK)]
        parts = [_collect(segment, *segment.search(chunk, count, filtered=filtered), fetch) for chunk in chunks]
        ends = [part.end for part in parts if part.end is not None]
        scores, positions = (np.concatenate([part[field] for part in parts]) for field in (1, 2))
        results.append(_SegmentResult(segment, *_best_scores(scores, positions), max(ends, default=None)))
    return results


def _collect(segment: Segment, scores: NDArray[np.float32], positions: NDArray[np.int64], fetch: int) -> _SegmentResult:
    """Returns each image once, with its best score over the rows of a search."""
    is_partial = fetch < segment.count
    if len(scores) == 1 and positions[0, -1] >= 0:  # the common case, without array operations
        return _SegmentResult(segment, scores[0], positions[0], scores[0, -1] if is_partial else None)
    found = positions >= 0
    ends = scores[found[:, -1], -1]
    end = float(ends.max()) if is_partial and len(ends) else None
    return _SegmentResult(segment, *_best_scores(scores[found], positions[found]), end)


def _best_scores(
    scores: NDArray[np.float32], positions: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns each position once, with its highest score."""
    order = np.lexsort((-scores, positions))
    unique, first = np.unique(positions[order], return_index=True)
    return scores[order][first], unique


def _search_group(
    group: NDArray[np.float32], query: Query, results: list[_SegmentResult], fetch: int
) -> tuple[list[Hit], PageStart | None]:
    """Widens the search until enough distinct items are found: one product must not fill the list."""
    worst = None if query.min_score is None else -math.ceil(query.min_score * _SCORE_UNIT - 1e-9)
    while True:
        best = _best_images(_rank_candidates(results), query, worst)
        ends = [result.end for result in results if result.end is not None]
        # From this rank on the order is not final: the next image of a segment may be as good or better.
        horizon = round(max(ends) * -_SCORE_UNIT) if ends else None
        if horizon is None or (worst is not None and horizon > worst):
            break
        if len(best) > query.top and best[query.top - 1][0] < horizon:
            break
        fetch *= _WIDEN_FACTOR
        results = _search_segments([result.segment for result in results], group, fetch, query)
    hits = [
        Hit(max(-1.0, min(1.0, -rank / _SCORE_UNIT)), segment, position)
        for rank, _, _, segment, position in best[: query.top]
    ]
    if len(best) <= query.top:
        return hits, None
    rank, key, *_ = best[query.top - 1]
    return hits, PageStart((query.start.offset if query.start else 0) + query.top, rank, key)


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
    """Returns the best image of each item, from the start of the page to one after its end."""
    start = (query.start.rank, query.start.key) if query.start else None
    seen = set(query.excluded)
    best: list[_Candidate] = []
    for candidate in ranked:
        if candidate[2] in seen:
            continue
        if len(best) > query.top or (worst is not None and candidate[0] > worst):
            break
        seen.add(candidate[2])
        if start is None or _rank_and_key(candidate) > start:
            best.append(candidate)
    return best


def encode_cursor(start: PageStart, query_hash: str) -> str:
    """Returns the cursor of a page, bound to the query that it continues."""
    return base64.urlsafe_b64encode(json.dumps([*start, query_hash]).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, query_hash: str) -> PageStart:
    """Returns the page of a cursor; refuses an invalid one, and one of another query."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        *numbers, cursor_hash = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        start = PageStart(*map(int, numbers))
        if start.offset < 0:
            raise ValueError(start)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise SearchError(
            f"The cursor {cursor[:60]!r} is not valid.", "Pass the cursor of the last result unchanged, or none."
        ) from None
    if cursor_hash != query_hash:
        raise SearchError(
            "The cursor belongs to another search.", "Repeat the query, filter and bounds of the first page."
        )
    return start


def hash_query(
    vectors: NDArray[np.float32], filter: Filter | None, min_score: float | None, exclude: Sequence[str]
) -> str:
    """Returns a short hash of a search without its page."""
    document = json.dumps(filter.document, sort_keys=True) if filter else ""
    bounds = f"{document} {min_score} {sorted(set(exclude))}"
    return blake2b(vectors.tobytes() + bounds.encode(), digest_size=9).hexdigest()
