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

_SegmentResults = tuple[Segment, NDArray[np.float32], NDArray[np.int64]]
"""Scores and positions that one segment returns for a group of vectors."""
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
    vectors = np.concatenate(groups) if len(groups) > 1 else groups[0]
    results = _search_segments(view.segments(query.filter), vectors, fetch, query)
    pages, row = [], 0
    for group in groups:
        rows = slice(row, row + len(group))
        row += len(group)
        own = [(segment, scores[rows], positions[rows]) for segment, scores, positions in results]
        pages.append(_search_group(group, query, own, fetch))
    return pages


def _search_segments(
    segments: list[Segment], vectors: NDArray[np.float32], fetch: int, query: Query
) -> list[_SegmentResults]:
    filtered = query.filter is not None
    return [(one, *one.search(vectors, min(fetch, one.count), filtered=filtered)) for one in segments]


def _search_group(
    group: NDArray[np.float32], query: Query, results: list[_SegmentResults], fetch: int
) -> tuple[list[Hit], PageStart | None]:
    """Widens the search until enough distinct items are found: one product must not fill the list."""
    worst = None if query.min_score is None else -math.ceil(query.min_score * _SCORE_UNIT - 1e-9)
    while True:
        best = _best_images(_rank_candidates(results), query, worst)
        horizon = _horizon(results, fetch)
        if horizon is None or (worst is not None and horizon > worst):
            break
        if len(best) > query.top and best[query.top - 1][0] < horizon:
            break
        fetch *= _WIDEN_FACTOR
        results = _search_segments([segment for segment, _, _ in results], group, fetch, query)
    hits = [
        Hit(max(-1.0, min(1.0, -rank / _SCORE_UNIT)), segment, position)
        for rank, _, _, segment, position in best[: query.top]
    ]
    if len(best) <= query.top:
        return hits, None
    rank, key, *_ = best[query.top - 1]
    return hits, PageStart((query.start.offset if query.start else 0) + query.top, rank, key)


def _horizon(results: list[_SegmentResults], fetch: int) -> int | None:
    """Returns the best rank that an image can have which no segment returned; None when all were returned.

    From this rank on the order is not final: the next image of a segment may be as good or better.
    """
    ends: list[float] = []
    for segment, scores, positions in results:
        if fetch < segment.count:
            ends += scores[positions[:, -1] >= 0, -1].tolist()
    return round(max(ends) * -_SCORE_UNIT) if ends else None


def _rank_candidates(results: list[_SegmentResults]) -> list[_Candidate]:
    """Returns all images best first; equal scores by key, so that the same search returns the same list."""
    candidates: list[_Candidate] = []
    for segment, scores, positions in results:
        found = positions >= 0 if len(positions) > 1 or positions[0, -1] < 0 else 0
        valid = positions[found]
        keys, items = segment.keys(valid)
        ranks = np.rint(scores[found] * np.float64(-_SCORE_UNIT)).astype(np.int64)
        candidates += zip(ranks.tolist(), keys.tolist(), items.tolist(), repeat(segment), valid.tolist())
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
