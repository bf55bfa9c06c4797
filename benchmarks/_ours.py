"""The gallery as a contender, and the filters that it is measured with."""

from _shop import TOP, Case, Kind

from index.gallery import Gallery, SearchResult

SHARES = (0.001, 0.01, 0.1, 0.5, 1.0)
KINDS: tuple[Kind, ...] = ("random", "clustered, query inside", "clustered, query outside")
BATCH = 256
"""Items per write."""


class Ours:
    """The gallery as a contender."""

    def __init__(self, gallery: Gallery, bundle_id: str, name: str = "ours") -> None:
        self.name, self._gallery, self._bundle_id = name, gallery, bundle_id

    def search(self, case: Case) -> SearchResult:
        condition = case.choice.filter if case.choice else None
        return self._gallery.search(case.query, bundle_id=self._bundle_id, top=TOP, filter=condition)

    def rows(self, result: SearchResult) -> list[int]:
        return [int(hit.item.id) for hit in result.hits[0]]
