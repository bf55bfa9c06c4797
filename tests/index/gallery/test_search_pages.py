"""Pages of large galleries: whatever the index misses on one page, a walk to the end returns every item once."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.filters import Filter
from index.gallery.types import Hit, Item
from index.gallery.vectors.faiss.settings import FaissSettings

from .memory import MemoryData, MemoryIndex, MemoryStore
from .reference import BUNDLE, TOLERANCE, ReferenceGallery, index_stats, make_entries, photo, unit

ENTRIES = make_entries(2400, dimension=16, images=2)
REFERENCE = ReferenceGallery(ENTRIES)
QUERY = ENTRIES[11][1][0].vector[None]
# Approximate search is so cheap that it is always used, and a build accepts a recall that is far too low.
POOR = FaissSettings(
    exact_up_to=100, recall_target=0.05, filtered_target=0.05, graph_efforts=(1,), list_efforts=(1,), depths=(40,),
    entry_points=1, graph_links=4, construction_effort=4, graph_step_cost=0.1, list_step_cost=0.1,
)  # fmt: skip
SETTINGS = {
    "exact": FaissSettings(),
    "hnsw": FaissSettings(exact_up_to=100, graph_step_cost=0.1),
    "poor hnsw": POOR,
    "poor ivf": POOR.model_copy(update={"hnsw_up_to": 200}),
}


@pytest.fixture(scope="module", params=[*SETTINGS, "memory"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    """A gallery on each kind of index; a tenth of its items are in the delta."""
    if request.param == "memory":
        store = MemoryStore(MemoryData())
        gallery = Gallery(store, MemoryIndex(store), address="memory")
    else:
        folder = tmp_path_factory.mktemp("large") / "gallery"
        gallery = open_gallery(folder, create=True, faiss_settings=SETTINGS[request.param])
    gallery.upsert(ENTRIES[:2160], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert(ENTRIES[2160:], BUNDLE)
    assert (index_stats(gallery).kind or "memory") in request.param
    yield gallery
    gallery.close()


def walk(gallery: Gallery, top: int, filter: Filter | None = None, min_score: float | None = None) -> list[Hit]:
    """Returns the hits of all pages; each page is sorted, and full unless it is the last."""
    hits: list[Hit] = []
    cursor: str | None = None
    while True:
        found = gallery.search(QUERY, bundle_id=BUNDLE, top=top, filter=filter, min_score=min_score, cursor=cursor)
        scores = [hit.score for hit in found.hits[0]]
        assert scores == sorted(scores, reverse=True)
        hits += found.hits[0]
        if (cursor := found.cursor) is None:
            return hits
        assert len(scores) == top


def walk_ids(gallery: Gallery, top: int, filter: Filter | None = None, min_score: float | None = None) -> list[str]:
    """Returns the sorted ids of the items on all pages."""
    return sorted(hit.item.id for hit in walk(gallery, top, filter, min_score))


@pytest.mark.parametrize("top", [23, 300, 999])
def test_a_walk_returns_every_item_once(large: Gallery, top: int) -> None:
    assert walk_ids(large, top) == sorted(REFERENCE.items)


@pytest.mark.parametrize("document", [{"colour": "red"}, {"brand": "Acme", "not": {"sale": True}}])
def test_a_walk_with_a_filter_returns_every_match_once(large: Gallery, document: dict[str, object]) -> None:
    wanted = Filter.parse(document)
    assert walk_ids(large, 90, wanted) == sorted(one.id for one in REFERENCE.search(QUERY, filter=wanted))


@pytest.mark.parametrize("top", [23, 300])
def test_a_walk_with_a_minimum_score_returns_every_item_above_it_once(large: Gallery, top: int) -> None:
    expected = sorted(one.id for one in REFERENCE.search(QUERY) if one.score > 0.0)
    assert len(expected) > 1000 and walk_ids(large, top, min_score=1e-6) == expected


def test_pages_after_the_first_thousand_items_are_exact(large: Gallery) -> None:
    hits = walk(large, 200)
    scores = [hit.score for hit in hits[1000:]]
    assert scores == sorted(scores, reverse=True)
    truth = dict(REFERENCE.search(QUERY))
    assert max(abs(hit.score - truth[hit.item.id]) for hit in hits[1000:]) <= TOLERANCE


def test_writes_and_compactions_between_pages_do_not_repeat_or_lose_other_items(tmp_path: Path) -> None:
    with open_gallery(tmp_path / "gallery", create=True, faiss_settings=POOR) as gallery:
        gallery.upsert(ENTRIES[:2000], BUNDLE)
        gallery.activate(BUNDLE)
        seen: list[str] = []
        cursor, changed, number = None, set[str](), 2000
        while True:
            found = gallery.search(QUERY, bundle_id=BUNDLE, top=170, cursor=cursor)
            seen += [hit.item.id for hit in found.hits[0]]
            if (cursor := found.cursor) is None:
                break
            deleted = [item.id for item, _ in ENTRIES[number - 2000 : number - 1990]]
            changed |= {*deleted, *(item.id for item, _ in ENTRIES[number : number + 30])}
            gallery.delete(deleted)
            gallery.upsert(ENTRIES[number : number + 30], BUNDLE)
            number += 30
            if number % 60 == 0:
                gallery.compact(rebuild=number % 120 == 0)
        untouched = [item.id for item, _ in ENTRIES[:2000] if item.id not in changed]
        assert len(seen) == len(set(seen))
        assert {*untouched} <= {*seen}


@pytest.mark.parametrize("engine", ["sqlite-faiss", "memory"])
def test_thousands_of_equal_scores_are_walked_once(engine: str, tmp_path: Path) -> None:
    same = [(Item(id=f"{number:05}"), [photo("one", unit(1, 0, 0))]) for number in range(2500)]
    store = MemoryStore(MemoryData())
    with (
        Gallery(store, MemoryIndex(store), address="memory")
        if engine == "memory"
        else open_gallery(tmp_path / "gallery", create=True, faiss_settings=POOR) as gallery
    ):
        gallery.upsert(same, BUNDLE)
        gallery.compact()
        ids: list[str] = []
        cursor: str | None = None
        while len(ids) < 2500:
            found = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=400, cursor=cursor)
            ids += [hit.item.id for hit in found.hits[0]]
            cursor = found.cursor
        assert cursor is None and sorted(ids) == [item.id for item, _ in same]


def test_the_cursor_of_a_far_page_is_short(large: Gallery) -> None:
    first = large.search(QUERY, bundle_id=BUNDLE, top=1000).cursor
    assert first and len(first) < 3000
    second = large.search(QUERY, bundle_id=BUNDLE, top=1000, cursor=first).cursor
    assert second and len(second) < 200


def test_items_with_the_maximum_number_of_images_are_searched_and_walked(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    items = [
        (Item(id=f"{number}"), [photo(str(view), unit(*random.normal(size=8))) for view in range(200)])
        for number in range(90)
    ]
    reference = ReferenceGallery(items)
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        gallery.upsert(items, BUNDLE)
        hits = gallery.search_item("7", top=80).hits[0]
        reference.check(hits, reference.queries_of("7"), top=80, exclude=["7"])
        first = gallery.search_item("7", top=50)
        second = gallery.search_item("7", top=50, cursor=first.cursor)
        assert len({hit.item.id for hit in (*first.hits[0], *second.hits[0])}) == 89 and second.cursor is None
