"""The gallery as a contender, and the filters that it is measured with."""

from _shop import TOP, Case, Kind

from index.gallery import Gallery, SearchResult
from index.rankings import Ranking

SHARES = (0.001, 0.01, 0.1, 0.5, 1.0)
KINDS: tuple[Kind, ...] = ("random", "clustered, query inside", "clustered, query outside")
PAGE = 24
"""Items on a page of a shop."""
RANKINGS: dict[str, Ranking] = {
    "grouped": Ranking(group_by="product"),
    "boosted by a filter and a number": Ranking.model_validate(
        {
            "boosts": [
                {"filter": {"in_stock": True}, "weight": 0.1},
                {"attribute": "price", "from": 90, "to": 10, "weight": 0.1},
            ]
        }
    ),
    "diversified": Ranking(diversity=0.3),
    "sorted": Ranking.model_validate({"sort_by": {"attribute": "price"}}),
}
BATCH = 256
"""Items per write."""


class Ours:
    """The gallery as a contender."""

    def __init__(self, gallery: Gallery, bundle_id: str, name: str = "ours") -> None:
        self.name, self._gallery, self._bundle_id = name, gallery, bundle_id

    def search(self, case: Case) -> SearchResult:
        condition = case.choice.filter if case.choice else None
        return self._gallery.search(case.query, bundle_id=self._bundle_id, top=TOP, filter=condition)

    def read_page(self, case: Case, ranking: Ranking | None) -> list[str]:
        """Returns the ids of a page of a shop, whose items are read as they are for a response."""
        found = self._gallery.search(case.query, bundle_id=self._bundle_id, top=PAGE, ranking=ranking)
        return [hit.item.id for hit in found.hits[0]]

    def rows(self, result: SearchResult) -> list[int]:
        return [int(hit.item.id) for hit in result.hits[0]]
