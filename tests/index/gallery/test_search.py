"""Searches, pages and filters on every engine, through the public interface only."""

from collections.abc import Callable

import numpy as np
import pytest

from index.errors import LookalikeError
from index.gallery import Gallery
from index.gallery.errors import ItemMissing
from index.gallery.filters import Filter
from index.gallery.types import Hit, Item

from .conftest import OpenEngine
from .reference import BUNDLE, MUG, TRIO, Shop, Vector, make_entries, photo, search_ids, unit


def collect_pages(search: Callable[[str | None], tuple[list[Hit], str | None]]) -> list[Hit]:
    """Returns the hits of all pages."""
    hits, cursor = search(None)
    while cursor:
        more, cursor = search(cursor)
        assert more, "a cursor must not lead to an empty page"
        hits += more
    return hits


# Searches


def test_a_search_of_a_new_gallery_finds_nothing(gallery: Gallery) -> None:
    assert search_ids(gallery, 1, 0, 0) == []
    assert gallery.compact() is None
    assert gallery.stats().items == 0
    assert gallery.scan().items == []
    with pytest.raises(ItemMissing):
        gallery.search_item("mug")


@pytest.mark.parametrize("compacted", [False, True])
def test_a_search_after_all_items_were_deleted_finds_nothing(
    trio: Gallery, open_engine: OpenEngine, compacted: bool
) -> None:
    trio.delete(["mug", "shoe", "bag"])
    if compacted:
        assert trio.compact() is None
    for handle in (trio, open_engine()):
        assert search_ids(handle, 1, 0, 0) == []
        assert handle.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, filter=Filter.parse({"price": 5.5})).hits == [[]]
    trio.upsert(TRIO[:1], BUNDLE)
    assert search_ids(trio, 1, 0, 0) == ["mug"]


def test_a_hit_has_the_item_its_best_image_and_the_score(trio: Gallery) -> None:
    found = trio.search(unit(0, 1, 0.2)[None], bundle_id=BUNDLE)
    assert [(hit.item.id, hit.image.id) for hit in found.hits[0]] == [
        ("shoe", "right"),
        ("bag", "open"),
        ("mug", "front"),
    ]
    assert found.hits[0][2].item == MUG
    assert found.hits[0][0].score == pytest.approx(1, abs=1e-3)
    assert found.hits[0][2].score == pytest.approx(0, abs=1e-3)
    assert trio.thumbnail(found.hits[0][2].image.digest) == b"jpeg of 1"


@pytest.mark.parametrize("top", [1, 10, 100, 1000])
def test_items_are_ranked_by_their_best_image(shop: Shop, top: int) -> None:
    shop.check(top=top)


@pytest.mark.parametrize("top", [0, -1, 1001])
def test_an_invalid_number_of_results_is_refused(trio: Gallery, top: int) -> None:
    with pytest.raises(LookalikeError, match=f"top is {top}"):
        trio.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=top)


@pytest.mark.parametrize("compacted", [False, True])
def test_many_images_of_one_item_do_not_fill_the_list(gallery: Gallery, compacted: bool) -> None:
    crowd = [photo(str(number), unit(1, 0, number / 1000)) for number in range(250)]
    gallery.upsert([(Item(id="crowd"), crowd), (Item(id="alone"), [photo("one", unit(0, 1, 0))])], BUNDLE)
    if compacted:
        gallery.compact()
    assert search_ids(gallery, 1, 0, 0, top=2) == ["crowd", "alone"]
    found = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=2, min_score=-0.5)
    assert [hit.item.id for hit in found.hits[0]] == ["crowd", "alone"]


def test_an_item_ranked_after_many_images_of_another_is_not_missed(gallery: Gallery) -> None:
    crowd = [photo(str(number), unit(1, 0, number / 1000)) for number in range(250)]
    gallery.upsert([(Item(id="crowd"), crowd), (Item(id="good"), [photo("one", unit(1, 1, 0))])], BUNDLE)
    gallery.compact()
    worse = [(Item(id=f"worse-{number}"), [photo("one", unit(number / 10, 1, 0))]) for number in range(4)]
    gallery.upsert(worse, BUNDLE)
    assert search_ids(gallery, 1, 0, 0, top=2) == ["crowd", "good"]
    found = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=10, min_score=0.5)
    assert [hit.item.id for hit in found.hits[0]] == ["crowd", "good"]


def test_several_queries_return_results_in_their_order(shop: Shop) -> None:
    queries = np.stack([images[0].vector for _, images in make_entries(40, seed=5)])
    found = shop.gallery.search(queries, bundle_id=BUNDLE, top=20)
    assert len(found.hits) == 40
    assert found.cursor is None
    for query, hits in zip(queries, found.hits, strict=True):
        shop.reference.check(hits, query[None], top=20)


def test_no_query_returns_no_result(trio: Gallery) -> None:
    assert trio.search(np.empty((0, 3), np.float32), bundle_id=BUNDLE).hits == []


@pytest.mark.parametrize("min_score", [-1.0, 0.0, 0.5, 0.95, 1.1])
def test_hits_below_the_minimum_score_are_left_out(shop: Shop, min_score: float) -> None:
    shop.check(top=300, min_score=min_score)


def test_a_hit_with_exactly_the_minimum_score_is_returned(shop: Shop) -> None:
    score = shop.check(top=30)[-1].score
    assert len(shop.check(top=300, min_score=score)) >= 30


def test_excluded_items_are_replaced_by_the_next_best(shop: Shop) -> None:
    best = [hit.item.id for hit in shop.check(top=15)]
    hits = shop.check(top=10, exclude=[*best[:5], "unknown"])
    assert [hit.item.id for hit in hits] == best[5:]


@pytest.mark.parametrize(
    "queries",
    [unit(1, 0)[None], unit(1, 0, 0), np.array([[1, np.nan, 0]], np.float32), np.array([[1, np.inf, 0]], np.float32)],
    ids=["too short", "one-dimensional", "nan", "infinite"],
)
def test_an_invalid_query_vector_is_refused(trio: Gallery, queries: Vector) -> None:
    with pytest.raises(LookalikeError, match="Embed the query with the gallery's bundle"):
        trio.search(queries, bundle_id=BUNDLE)


@pytest.mark.parametrize("min_score", [float("nan"), float("inf")])
def test_a_minimum_score_that_is_not_finite_is_refused(trio: Gallery, min_score: float) -> None:
    with pytest.raises(LookalikeError, match="score"):
        trio.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, min_score=min_score)


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_compaction_does_not_change_results_and_scores(shop: Shop, rebuild: bool) -> None:
    def search() -> list[tuple[str, str, float]]:
        return [(hit.item.id, hit.image.id, hit.score) for hit in shop.check(top=1000)]

    before = search()
    shop.gallery.compact(rebuild=rebuild)
    assert search() == before


# Searches by item


def test_a_search_by_item_leaves_the_item_out(shop: Shop) -> None:
    for item_id in list(shop.reference.items)[::20]:
        found = shop.gallery.search_item(item_id, top=25)
        shop.reference.check(found.hits[0], shop.reference.queries_of(item_id), top=25, exclude=[item_id])


def test_a_search_by_item_uses_the_nearest_of_its_images(gallery: Gallery) -> None:
    both = [photo("one", unit(1, 0, 0)), photo("two", unit(0, 1, 0))]
    near = [(Item(id="near two"), [photo("a", unit(0, 1, 0.1))]), (Item(id="near one"), [photo("a", unit(1, 0, 0.2))])]
    gallery.upsert([(Item(id="both"), both), *near], BUNDLE)
    hits = gallery.search_item("both").hits[0]
    assert [hit.item.id for hit in hits] == ["near two", "near one"]
    assert hits[0].score == pytest.approx(float(unit(0, 1, 0) @ unit(0, 1, 0.1)), abs=1e-3)


def test_a_search_by_item_accepts_filter_minimum_score_and_exclusions(shop: Shop) -> None:
    wanted = Filter.parse({"colour": "green"})
    item_id = next(iter(shop.reference.items))
    queries = shop.reference.queries_of(item_id)
    first = shop.gallery.search_item(item_id, top=5, filter=wanted).hits[0]
    exclude = [hit.item.id for hit in first[:2]]
    found = shop.gallery.search_item(item_id, top=40, filter=wanted, min_score=0.3, exclude=exclude)
    shop.reference.check(found.hits[0], queries, top=40, filter=wanted, min_score=0.3, exclude=[item_id, *exclude])


def test_a_search_by_item_works_with_special_characters_in_the_id(gallery: Gallery) -> None:
    names = ["a\0b", 'quote"', "snow \N{SNOWMAN}", "a'; --", " "]
    gallery.upsert([(Item(id=name), [photo("one", unit(1, number, 0))]) for number, name in enumerate(names)], BUNDLE)
    for name in names:
        assert {hit.item.id for hit in gallery.search_item(name).hits[0]} == {*names} - {name}


@pytest.mark.parametrize("item_id", ["spoon", "empty"])
def test_a_search_by_an_item_without_images_is_refused(trio: Gallery, item_id: str) -> None:
    trio.upsert([(Item(id="empty"), [])], BUNDLE)
    with pytest.raises(ItemMissing, match=item_id):
        trio.search_item(item_id)


# Pages


@pytest.mark.parametrize("size", [3, 40, 160])
@pytest.mark.parametrize("document", [None, {"colour": ["red", "blue"], "not": {"sale": True}}])
def test_pages_add_up_to_the_complete_list(shop: Shop, size: int, document: object) -> None:
    wanted = Filter.parse(document) if document else None

    def page(cursor: str | None) -> tuple[list[Hit], str | None]:
        found = shop.gallery.search(
            shop.query[None], bundle_id=BUNDLE, top=size, filter=wanted, min_score=0.1, cursor=cursor
        )
        return found.hits[0], found.cursor

    complete = [(hit.item.id, hit.score) for hit in shop.check(top=1000, filter=wanted, min_score=0.1)]
    assert [(hit.item.id, hit.score) for hit in collect_pages(page)] == complete


def test_pages_of_a_search_by_item_add_up_to_the_complete_list(shop: Shop) -> None:
    def page(cursor: str | None) -> tuple[list[Hit], str | None]:
        found = shop.gallery.search_item("item-00000", top=9, cursor=cursor)
        return found.hits[0], found.cursor

    complete = shop.gallery.search_item("item-00000", top=1000)
    assert complete.cursor is None
    assert [hit.item.id for hit in collect_pages(page)] == [hit.item.id for hit in complete.hits[0]]


@pytest.mark.parametrize("compacted", [False, True])
def test_pages_of_equal_scores_return_every_item_once(gallery: Gallery, compacted: bool) -> None:
    same = [(Item(id=f"same-{number:02d}"), [photo("one", unit(1, 0, 0))]) for number in range(60)]
    gallery.upsert(same[:40], BUNDLE)
    if compacted:
        gallery.compact()
    gallery.upsert(same[40:], BUNDLE)
    # The image gets another vector and then its first one again, which changes its position in the generation.
    gallery.upsert([(item, [photo("one", unit(0, 1, 0), 7)]) for item, _ in same[:5]], BUNDLE)
    gallery.upsert([(item, [photo("one", unit(1, 0, 0), 7)]) for item, _ in same[:5]], BUNDLE)
    if compacted:
        gallery.compact()

    def page(cursor: str | None) -> tuple[list[Hit], str | None]:
        found = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=7, cursor=cursor)
        return found.hits[0], found.cursor

    found = [hit.item.id for hit in collect_pages(page)]
    assert len(found) == len(set(found)) == 60


def test_writes_and_compactions_between_pages_repeat_no_item(shop: Shop) -> None:
    gallery = shop.gallery
    before = [hit.item.id for hit in shop.check(top=160)]
    seen: list[str] = []
    deleted: set[str] = set()
    new = iter(make_entries(60, seed=9))
    cursor: str | None = None
    while True:
        found = gallery.search(shop.query[None], bundle_id=BUNDLE, top=20, cursor=cursor)
        seen += [hit.item.id for hit in found.hits[0]]
        cursor = found.cursor
        if cursor is None:
            break
        # Adds items near and far, deletes others, and compacts after every other page.
        for _ in range(4):
            item, images = next(new)
            gallery.upsert([(item.model_copy(update={"id": f"new-{item.id}"}), images)], BUNDLE)
        batch = [item_id for item_id in before if item_id not in deleted][-len(seen) // 10 :]
        deleted.update(batch)
        gallery.delete(batch)
        if len(seen) // 20 % 2:
            gallery.compact(rebuild=len(seen) % 40 == 20)
    assert len(seen) == len(set(seen))
    assert {*before} - deleted <= {*seen}, "every item that was not deleted is on a page"


def test_a_cursor_stays_valid_when_an_excluded_item_is_deleted(shop: Shop) -> None:
    exclude = [hit.item.id for hit in shop.check(top=3)]
    first = shop.gallery.search(shop.query[None], bundle_id=BUNDLE, exclude=exclude)
    shop.gallery.delete(exclude[:1])
    second = shop.gallery.search(shop.query[None], bundle_id=BUNDLE, exclude=exclude, cursor=first.cursor)
    assert not {hit.item.id for hit in first.hits[0]} & {hit.item.id for hit in second.hits[0]}
    assert len(second.hits[0]) == 10


def test_a_cursor_of_another_search_is_refused(shop: Shop) -> None:
    gallery, query = shop.gallery, shop.query[None]
    cursor = gallery.search(query, bundle_id=BUNDLE).cursor
    assert cursor
    with pytest.raises(LookalikeError, match="another search"):
        gallery.search(-query, bundle_id=BUNDLE, cursor=cursor)
    with pytest.raises(LookalikeError, match="another search"):
        gallery.search(query, bundle_id=BUNDLE, filter=Filter.parse({"sale": True}), cursor=cursor)
    with pytest.raises(LookalikeError, match="another search"):
        gallery.search(query, bundle_id=BUNDLE, min_score=0.5, cursor=cursor)
    with pytest.raises(LookalikeError, match="another search"):
        gallery.search(query, bundle_id=BUNDLE, exclude=["item-00003"], cursor=cursor)
    with pytest.raises(LookalikeError, match="one query at a time"):
        gallery.search(np.concatenate((query, query)), bundle_id=BUNDLE, cursor=cursor)


@pytest.mark.parametrize("cursor", ["next", "\N{SNOWMAN}", "W10", "A" * 20_000])
def test_an_invalid_cursor_is_refused(shop: Shop, cursor: str) -> None:
    with pytest.raises(LookalikeError, match="cursor"):
        shop.gallery.search(shop.query[None], bundle_id=BUNDLE, cursor=cursor)


# Filters

DOCUMENTS: list[dict[str, object]] = [
    {},
    {"colour": "red"},
    {"colour": ["red", "blue"], "sale": True},
    {"price": {"gte": 10, "lt": 20.5}},
    {"price": {"gt": 49}, "stock": [1, 2, 3]},
    {"brand": {"exists": True}},
    {"brand": {"exists": False}, "stock": 6},
    {"colour": {"gte": "green"}},
    {"not": {"colour": "red"}},
    {"not": {"brand": "Acme", "sale": True}, "price": {"lte": 30}},
    {"not": {"not": {"stock": {"gt": 5}}}},
    {"colour": "mauve"},
    {"size": 4},
    {"sale": 1},
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_a_filtered_search_equals_the_reference(shop: Shop, document: dict[str, object]) -> None:
    for top in (10, 300):
        shop.check(top=top, filter=Filter.parse(document))


def test_a_rare_filter_still_fills_the_list(shop: Shop) -> None:
    far = sorted(shop.reference.search(shop.query[None]), key=lambda expected: expected.score)[:12]
    items = [shop.reference.items[expected.id] for expected in far]
    rare = [(item.model_copy(update={"attributes": {"rare": True}}), ()) for item in items]
    shop.gallery.upsert(rare, BUNDLE)
    shop.reference.upsert(rare)
    for _ in range(2):
        assert len(shop.check(top=10, filter=Filter.parse({"rare": True}))) == 10
        shop.gallery.compact()


def test_changed_attributes_are_filtered_by_their_new_values(shop: Shop) -> None:
    changed = [
        (item.model_copy(update={"attributes": {"colour": "mauve", "price": -1}}), ())
        for item in list(shop.reference.items.values())[::3]
    ]
    shop.check(top=300, filter=Filter.parse({"colour": "red"}))
    shop.gallery.upsert(changed, BUNDLE)
    shop.reference.upsert(changed)
    for _ in range(2):
        for document in ({"colour": "red"}, {"colour": "mauve"}, {"price": {"lt": 0}}, {"brand": {"exists": False}}):
            shop.check(top=300, filter=Filter.parse(document))
        shop.gallery.compact()


def test_filters_follow_items_that_are_added_and_deleted(shop: Shop) -> None:
    wanted = Filter.parse({"sale": True})
    for part in (make_entries(220)[160:190], make_entries(220)[190:]):
        shop.check(top=300, filter=wanted)
        shop.gallery.upsert(part, BUNDLE)
        shop.reference.upsert(part)
        deleted = [item_id for item_id, item in shop.reference.items.items() if wanted.matches(item.attributes)][:9]
        shop.gallery.delete(deleted)
        shop.reference.delete(deleted)
        shop.check(top=300, filter=wanted)


# Results of one revision


@pytest.mark.parametrize("compacted", [False, True])
def test_a_result_keeps_the_items_of_its_revision_while_others_write(trio: Gallery, compacted: bool) -> None:
    if not compacted:
        trio.upsert([(MUG, [photo("side", unit(1, 0, 0.1), 8)])], BUNDLE)
    before = trio.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=1)
    changed = MUG.model_copy(update={"title": "Another mug", "attributes": {"price": 99}})
    after = trio.upsert([(changed, [])], BUNDLE)
    newer = trio.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=1)
    assert (newer.revision, newer.hits[0][0].item) == (after, changed)
    assert before.revision < after
    assert before.hits[0][0].item == MUG, "the item as of the result's revision"


def test_a_filter_is_evaluated_on_the_items_that_are_returned(shop: Shop) -> None:
    cheap = Filter.parse({"price": {"lt": 20}})
    found = shop.gallery.search(shop.query[None], bundle_id=BUNDLE, top=50, filter=cheap)
    expensive = [item.model_copy(update={"attributes": {"price": 30}}) for item in shop.reference.items.values()]
    shop.gallery.upsert([(item, []) for item in expensive], BUNDLE)
    assert shop.gallery.search(shop.query[None], bundle_id=BUNDLE, filter=cheap).hits == [[]]
    assert all(cheap.matches(hit.item.attributes) for hit in found.hits[0]) and len(found.hits[0]) > 5
