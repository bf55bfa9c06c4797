"""Runs searches in a view of the gallery: checks what was asked for, resolves names, and makes cursors."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from index.gallery.cursors import PageStart, decode_cursor, encode_cursor, hash_query
from index.gallery.errors import IndexDamaged, ItemMissing, RankingMissing, SearchError
from index.gallery.examples import Example, WeightedVectors
from index.gallery.expiry import current_instant, is_expired
from index.gallery.filters import Filter
from index.gallery.ranking.pages import search_ranked
from index.gallery.ranking.pins import PinReader
from index.gallery.ranking.rules import Negatives, Rules
from index.gallery.search import Query, search_view
from index.gallery.store.base import BundleRow, ItemStore
from index.gallery.types import Bounds, Hit, SearchResult
from index.gallery.vectors.view import View
from index.gallery.views import Views
from index.items import MAX_TOP
from index.rankings import Ranking, StoredRanking, Window

_PLAIN = Ranking()
_CACHED_RANKINGS = 64
"""Stored rankings that are kept in memory."""


def check_vectors(vectors: NDArray[np.float32], bundle: BundleRow) -> None:
    """Refuses query vectors that the model of a bundle cannot have made."""
    if vectors.ndim != 2 or vectors.shape[1] != bundle.dimension or not isfinite(vectors.sum()):
        raise SearchError(
            f"Query vectors of shape {vectors.shape} do not fit bundle {bundle.id}: it makes finite vectors of "
            f"{bundle.dimension} numbers.",
            "Embed the query with the gallery's bundle.",
        )


class _Found(NamedTuple):
    """The hits of each query, where the next page of the first one begins, and the windows that rules acted on."""

    hits: list[list[Hit]]
    following: Callable[[], PageStart] | None
    windows: list[Window]


class Searches:
    """Searches of one gallery."""

    def __init__(self, store: ItemStore, views: Views) -> None:
        self._store = store
        self._views = views
        self._rankings: dict[str, tuple[int, StoredRanking]] = {}
        """By name: stored rankings, each with the revision at which it was read."""

    def load_example(self, view: View, example: Example) -> WeightedVectors:
        """Returns the vectors of an example: one of a photo, or those of an item's images."""
        if example.vector is None:
            return WeightedVectors(self.item_vectors(view, str(example.item_id)), example.weight)
        rows = np.atleast_2d(example.vector)
        check_vectors(rows, view.bundle)
        return WeightedVectors(rows, example.weight)

    def item_vectors(self, view: View, item_id: str) -> NDArray[np.float32]:
        """Returns the vectors of an item's images, of which it has at least one."""
        vectors = self._store.read.item_vectors(item_id, view.bundle.key)
        if not vectors or self._has_expired(view, item_id):
            raise ItemMissing(item_id)
        return np.stack(list(vectors.values()))

    def _has_expired(self, view: View, item_id: str) -> bool:
        now = current_instant()
        if view.newest_expiry(now) is None:
            return False
        stored = self._store.read.get_item(item_id)
        return stored is None or is_expired(stored.item.attributes, now)

    def run(
        self,
        view: View,
        groups: list[NDArray[np.float32]],
        negatives: Negatives | None = None,
        **bounds: Unpack[Bounds],
    ) -> SearchResult:
        """Returns the hits of each group of query vectors; an image counts by its nearest vector."""
        top, min_score = bounds.get("top", 10), bounds.get("min_score")
        filter, exclude = bounds.get("filter"), bounds.get("exclude", ())
        if not 1 <= top <= MAX_TOP:
            raise SearchError(f"top is {top}.", f"Ask for 1 to {MAX_TOP} items, and for more by cursor.")
        if min_score is not None and not isfinite(min_score):
            raise SearchError(f"min_score is {min_score}.", "Pass a number from -1 to 1, or none.")
        ranking, explain = self._ranking(bounds.get("ranking"), view.revision), bounds.get("explain", False)
        query_hash = partial(_hash, groups, filter, min_score, exclude, ranking, negatives)
        cursor = bounds.get("cursor")
        start = decode_cursor(cursor, query_hash()) if cursor else None
        wanted, now = Query(top, filter, min_score, self._keys(exclude), start), current_instant()

        def find(view: View) -> _Found:
            query = wanted._replace(expired=view.newest_expiry(now))
            if ranking is None and not explain and negatives is None:
                pages = search_view(view, groups, query) if groups else []
                return _Found([hits for hits, _ in pages], pages[0][1] if pages else None, [])
            return self._find_ranked(view, groups, query, Rules(ranking or _PLAIN, negatives), exclude, explain, now)

        try:
            found = find(view)
        except IndexDamaged:  # the index was replaced, or lost, during the search
            view = self._views.reopen(view)
            found = find(view)
        following = found.following if len(groups) == 1 else None
        return SearchResult(
            found.hits,
            view.bundle.id,
            view.revision,
            (lambda: encode_cursor(following(), query_hash())) if following else None,
            windows=found.windows,
        )

    def _ranking(self, ranking: Ranking | str | None, revision: int) -> Ranking | None:
        """Returns a ranking, or the newest version of the stored one with this name.

        What was read at a revision is kept until the next one, also while the server of the store is gone.
        """
        if not isinstance(ranking, str):
            return ranking
        read_at, stored = self._rankings.get(ranking, (-1, None))
        if stored is None or read_at != revision:
            stored = self._store.read.ranking(ranking)
            if stored is None:
                raise RankingMissing(ranking)
            if len(self._rankings) >= _CACHED_RANKINGS:
                self._rankings.clear()
            self._rankings[ranking] = revision, stored
        return stored.ranking

    def _keys(self, item_ids: Sequence[str]) -> frozenset[int]:
        return frozenset(self._store.read.item_keys(item_ids)) if item_ids else frozenset()

    def _find_ranked(
        self,
        view: View,
        groups: Sequence[NDArray[np.float32]],
        query: Query,
        rules: Rules,
        exclude: Sequence[str],
        explain: bool,
        now: int,
    ) -> _Found:
        ranking = rules.ranking
        hidden = frozenset((*exclude, *ranking.hide.ids))
        filter = rules.narrow(query.filter)
        pins = PinReader(
            self._store.read,
            ranking.pin,
            view.bundle.key,
            filter=filter,
            now=now,
            exclude=hidden,
            group_by=ranking.group_by,
        )
        query = query._replace(
            filter=filter,
            excluded=query.excluded | self._keys([*ranking.hide.ids, *ranking.pin]),
            group_by=ranking.group_by,
            represented=pins.groups,
        )
        pages = [search_ranked(view, group, query, rules, pins, explain=explain) for group in groups]
        following = pages[0].next_start if pages else None
        return _Found(
            [page.hits for page in pages],
            (lambda: following) if following else None,
            [page.window for page in pages if page.window],
        )


def _hash(
    groups: Sequence[NDArray[np.float32]],
    filter: Filter | None,
    min_score: float | None,
    exclude: Sequence[str],
    ranking: Ranking | None,
    negatives: Negatives | None,
) -> bytes:
    """Returns a short hash of a search of one group, with all rules of its ranking."""
    rules = ranking.model_dump_json() if ranking else ""
    if negatives:
        rules += f" {negatives.vectors.tobytes().hex()} {negatives.weights.tolist()}"
    return hash_query(groups[0], filter, min_score, exclude, rules)
