"""Searching a state: the best image of each item over all its parts, filters, pages and all."""

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

from index.errors import LookalikeError
from index.gallery.filters import Filter
from index.gallery.types import Hit
from index.gallery.vectors.view import Segment, State

_WIDEN = 4
_Listed = tuple[Segment, NDArray[np.float32], NDArray[np.int64]]
"""What one segment answers to a group of vectors: scores and positions."""
_UNIT = 10**6
"""Scores are told in millionths: a compaction may change the order of a sum, and with it what is smaller."""


class SearchError(LookalikeError):
    """A search that cannot be answered as it was asked."""

    kind = "search"


class Page(NamedTuple):
    """Where a page begins: after how many items, and behind which score (as a rank) and image key."""

    seen: int
    rank: int
    key: int


class Ask(NamedTuple):
    """What is wanted of each query."""

    top: int
    filter: Filter | None = None
    min_score: float | None = None
    exclude: frozenset[int] = frozenset()
    """Keys of items that are not to be answered."""
    after: Page | None = None


_Candidate = tuple[int, int, int, Segment, int]
"""A listed image: its score as a rank (the higher the score the lower), its key, its item's, and where it lies."""


def find(state: State, groups: Sequence[NDArray[np.float32]], ask: Ask) -> list[tuple[list[Hit], Page | None]]:
    """For each group of query vectors its hits and its next page; an image counts by the vector it is nearest to."""
    segments = state.segments(ask.filter)
    # One more than wanted tells whether another page follows.
    fetch = (ask.after.seen if ask.after else 0) + ask.top + len(ask.exclude) + 1
    if state.blocks or state.generation.most_images > 1:
        fetch *= 2
    looked = _look(segments, np.concatenate(groups) if len(groups) > 1 else groups[0], fetch, ask)
    answers, row = [], 0
    for group in groups:
        rows = slice(row, row + len(group))
        row += len(group)
        mine = [(segment, scores[rows], positions[rows]) for segment, scores, positions in looked]
        answers.append(_answer(state, group, ask, mine, fetch))
    return answers


def _look(segments: list[Segment], vectors: NDArray[np.float32], fetch: int, ask: Ask) -> list[_Listed]:
    """The nearest positions in each segment."""
    looked = []
    for segment in segments:
        searcher = segment.searcher
        count = min(fetch, searcher.count if segment.selection is None else segment.selection.count)
        looked.append((segment, *searcher.search(vectors, count, segment.selection, filtered=ask.filter is not None)))
    return looked


def _answer(
    state: State, group: NDArray[np.float32], ask: Ask, looked: list[_Listed], fetch: int
) -> tuple[list[Hit], Page | None]:
    """Widens the look until enough distinct items are found: one product must not fill the list."""
    lowest = None if ask.min_score is None else -math.ceil(ask.min_score * _UNIT - 1e-9)
    while True:
        best = _best(_ranked(looked), ask, lowest)
        horizon = _horizon(looked, fetch)
        if horizon is None or (lowest is not None and horizon > lowest):
            break
        if len(best) > ask.top and best[ask.top - 1][0] < horizon:
            break
        fetch *= _WIDEN
        looked = _look([segment for segment, _, _ in looked], group, fetch, ask)
    hits = [
        Hit(max(-1.0, min(1.0, -rank / _UNIT)), segment, position) for rank, _, _, segment, position in best[: ask.top]
    ]
    if len(best) <= ask.top:
        return hits, None
    rank, key, *_ = best[ask.top - 1]
    return hits, Page((ask.after.seen if ask.after else 0) + ask.top, rank, key)


def _horizon(looked: list[_Listed], fetch: int) -> int | None:
    """The best rank that an image can have which no segment listed; none when everything is listed.

    What ranks from here on is not sure of its place: the next of another segment, or of the same score, may be better.
    """
    ends: list[float] = []
    for segment, scores, positions in looked:
        if fetch < (segment.searcher.count if segment.selection is None else segment.selection.count):
            ends += scores[positions[:, -1] >= 0, -1].tolist()
    return round(max(ends) * -_UNIT) if ends else None


def _ranked(looked: list[_Listed]) -> list[_Candidate]:
    """All that was listed, best first; equal scores by key, so that the same search gives the same answer."""
    candidates: list[_Candidate] = []
    for segment, scores, positions in looked:
        found = positions >= 0 if len(positions) > 1 or positions[0, -1] < 0 else 0
        at = positions[found]
        keys, items = segment.keys(at)
        ranks = np.rint(scores[found] * np.float64(-_UNIT)).astype(np.int64)
        candidates += zip(ranks.tolist(), keys.tolist(), items.tolist(), repeat(segment), at.tolist())
    candidates.sort(key=_rank)
    return candidates


_rank = itemgetter(0, 1)


def _best(ranked: list[_Candidate], ask: Ask, lowest: int | None) -> list[_Candidate]:
    """The best image of each item, from the beginning of the page to one behind its end."""
    after = (ask.after.rank, ask.after.key) if ask.after else None
    seen = set(ask.exclude)
    best: list[_Candidate] = []
    for candidate in ranked:
        if candidate[2] in seen:
            continue
        if len(best) > ask.top or (lowest is not None and candidate[0] > lowest):
            break
        seen.add(candidate[2])
        if after is None or _rank(candidate) > after:
            best.append(candidate)
    return best


def encode_page(page: Page, query: str) -> str:
    """A page as a cursor, bound to the query that it continues."""
    return base64.urlsafe_b64encode(json.dumps([*page, query]).encode()).decode().rstrip("=")


def decode_page(cursor: str, query: str) -> Page:
    """The page of a cursor; one that was made up, or belongs to another query, is refused."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        *numbers, asked = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        page = Page(*map(int, numbers))
        if page.seen < 0:
            raise ValueError(page)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise SearchError(
            f"{cursor[:60]!r} is no cursor.", "Pass the cursor of the last answer, unchanged, or none."
        ) from None
    if asked != query:
        raise SearchError(
            "The cursor belongs to another search.", "Ask with the same query, filter and bounds as for the first page."
        )
    return page


def query_name(
    vectors: NDArray[np.float32], filter: Filter | None, min_score: float | None, exclude: Sequence[str]
) -> str:
    """A short name for what is asked, whatever the page."""
    wanted = json.dumps(filter.document, sort_keys=True) if filter else ""
    bounds = f"{wanted} {min_score} {sorted(set(exclude))}"
    return blake2b(vectors.tobytes() + bounds.encode(), digest_size=9).hexdigest()
