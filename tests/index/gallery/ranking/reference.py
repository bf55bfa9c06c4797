"""The reference that ranked searches are compared with: all items, ranked one rule after the other in plain Python."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import Filter
from index.items import Item
from index.rankings import Boost, Ranking
from tests.index.gallery.reference import ReferenceGallery

Vector = NDArray[np.float64]


class ReferenceRanking:
    """The final order of all items that match a search."""

    def __init__(
        self,
        reference: ReferenceGallery,
        query: NDArray[np.float32],
        ranking: Ranking,
        *,
        filter: Filter | None = None,
        min_score: float | None = None,
        exclude: Sequence[str] = (),
        now: float = 0.0,
    ) -> None:
        self._reference, self._query, self._ranking, self._now = reference, query, ranking, now
        self.similarity: dict[str, float] = dict(reference.search(query, filter=filter, exclude=exclude))
        for item_id in [*self.similarity]:
            if item_id in ranking.hide.ids or self._is_hidden(reference.items[item_id]):
                del self.similarity[item_id]
        pinned = self._once_per_group(filter_ids(ranking.pin, self.similarity))
        found = (item_id for item_id, score in self.similarity.items() if min_score is None or score >= min_score)
        others = [item_id for item_id in self._once_per_group([*pinned, *found]) if item_id not in ranking.pin]
        self.ids = [*pinned]
        size = ranking.window if self._acts_on_window else len(others) + 1
        for start in range(0, len(others), size):
            self.ids += self._order(others[start : start + size])

    @property
    def _acts_on_window(self) -> bool:
        return bool(self._ranking.boosts or self._ranking.sort_by or self._ranking.diversity)

    def _attributes(self, item_id: str) -> Mapping[str, Any]:
        return self._reference.items[item_id].attributes

    def _is_hidden(self, item: Item) -> bool:
        hidden = self._ranking.hide.filter
        return bool(hidden) and Filter.parse(hidden).matches(item.attributes)

    def _once_per_group(self, ids: Sequence[str]) -> list[str]:
        if self._ranking.group_by is None:
            return [*dict.fromkeys(ids)]
        groups: dict[object, str] = {}
        for item_id in ids:
            value = self._attributes(item_id).get(self._ranking.group_by)
            values = value if isinstance(value, tuple) else (value,)
            typed = frozenset((type(one), one) for one in values)
            groups.setdefault(("item", item_id) if value is None else typed, item_id)
        return [*groups.values()]

    def score(self, item_id: str) -> float:
        """Returns the similarity and all boosts."""
        shares = [boost_share(boost, self._attributes(item_id), self._now) for boost in self._ranking.boosts]
        return self.similarity[item_id] + sum(shares)

    def _order(self, window: Sequence[str]) -> list[str]:
        by_score = sorted(window, key=lambda item_id: -self.score(item_id))
        rule = self._ranking.sort_by
        if rule:
            known = [one for one in by_score if rule.attribute in self._attributes(one)]
            descending = rule.order == "descending"

            def key(item_id: str) -> Any:
                values = self._attributes(item_id)[rule.attribute]
                return (max if descending else min)(values) if isinstance(values, tuple) else values

            known.sort(key=key, reverse=descending)
            return known + [one for one in by_score if one not in known]
        return [*self._diversify(by_score)] if self._ranking.diversity else by_score

    def _diversify(self, left: list[str]) -> Iterator[str]:
        placed: list[Vector] = []
        left = [*left]
        while left:

            def value(item_id: str) -> float:
                likeness = max((float(self._vector(item_id) @ other) for other in placed), default=0.0)
                return self.score(item_id) - self._ranking.diversity * max(0.0, likeness)

            best = max(left, key=value)
            left.remove(best)
            placed.append(self._vector(best))
            yield best

    def _vector(self, item_id: str) -> Vector:
        """Returns the vector of an item's image that is nearest to the query."""
        scores = self._reference.scores(item_id, self._query)
        image = self._reference.images[item_id][max(scores, key=scores.__getitem__)]
        return image.vector.astype(np.float16).astype(np.float64)


def filter_ids(ids: Sequence[str], known: Mapping[str, float]) -> list[str]:
    return [item_id for item_id in ids if item_id in known]


def boost_share(boost: Boost, attributes: Mapping[str, Any], now: float) -> float:
    """Returns what a boost adds to the score of an item."""
    if boost.filter is not None:
        return boost.weight if Filter.parse(boost.filter).matches(attributes) else 0.0
    value = attributes.get(str(boost.attribute))
    if isinstance(value, tuple):
        shares = [boost_share(boost, {str(boost.attribute): one}, now) / boost.weight for one in value]
        return boost.weight * max(shares)
    if boost.half_life_days is not None:
        if not isinstance(value, str):
            return boost.weight * boost.missing
        age = now - datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp()
        return boost.weight * 2 ** -(max(age, 0) / 86_400 / boost.half_life_days)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return boost.weight * boost.missing
    assert boost.from_ is not None and boost.to is not None
    return boost.weight * min(1.0, max(0.0, (value - boost.from_) / (boost.to - boost.from_)))
