"""The rules of a ranking, ready to be applied to the candidates of a window.

Scores and shares are whole millionths, as the ranks of images are: so they add up exactly, and a compaction changes no
order.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isinf
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.dates import parse_instant
from index.gallery.filters import Filter, FilterError, FilterParser, value_type
from index.gallery.ranking.candidates import CandidateTable
from index.gallery.search import SCORE_UNIT
from index.items import Attribute, values_of
from index.rankings import Boost, Explanation, Ranking, Reason, Share, SortBy

_MICROSECONDS_PER_DAY = 86_400 * 10**6
_KINDS: dict[type, int] = {int: 0, float: 0, str: 1, bool: 2}
"""The order of values of different types."""
NEGATIVES = "negative examples"

Shares = list[int]
"""What a rule adds to the score of each candidate, in millionths."""


class Negatives(NamedTuple):
    """Vectors that items should not be like, and how much each counts."""

    vectors: NDArray[np.float32]
    weights: NDArray[np.float32]

    def shares(self, table: CandidateTable) -> Shares:
        """Returns the largest product of a weight and a similarity of each candidate's image, negated."""
        likeness = np.maximum(table.vectors @ self.vectors.T, 0) * self.weights
        shares: Shares = (-np.rint(likeness.max(axis=1, initial=0) * SCORE_UNIT).astype(np.int64)).tolist()
        return shares


class Placed(NamedTuple):
    """A candidate in its place, and what diversity took from its score."""

    row: int
    penalty: int = 0


class Rules:
    """A ranking whose filters were parsed, and the negative examples of a search."""

    def __init__(self, ranking: Ranking, negatives: Negatives | None = None) -> None:
        self.ranking = ranking
        self._negatives = negatives
        parser = FilterParser()  # one for all filters: their limits bound what a window costs
        self._boosts = [_compile(boost, f"boosts[{number}]", parser) for number, boost in enumerate(ranking.boosts)]
        self._hidden = _parse(ranking.hide.filter, "hide.filter", parser) if ranking.hide.filter else None

    @property
    def acts_on_window(self) -> bool:
        """Whether some rule changes the order of items, so that it needs a window of candidates."""
        ranking = self.ranking
        return bool(self._boosts or ranking.sort_by or ranking.diversity or self._negatives)

    def narrow(self, filter: Filter | None) -> Filter | None:
        """Returns a filter that also leaves out hidden items."""
        if self._hidden is None or filter is None:
            return filter if self._hidden is None else Filter(negated=(self._hidden,))
        return replace(filter, negated=(*filter.negated, self._hidden))

    def apply(self, table: CandidateTable, now: int) -> "RankedWindow":
        """Scores the candidates; `now` is when dates are compared, in seconds since 1970."""
        shares = [(f"boosts[{number}]", boost(table, now)) for number, boost in enumerate(self._boosts)]
        if self._negatives and len(table):
            shares.append((NEGATIVES, self._negatives.shares(table)))
        return RankedWindow(self.ranking, table, shares)


class RankedWindow:
    """The candidates of a window with their scores."""

    def __init__(self, ranking: Ranking, table: CandidateTable, shares: list[tuple[str, Shares]]) -> None:
        self._ranking = ranking
        self._table = table
        self._shares = shares
        # Rounded to half precision, a vector may be longer than one; a similarity is at most 1.
        ranks = [candidate[0] for candidate in table.candidates]
        self._similarities = [SCORE_UNIT if rank < -SCORE_UNIT else min(-rank, SCORE_UNIT) for rank in ranks]
        self._totals = self._similarities
        for _, column in shares:
            self._totals = list(map(add, self._totals, column))
        self._by_score = sorted(range(len(table)), key=self._totals.__getitem__, reverse=True)

    def order(self) -> Iterator[Placed]:
        """Yields the candidates in their final order; equal ones stay in the order of their similarity."""
        if self._ranking.sort_by:
            return map(Placed, self._sort(self._ranking.sort_by))
        if self._ranking.diversity:
            return self._diversify(self._ranking.diversity)
        return map(Placed, self._by_score)

    def _sort(self, rule: SortBy) -> list[int]:
        column, descending = self._table.column(rule.attribute), rule.order == "descending"
        best = max if descending else min

        def key(value: Attribute) -> tuple[int, Any]:
            return best(map(key, value)) if isinstance(value, tuple) else (_KINDS[type(value)], value)

        keys = {row: key(value) for row, value in enumerate(column) if value is not None}
        present = [row for row in self._by_score if row in keys]
        present.sort(key=keys.__getitem__, reverse=descending)
        return [*present, *(row for row in self._by_score if row not in keys)]

    def _diversify(self, diversity: float) -> Iterator[Placed]:
        """Yields by maximal marginal relevance: each time the best score, less the likeness to one that was placed."""
        if not self._by_score:
            return
        order = np.array(self._by_score)
        vectors = self._table.vectors[order] if self._shares else self._table.vectors
        scores = np.array(self._totals, np.float32)[order]  # whole numbers of some millions, which are exact
        scaled = vectors * np.float32(diversity * SCORE_UNIT)
        penalties, values = np.zeros(len(order), np.float32), scores.copy()
        for _ in self._by_score:
            place = int(values.argmax())
            yield Placed(self._by_score[place], round(float(penalties[place])))
            scores[place] = -np.inf
            np.maximum(penalties, scaled @ vectors[place], out=penalties)
            np.subtract(scores, penalties, out=values)

    def explain(self, placed: Placed) -> Explanation:
        """Returns why a candidate is where it is."""
        row = placed.row
        shares = [Share(rule=rule, share=column[row] / SCORE_UNIT) for rule, column in self._shares]
        total = self._totals[row]
        if self._ranking.diversity:
            shares.append(Share(rule="diversity", share=-placed.penalty / SCORE_UNIT))
            total -= placed.penalty
        reason, detail = self._reason(placed)
        return Explanation(
            similarity=self._similarities[row] / SCORE_UNIT,
            shares=shares,
            score=total / SCORE_UNIT,
            similarity_place=row + 1,
            reason=reason,
            detail=detail,
        )

    def _reason(self, placed: Placed) -> tuple[Reason, str]:
        sort_by = self._ranking.sort_by
        if sort_by:
            value = self._table.column(sort_by.attribute)[placed.row]
            if value is None:
                return "sort", f"It has no {sort_by.attribute!r}, so it comes after the items that have it."
            return "sort", f"The items are sorted by {sort_by.attribute!r}, {sort_by.order}; it has {value!r}."
        if placed.penalty:
            return "diversity", "Of the items left it had the best score, less its likeness to those before it."
        return "score", "The items are sorted by their scores."


_Rule = Callable[[CandidateTable, int], Shares]


def _parse(document: dict[str, object], path: str, parser: FilterParser) -> Filter:
    try:
        return parser.parse(document)
    except FilterError as error:
        raise FilterError(f"ranking.{path}: {error.problem}", error.remedy) from None


def _compile(boost: Boost, path: str, parser: FilterParser) -> _Rule:
    """Returns what computes the shares of a boost."""
    weight = boost.weight * SCORE_UNIT
    if boost.filter is not None:
        wanted = _parse(boost.filter, f"{path}.filter", parser)
        return lambda table, now: [round(weight) if matches else 0 for matches in table.matches(wanted)]
    name = str(boost.attribute)

    def shares(table: CandidateTable, now: int) -> Shares:
        return [round(weight * share(value, now)) for value in table.column(name)]

    if boost.half_life_days is not None:
        half_life = boost.half_life_days * _MICROSECONDS_PER_DAY

        def share(value: Attribute | None, now: int) -> float:
            instants = [parse_instant(one) for one in values_of(value) if isinstance(one, str)]
            newest = max((instant for instant in instants if instant is not None), default=None)
            return boost.missing if newest is None else 0.5 ** (max(0, now * 10**6 - newest) / half_life)

    else:
        assert boost.from_ is not None and boost.to is not None
        unit = 2.0 if isinf(boost.to - boost.from_) else 1.0  # so that no difference overflows
        start, width = boost.from_ / unit, boost.to / unit - boost.from_ / unit

        def share(value: Attribute | None, now: int) -> float:
            if type(value) is float or type(value) is int:  # not bool
                place = (value / unit - start) / width
                return place if 0 < place < 1 else float(place > 0)
            if isinstance(value, tuple):
                return max((share(one, now) for one in value if value_type(one) == "number"), default=boost.missing)
            return boost.missing

    return shares
