"""Ranked searches and their pages, compared with a reference on every engine."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index.errors import LookalikeError
from index.gallery import Gallery, SearchResult, open_gallery
from index.gallery.errors import ItemMissing
from index.gallery.examples import Example
from index.gallery.filters import Filter
from index.gallery.types import Hit, Item
from index.rankings import Ranking
from tests.index.gallery.reference import BUNDLE, Shop, make_entries, photo, unit

from .conftest import NOW, fill_shop
from .reference import ReferenceRanking

BOOSTS: list[dict[str, Any]] = [
    {"filter": {"sale": True}, "weight": 0.2},
    {"filter": {"colour": ["red", "blue"], "not": {"brand": {"exists": True}}}, "weight": -0.1},
    {"attribute": "margin", "from": 0.2, "to": 0.7, "weight": 0.3, "missing": 0.5},
    {"attribute": "price", "from": 40, "to": 5, "weight": 0.15},
    {"attribute": "added", "half_life_days": 20, "weight": 0.25},
]
RANKINGS: list[dict[str, Any]] = [
    {"boosts": BOOSTS, "window": 40},
    {"boosts": BOOSTS[:1], "window": 10},
    {"group_by": "parent"},
    {"group_by": "colour"},
    {"group_by": "sizes"},
    {
        "sort_by": {"attribute": "ratings", "order": "descending"},
        "boosts": [
            {"filter": {"any": [{"sizes": "M"}, {"ratings": {"gt": 6}}]}, "weight": 0.1},
            {"attribute": "ratings", "from": 1, "to": 6, "weight": -0.2},
        ],
        "window": 30,
    },
    {"group_by": "parent", "boosts": BOOSTS, "window": 25},
    {"diversity": 0.4, "window": 30},
    {"diversity": 1, "boosts": BOOSTS[2:3], "group_by": "parent", "window": 15},
    {"sort_by": {"attribute": "stock", "order": "descending"}, "window": 35},
    {"sort_by": {"attribute": "margin"}, "boosts": BOOSTS[:1], "window": 500},
    {"pin": ["item-00140", "item-00003", "unknown", "item-00077"]},
    {"pin": ["item-00140", "item-00003"], "diversity": 0.2, "group_by": "parent", "window": 20},
    {"pin": ["item-00001", "item-00051", "item-00002"], "group_by": "parent"},
    {"hide": {"ids": ["item-00003", "item-00007"], "filter": {"stock": [1, 2]}}, "boosts": BOOSTS[4:], "window": 20},
]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the clock that dates are compared with."""
    monkeypatch.setattr("index.gallery.ranking.pages.current_instant", lambda: round(NOW.timestamp() * 1e6))


def pages(gallery: Gallery, query: Any, size: int, **bounds: Any) -> Iterator[SearchResult]:
    cursor: str | None = None
    while True:
        found = gallery.search(query[None], bundle_id=BUNDLE, top=size, cursor=cursor, **bounds)
        yield found
        cursor = found.cursor
        if cursor is None:
            return
        assert found.hits[0], "a cursor must not lead to an empty page"
        assert len(cursor) <= 11_000


def ids(hits: list[Hit]) -> list[str]:
    return [hit.item.id for hit in hits]


def check_pages(shop: Shop, ranking: Ranking, size: int, bounds: dict[str, Any]) -> list[Hit]:
    """Asserts that the pages of a ranked search add up to the reference."""
    hits = [hit for page in pages(shop.gallery, shop.query, size, ranking=ranking, **bounds) for hit in page.hits[0]]
    expected = ReferenceRanking(shop.reference, shop.query[None], ranking, now=NOW.timestamp(), **bounds)
    assert ids(hits) == expected.ids
    for hit in hits:
        assert hit.score == pytest.approx(expected.similarity[hit.item.id], abs=2e-6)
    return hits


@pytest.mark.parametrize("document", RANKINGS, ids=str)
def test_the_pages_of_a_ranking_add_up_to_the_reference(variants: Shop, document: dict[str, Any]) -> None:
    ranking = Ranking.model_validate(document)
    for size in (7, 1000):
        check_pages(variants, ranking, size, {})
    wanted = Filter.parse({"price": {"lt": 35}})
    check_pages(variants, ranking, 11, {"filter": wanted, "min_score": 0.1, "exclude": ["item-00010", "item-00140"]})


@pytest.mark.parametrize("name", ["sizes", "ratings"])
def test_groups_of_lists_are_the_same_in_large_galleries(
    stored: Shop, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index.gallery.vectors.faiss.columns._MANY_ROWS", 1)  # parses no item
    for document in ({"group_by": name}, {"group_by": name, "boosts": BOOSTS, "window": 25}):
        check_pages(stored, Ranking.model_validate(document), 9, {})


@pytest.mark.parametrize("document", RANKINGS, ids=str)
def test_a_compaction_does_not_change_a_ranking(variants: Shop, document: dict[str, Any]) -> None:
    ranking = Ranking.model_validate(document)
    before = check_pages(variants, ranking, 30, {})
    variants.gallery.compact()
    after = check_pages(variants, ranking, 30, {})
    assert [(hit.item.id, hit.image.id) for hit in after] == [(hit.item.id, hit.image.id) for hit in before]


def test_a_boost_distinguishes_the_types_within_lists(gallery: Gallery) -> None:
    values: list[tuple[Any, ...]] = [(True, "a"), (1, "a"), (1.0, "a"), (True, "a")]
    entries = [
        (Item(id=f"{number}", attributes={"x": value}), [photo("one", unit(1, number / 10, 0))])
        for number, value in enumerate(values)
    ]
    gallery.upsert(entries, BUNDLE)
    ranking = Ranking.model_validate({"boosts": [{"filter": {"x": 1}, "weight": 0.5}]})
    for _ in range(2):
        found = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, ranking=ranking)
        assert ids(found.hits[0]) == ["1", "2", "0", "3"]
        gallery.compact()


def test_a_boost_may_span_all_numbers(gallery: Gallery) -> None:
    numbers = (-1e308, 0, 1e308, 1.7e308)
    entries = [(Item(id=f"{n}", attributes={"x": n}), [photo("one", unit(1, 0, 0))]) for n in numbers]
    gallery.upsert(entries, BUNDLE)
    for ends in ((-1e308, 1e308), (1e308, -1e308)):
        boost = {"attribute": "x", "from": ends[0], "to": ends[1], "weight": 1}
        ranking = Ranking.model_validate({"boosts": [boost]})
        hits = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, ranking=ranking, explain=True).hits[0]
        shares = {hit.item.id: hit.explanation.shares[0].share for hit in hits if hit.explanation}
        rising = [shares[f"{n}"] for n in numbers]
        assert rising == [0, 0.5, 1, 1] if ends[1] > 0 else rising == [1, 0.5, 0, 0]


# Random rankings

shares = st.floats(-0.2, 0.2).map(lambda number: round(number, 3))
boosts = st.one_of(
    st.builds(lambda weight, value: {"filter": {"sale": value}, "weight": weight}, shares, st.booleans()),
    st.builds(
        lambda weight, ends, missing: {
            "attribute": "margin", "from": ends[0], "to": ends[1], "weight": weight, "missing": missing,
        },
        shares,
        st.tuples(st.sampled_from([0.0, 0.3]), st.sampled_from([0.6, -1.0])),
        st.sampled_from([0, 0.4]),
    ),
    st.builds(lambda weight, days: {"attribute": "added", "half_life_days": days, "weight": weight}, shares,
              st.sampled_from([1, 30, 400])),
)  # fmt: skip
item_ids = st.sampled_from([f"item-{number:05d}" for number in range(0, 160, 9)])
rankings = st.fixed_dictionaries(
    {"window": st.sampled_from([10, 33, 200])},
    optional={
        "boosts": st.lists(boosts, max_size=4),
        "pin": st.lists(item_ids, unique=True, max_size=4),
        "group_by": st.sampled_from(["parent", "colour", "unknown", "sale", "sizes", "ratings"]),
        "hide": st.fixed_dictionaries({}, optional={
            "ids": st.lists(item_ids, unique=True, max_size=3),
            "filter": st.sampled_from([{"stock": 3}, {"not": {"sale": True}}]),
        }),
    },
)  # fmt: skip
orders = st.one_of(
    st.just({}),
    st.builds(lambda share: {"diversity": share}, st.sampled_from([0.1, 0.5, 1])),
    st.builds(
        lambda name, order: {"sort_by": {"attribute": name, "order": order}},
        st.sampled_from(["price", "margin", "unknown", "colour", "ratings"]),
        st.sampled_from(["ascending", "descending"]),
    ),
)
searches = st.fixed_dictionaries(
    {},
    optional={
        "min_score": st.sampled_from([-0.2, 0.3]),
        "filter": st.sampled_from([Filter.parse({"price": {"gt": 10}}), Filter.parse({"brand": "Acme"})]),
        "exclude": st.lists(item_ids, unique=True, max_size=2),
    },
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with open_gallery(tmp_path_factory.mktemp("ranked") / "gallery", create=True) as gallery:
        yield fill_shop(gallery)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=rankings, order=orders, size=st.sampled_from([1, 9, 60]), bounds=searches)
def test_the_pages_of_a_random_ranking_add_up_to_the_reference(
    stored: Shop, document: dict[str, Any], order: dict[str, Any], size: int, bounds: dict[str, Any]
) -> None:
    check_pages(stored, Ranking.model_validate({**document, **order}), size, bounds)


# Explanations


@pytest.mark.parametrize("document", RANKINGS, ids=str)
def test_an_explanation_adds_up_to_the_score(variants: Shop, document: dict[str, Any]) -> None:
    ranking = Ranking.model_validate(document)
    expected = ReferenceRanking(variants.reference, variants.query[None], ranking, now=NOW.timestamp())
    found = variants.gallery.search(variants.query[None], bundle_id=BUNDLE, top=60, ranking=ranking, explain=True)
    for hit in found.hits[0]:
        told = hit.explanation
        assert told and told.similarity == hit.score and told.detail
        assert told.score == pytest.approx(told.similarity + sum(share.share for share in told.shares), abs=1e-9)
        if told.reason == "pinned":
            assert hit.item.id in ranking.pin
        elif not ranking.diversity:
            assert told.score == pytest.approx(expected.score(hit.item.id), abs=5e-6)
    if ranking.boosts and not ranking.sort_by:
        final = [hit.explanation.score for hit in found.hits[0][: ranking.window] if hit.explanation]
        assert ranking.diversity or final == sorted(final, reverse=True)


def test_an_explanation_names_what_decided(variants: Shop) -> None:
    def explain(document: dict[str, Any]) -> list[tuple[str, str]]:
        ranking = Ranking.model_validate(document)
        found = variants.gallery.search(variants.query[None], bundle_id=BUNDLE, top=3, ranking=ranking, explain=True)
        return [(hit.explanation.reason, hit.explanation.detail) for hit in found.hits[0] if hit.explanation]

    assert explain({"pin": ["item-00140"]})[0] == ("pinned", "The ranking pins it.")
    assert explain({})[0][0] == "similarity"
    assert explain({"boosts": BOOSTS})[0][0] == "score"
    first, second, _ = explain({"diversity": 0.5})
    assert first[0] == "score" and second[0] == "diversity" and "likeness" in second[1]
    assert explain({"sort_by": {"attribute": "stock", "order": "descending"}})[0] == (
        "sort",
        "The items are sorted by 'stock', descending; it has 9.",
    )


def test_hits_have_an_explanation_only_when_asked(variants: Shop) -> None:
    found = variants.gallery.search(variants.query[None], bundle_id=BUNDLE, ranking=Ranking(diversity=0.5))
    assert [hit.explanation for hit in found.hits[0]] == [None] * 10
    plain = variants.gallery.search(variants.query[None], bundle_id=BUNDLE, explain=True)
    assert all(hit.explanation and hit.explanation.shares == [] for hit in plain.hits[0])


# Windows


def test_the_result_names_the_window(variants: Shop) -> None:
    def window(ranking: Ranking, **bounds: Any) -> tuple[int, int, bool]:
        found = variants.gallery.search(variants.query[None], bundle_id=BUNDLE, ranking=ranking, **bounds)
        return (found.windows[0].size, found.windows[0].candidates, found.windows[0].exhausted)

    assert window(Ranking(diversity=0.5, window=20)) == (20, 20, False)
    assert window(Ranking(diversity=0.5, window=200)) == (200, 150, True)
    assert window(Ranking(diversity=0.5, window=30), filter=Filter.parse({"brand": "Acme"})) == (30, 30, True)
    assert (
        variants.gallery.search(variants.query[None], bundle_id=BUNDLE, ranking=Ranking(group_by="parent")).windows
        == []
    )


def test_several_queries_are_ranked_one_by_one(variants: Shop) -> None:
    queries = np.stack([images[0].vector for _, images in make_entries(5, seed=5)])
    ranking = Ranking.model_validate({"group_by": "parent", "boosts": BOOSTS, "window": 25})
    found = variants.gallery.search(queries, bundle_id=BUNDLE, top=20, ranking=ranking)
    assert len(found.windows) == 5 and found.cursor is None
    for query, hits in zip(queries, found.hits, strict=True):
        expected = ReferenceRanking(variants.reference, query[None], ranking, now=NOW.timestamp())
        assert ids(hits) == expected.ids[:20]


# Writes between pages


@pytest.mark.parametrize(
    "document",
    [
        {"boosts": BOOSTS, "window": 25},
        {"diversity": 0.5, "window": 40, "group_by": "parent"},
        {"group_by": "parent"},
        {"sort_by": {"attribute": "price"}, "pin": ["item-00003"], "window": 500},
    ],
    ids=str,
)
def test_writes_between_pages_repeat_no_item_and_no_group(variants: Shop, document: dict[str, Any]) -> None:
    gallery, random = variants.gallery, np.random.default_rng(3)
    new = iter(make_entries(200, seed=9))
    before = set(ReferenceRanking(variants.reference, variants.query[None], Ranking.model_validate(document)).ids)
    seen: list[Item] = []
    deleted: set[str] = set()
    for number, page in enumerate(pages(gallery, variants.query, 8, ranking=Ranking.model_validate(document))):
        seen += [hit.item for hit in page.hits[0]]
        # Adds items near and far, some to groups that exist, deletes others, and compacts after some pages.
        for _ in range(3):
            item, images = next(new)
            own = {"parent": f"product {random.integers(50)}"} if random.random() < 0.5 else {}
            renamed = item.model_copy(update={"id": f"new-{item.id}", "attributes": {**item.attributes, **own}})
            gallery.upsert([(renamed, images)], BUNDLE)
        gone = f"item-{random.integers(150):05d}"
        deleted.add(gone)
        gallery.delete([gone])
        if number % 5 == 4:
            gallery.compact()
    found = [item.id for item in seen]
    assert len(found) == len(set(found))
    groups = [item.attributes["parent"] for item in seen if "parent" in item.attributes]
    if "group_by" in document:
        assert len(groups) == len(set(groups))
    else:
        assert before - deleted <= {*found}, "every item that was not deleted is on a page"


def test_a_long_search_has_bounded_cursors_and_repeats_nothing(gallery: Gallery) -> None:
    entries = [
        (item.model_copy(update={"attributes": {"pair": number // 2}}), images[:1])
        for number, (item, images) in enumerate(make_entries(2600, images=1))
    ]
    gallery.upsert(entries, BUNDLE)
    gallery.activate(BUNDLE)
    query = entries[0][1][0].vector
    for document, count in (({"diversity": 0.1, "window": 500}, 2600), ({"group_by": "pair"}, 1300)):
        found = [
            hit.item.id
            for page in pages(gallery, query, 300, ranking=Ranking.model_validate(document))
            for hit in page.hits[0]
        ]
        assert len(found) == len(set(found)) == count


def test_a_cursor_is_bound_to_the_ranking(variants: Shop) -> None:
    def search(ranking: Ranking | None, cursor: str | None = None) -> SearchResult:
        return variants.gallery.search(variants.query[None], bundle_id=BUNDLE, ranking=ranking, cursor=cursor)

    cursor = search(Ranking(diversity=0.5)).cursor
    assert cursor
    for other in (None, Ranking(), Ranking(diversity=0.6), Ranking(diversity=0.5, window=60)):
        with pytest.raises(LookalikeError, match="ranking has changed"):
            search(other, cursor)
    assert search(Ranking(diversity=0.5), cursor).hits[0]


def test_dates_are_compared_with_the_time_of_the_first_page(variants: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    ranking = Ranking.model_validate({"boosts": BOOSTS[4:], "window": 100})
    expected = ReferenceRanking(variants.reference, variants.query[None], ranking, now=NOW.timestamp())
    found: list[str] = []
    for number, page in enumerate(pages(variants.gallery, variants.query, 10, ranking=ranking)):
        found += ids(page.hits[0])
        later = round((NOW.timestamp() + (number + 1) * 1e6) * 1e6)
        monkeypatch.setattr("index.gallery.ranking.pages.current_instant", lambda later=later: later)
    assert found == expected.ids


def test_an_invalid_filter_of_a_rule_is_named(variants: Shop) -> None:
    for document, place in (
        ({"boosts": [{"filter": {"price": {"over": 3}}, "weight": 0.1}]}, r"ranking.boosts\[0\].filter: filter.price"),
        ({"hide": {"filter": {"price": None}}}, "ranking.hide.filter: filter.price"),
    ):
        with pytest.raises(LookalikeError, match=place):
            variants.gallery.search(variants.query[None], bundle_id=BUNDLE, ranking=Ranking.model_validate(document))


def test_the_filters_of_a_ranking_share_their_limits(variants: Shop) -> None:
    # Each filter alone is allowed; compared with every candidate, they would take many seconds together.
    alternatives: dict[str, Any] = {"any": [{"added": {"gte": f"2027-01-01T00:{number:02}"}} for number in range(33)]}
    for document in (
        {"boosts": [{"filter": alternatives, "weight": 0.1}, {"filter": alternatives, "weight": 0.2}]},
        {"boosts": [{"filter": alternatives, "weight": 0.1}], "hide": {"filter": alternatives}},
    ):
        with pytest.raises(LookalikeError, match="exceeds the limit of 64 conditions"):
            variants.gallery.search(variants.query[None], bundle_id=BUNDLE, ranking=Ranking.model_validate(document))


def test_expired_items_are_neither_pinned_nor_candidates_nor_examples(gallery: Gallery) -> None:
    past, future = {"expires_at": "2020-01-01"}, {"expires_at": "2100-01-01"}
    entries = [
        (Item(id=name, attributes={**own, "parent": "p" if name != "far" else "q"}), [photo("one", unit(1, 0, number))])
        for number, (name, own) in enumerate((("gone", past), ("near", future), ("far", {}), ("lost", past)))
    ]
    gallery.upsert(entries, BUNDLE)
    for document in (
        {"pin": ["lost", "far", "gone"]},
        {"pin": ["lost", "far"], "group_by": "parent"},
        {"pin": ["gone", "far"], "diversity": 0.1},
    ):
        for _ in range(2):
            found = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, ranking=Ranking.model_validate(document))
            assert ids(found.hits[0]) == ["far", "near"]
            gallery.compact()
    with pytest.raises(ItemMissing):
        gallery.search_examples([Example(item_id="near"), Example(item_id="gone", weight=-0.5)])


def test_a_new_gallery_has_nothing_to_rank(tmp_path: Path) -> None:
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        assert gallery.search(np.ones((1, 3), np.float32), bundle_id=BUNDLE, ranking=Ranking(diversity=1)).hits == [[]]


def test_the_largest_window_takes_a_few_megabytes(gallery: Gallery) -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(600, 512)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    entries = [
        (Item(id=str(number), attributes={"price": number}), [photo("one", vector)])
        for number, vector in enumerate(vectors)
    ]
    gallery.upsert(entries, BUNDLE)
    gallery.activate(BUNDLE)
    ranking = Ranking.model_validate({"diversity": 0.5, "window": 500, "boosts": BOOSTS})
    gallery.search(vectors[:1], bundle_id=BUNDLE, top=500, ranking=ranking)
    tracemalloc.start()
    try:
        found = gallery.search(vectors[:1], bundle_id=BUNDLE, top=500, ranking=ranking, explain=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.hits[0]) == 500
    if gallery.address != "memory":
        assert peak < 6 * 2**20
