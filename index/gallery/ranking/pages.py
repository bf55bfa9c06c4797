"""Pages of a ranked search: pinned items first, then one window of candidates after the other.

A window is a plain search for the most similar items that no earlier window had. Rules order the items within it. A
cursor names the start of its window and what of the window was returned, so that the pages of a window add up to it,
and the next one begins when it is used up. What is written in between can neither repeat an item nor make cursors grow:
a window returns no more items than its size.
"""

from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.cursors import PageStart
from index.gallery.expiry import current_instant
from index.gallery.ranking.candidates import CandidateTable
from index.gallery.ranking.pins import PinReader
from index.gallery.ranking.rules import Rules
from index.gallery.search import Candidates, Query, find_candidates, make_hit
from index.gallery.types import Hit
from index.gallery.vectors.view import View
from index.items import MAX_TOP
from index.rankings import Explanation, Window

_WINDOWS_PER_PAGE = 2
"""A page continues with the next window, but no further: so its cost is bounded."""


class RankedPage(NamedTuple):
    """The hits of a page, where the next one begins, and the window that the last hits come from."""

    hits: list[Hit]
    next_start: PageStart | None
    window: Window | None


def search_ranked(
    view: View,
    group: NDArray[np.float32],
    query: Query,
    rules: Rules,
    pins: PinReader,
    *,
    explain: bool = False,
) -> RankedPage:
    """Returns a page for some query vectors; an image counts by its nearest vector."""
    start = query.start or PageStart()
    first, pinned = pins.take(start.pinned, query.top)
    hits = [pin.hit(group, explain=explain) for pin in first]
    query = query._replace(start=start._replace(pinned=pinned), top=query.top - len(hits))
    if rules.acts_on_window:
        page = _Windows(view, group, query, rules, explain=explain).page(hits)
    else:
        page = _plain_page(view, group, query, hits, explain=explain)
    if page.next_start is None and pins.take(pinned, 1)[0]:  # nothing but pins is left
        return page._replace(next_start=query.start)
    return page


def _plain_page(view: View, group: NDArray[np.float32], query: Query, hits: list[Hit], *, explain: bool) -> RankedPage:
    """Returns the page of a ranking without rules that act on a window, by similarity."""
    [found] = find_candidates(view, [group], _at_start(query, query.start, max(1, query.top)))
    best = found.best[: query.top]
    for candidate in best:
        hits.append(make_hit(candidate))
        if explain:
            score = hits[-1].score
            detail = "The items are sorted by their similarity."
            hits[-1].explanation = Explanation(
                similarity=score, shares=[], score=score, similarity_place=None, reason="similarity", detail=detail
            )
    if not found.has_more and len(best) == len(found.best):
        return RankedPage(hits, None, None)
    pinned = query.start.pinned if query.start else 0
    return RankedPage(hits, found.start_after(len(best), frozenset())._replace(pinned=pinned), None)


def _at_start(query: Query, start: PageStart | None, top: int) -> Query:
    """Returns the query for candidates from a start on; a search from the first item on has none."""
    is_first = start is None or not (start.seen or start.after)
    return query._replace(top=top, start=None if is_first else start)


class _Windows:
    """The windows of one page."""

    def __init__(self, view: View, group: NDArray[np.float32], query: Query, rules: Rules, *, explain: bool) -> None:
        self._view, self._group, self._rules, self._explain = view, group, rules, explain
        self._size = rules.ranking.window
        # A cursor names the items of earlier windows and those of its own.
        self._query = query._replace(max_seen=MAX_TOP - self._size)
        self._start = query.start or PageStart()
        self._now = self._start.time or current_instant() // 10**6

    def page(self, hits: list[Hit]) -> RankedPage:
        """Adds up to `top` hits to those of pinned items."""
        room, start = self._query.top, self._start
        window = None
        for _ in range(_WINDOWS_PER_PAGE):
            [found] = find_candidates(self._view, [self._group], _at_start(self._query, start, self._size))
            window = Window(size=self._size, candidates=len(found.best), exhausted=not found.has_more)
            following, count = self._take(found, start, room, hits)
            room -= count
            if following is None or not room:
                return RankedPage(hits, self._continue(following), window)
            start = following
        return RankedPage(hits, self._continue(start), window)

    def _continue(self, start: PageStart | None) -> PageStart | None:
        return start and start._replace(pinned=self._start.pinned, time=self._now)

    def _take(self, found: Candidates, start: PageStart, room: int, hits: list[Hit]) -> tuple[PageStart | None, int]:
        """Adds the next hits of a window; returns where the page after them begins, and their number."""
        table = CandidateTable(found.best)
        ranked = self._rules.apply(table, self._now)
        owners = [candidate[2] for candidate in found.best]
        unreturned = [row for row, owner in enumerate(owners) if owner not in start.returned]
        # Fewer, if others were returned that are no longer among the candidates.
        left = set(unreturned[: max(0, self._size - len(start.returned))])
        placed = list(islice((one for one in ranked.order() if one.row in left), room))
        for one in placed:
            hits.append(make_hit(found.best[one.row]))
            if self._explain:
                hits[-1].explanation = ranked.explain(one)
        returned = start.returned.union(owners[one.row] for one in placed)
        if len(placed) < len(left):
            return start._replace(returned=returned), len(placed)
        if not found.has_more and len(left) == len(unreturned):
            return None, len(placed)
        return found.start_after(max(left, default=-1) + 1, returned), len(placed)
