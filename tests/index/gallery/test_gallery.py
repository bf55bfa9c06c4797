"""Writes, reads and bundles of a gallery on every engine, through the public interface only."""

import numpy as np
import pytest

from index.errors import LookalikeError
from index.gallery import BuildReport, Gallery
from index.gallery.errors import BundleMismatch, TooManyAttributes, TooManyImages, VersionConflict
from index.gallery.filters import Filter
from index.gallery.types import Item, NewImage, Progress
from index.items import MAX_ATTRIBUTE_NAMES, MAX_IMAGES_PER_ITEM

from .conftest import OpenEngine
from .reference import BUNDLE, MUG, OTHER_BUNDLE, SHOE, TRIO, Shop, Vector, photo, search_ids, unit

# Writes and reads


def test_a_stored_item_is_read_back_unchanged(trio: Gallery) -> None:
    stored = trio.get_item("mug")
    assert stored and (stored.item, [image.id for image in stored.images]) == (MUG, ["front"])
    assert trio.get_item("spoon") is None


def test_digests_cover_images_with_a_vector_of_the_bundle(trio: Gallery) -> None:
    assert trio.digests("shoe", BUNDLE) == {"left": f"{2:064x}", "right": f"{3:064x}"}
    assert trio.digests("shoe", OTHER_BUNDLE) == {}
    assert trio.digests("spoon", BUNDLE) == {}


def test_a_thumbnail_is_kept_while_any_image_has_its_digest(trio: Gallery) -> None:
    trio.upsert([(Item(id="twin"), [photo("same", unit(1, 0, 0), 1)])], BUNDLE)
    trio.delete(["mug"])
    assert trio.thumbnail(f"{1:064x}") == b"jpeg of 1"
    trio.delete_images("twin", ["same"])
    assert trio.thumbnail(f"{1:064x}") is None


def test_a_write_is_visible_to_the_next_search_without_an_activation(gallery: Gallery) -> None:
    gallery.upsert(TRIO[:1], BUNDLE)
    assert search_ids(gallery, 1, 0, 0) == ["mug"]
    gallery.upsert(TRIO[1:], BUNDLE)
    assert search_ids(gallery, 0, 1, 0.1) == ["shoe", "bag", "mug"]


def test_a_write_is_visible_to_the_next_search_of_another_handle(trio: Gallery, open_engine: OpenEngine) -> None:
    reader = open_engine()
    assert search_ids(reader, 0, 0, 1)[0] == "bag"
    trio.upsert([(Item(id="lamp"), [photo("on", unit(0, 0, 1))])], BUNDLE)
    assert search_ids(reader, 0, 0, 1)[0] == "lamp"
    trio.compact()
    assert search_ids(reader, 0, 0, 1)[0] == "lamp"
    trio.delete(["lamp"])
    assert search_ids(reader, 0, 0, 1)[0] == "bag"


@pytest.mark.parametrize("compacted", [False, True])
def test_a_deleted_item_is_not_in_the_next_search(gallery: Gallery, compacted: bool) -> None:
    gallery.upsert(TRIO, BUNDLE)
    if compacted:
        gallery.compact()
    gallery.delete(["mug", "unknown"])
    assert search_ids(gallery, 1, 0, 0) == ["bag", "shoe"]
    assert gallery.get_item("mug") is None


def test_deleting_an_image_keeps_the_item_and_its_other_images(trio: Gallery) -> None:
    trio.delete_images("shoe", ["right", "unknown"])
    (hit,) = trio.search(unit(0, 1, 0.2)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert (hit.item.id, hit.image.id) == ("shoe", "left")
    trio.delete_images("shoe", ["left"])
    assert search_ids(trio, 0, 1, 0) == ["bag", "mug"]
    stored = trio.get_item("shoe")
    assert stored and stored.item == SHOE


def test_a_changed_photo_replaces_the_old_vector(trio: Gallery) -> None:
    trio.upsert([(MUG, [photo("front", unit(0, 0, 1), 9)])], BUNDLE)
    for _ in range(2):
        assert search_ids(trio, 0, 0, 1)[0] == "mug"
        assert search_ids(trio, 1, 0, 0)[0] == "bag"
        trio.compact()
    assert trio.stats().images == 4


def test_an_upsert_without_images_changes_the_item_and_keeps_its_images(trio: Gallery) -> None:
    trio.upsert([(Item(id="mug", attributes={"price": 9}), [])], BUNDLE)
    (hit,) = trio.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert hit.item == Item(id="mug", attributes={"price": 9})


def test_images_are_added_and_removed_in_one_revision(trio: Gallery) -> None:
    before = trio.stats().revision
    entry = (SHOE, [photo("sole", unit(0, 0, 1), 9)])
    assert trio.upsert([entry], BUNDLE, without={"shoe": ["left", "right", "unknown"]}) == before + 1
    assert trio.digests("shoe", BUNDLE) == {"sole": f"{9:064x}"}
    assert search_ids(trio, 0, 0, 1)[0] == "shoe"
    with pytest.raises(VersionConflict):
        trio.upsert([(SHOE, [])], BUNDLE, expected={"shoe": before}, without={"shoe": ["sole"]})
    assert trio.digests("shoe", BUNDLE) == {"sole": f"{9:064x}"}


def views(start: int, stop: int) -> list[NewImage]:
    return [photo(f"view-{number}", unit(1, number, 0)) for number in range(start, stop)]


def test_an_item_has_a_limited_number_of_images(trio: Gallery) -> None:
    revision = trio.upsert([(SHOE, views(0, MAX_IMAGES_PER_ITEM - 2))], BUNDLE)
    with pytest.raises(TooManyImages, match=r"'shoe' would have 258 images; the limit is 256. Remove") as error:
        trio.upsert([(MUG, views(0, 1)), (SHOE, views(10, MAX_IMAGES_PER_ITEM))], BUNDLE)
    assert (error.value.item_id, error.value.image_ids) == ("shoe", frozenset({"view-254", "view-255"}))
    assert trio.stats().revision == revision and list(trio.digests("mug", BUNDLE)) == ["front"], "nothing was written"
    assert trio.upsert([(SHOE, [photo("left", unit(0, 0, 1), 9)])], BUNDLE) > revision, "an image may be replaced"
    trio.upsert([(SHOE, views(300, 310))], BUNDLE, without={"shoe": [f"view-{number}" for number in range(10)]})
    assert len(trio.digests("shoe", BUNDLE)) == MAX_IMAGES_PER_ITEM
    with pytest.raises(TooManyImages):
        trio.upsert([(SHOE, views(400, 401))], BUNDLE)
    trio.upsert([(Item(id="crate"), views(0, MAX_IMAGES_PER_ITEM))], BUNDLE)
    assert len(trio.search_item("crate").hits[0]) == 3


def test_a_gallery_has_a_limited_number_of_attribute_names(trio: Gallery) -> None:
    def item(number: int, first: int, count: int = 250) -> tuple[Item, list[NewImage]]:
        return Item(id=f"item-{number}", attributes={f"name-{name:05}": 1 for name in range(first, first + count)}), []

    full = [item(number, 250 * number) for number in range(MAX_ATTRIBUTE_NAMES // 250)]
    with pytest.raises(TooManyAttributes, match=r"'item-39' has the new attribute 'name-09750'.*has 10,000 already"):
        trio.upsert(full, BUNDLE)  # the mug has the attribute `price`
    trio.upsert([(Item(id="mug"), [])], BUNDLE)
    revision = trio.upsert(full, BUNDLE)
    with pytest.raises(TooManyAttributes) as error:
        trio.upsert([(Item(id="bag", title="A bag"), []), (MUG, [])], BUNDLE)
    assert (error.value.item_id, error.value.image_ids) == ("mug", frozenset())
    assert trio.stats().revision == revision, "nothing was written"
    trio.upsert([item(99, 0)], BUNDLE)  # no new name
    trio.upsert([item(5, 5 * 250 + 1, 249)], BUNDLE)  # one name fewer
    trio.upsert([(MUG, [])], BUNDLE)
    with pytest.raises(TooManyAttributes):
        trio.upsert([item(100, 20_000, 1)], BUNDLE)
    trio.delete(["item-0", "item-7"])
    trio.upsert([item(100, 20_000)], BUNDLE)
    with pytest.raises(TooManyAttributes):
        trio.upsert([item(101, 30_000, 1)], BUNDLE)


def test_an_item_without_images_is_stored_but_not_found(gallery: Gallery) -> None:
    gallery.upsert([(MUG, [])], BUNDLE)
    stored = gallery.get_item("mug")
    assert stored and stored.item == MUG
    assert search_ids(gallery, 1, 0, 0) == []


def test_a_deleted_item_can_be_stored_again(trio: Gallery) -> None:
    trio.delete(["shoe"])
    trio.upsert([(SHOE, [photo("left", unit(0, 0, 1), 2)])], BUNDLE)
    (hit,) = trio.search(unit(0, 0, 1)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert (hit.item.id, hit.image.id, hit.score) == ("shoe", "left", 1.0)
    assert trio.digests("shoe", BUNDLE) == {"left": f"{2:064x}"}


def test_only_writes_that_change_something_increase_the_revision(trio: Gallery) -> None:
    before = trio.stats().revision
    assert trio.upsert(TRIO, BUNDLE) == before
    assert trio.delete(["unknown"]) == before
    assert trio.delete_images("mug", ["unknown"]) == before
    after = trio.delete(["bag"])
    assert after > before
    assert trio.search(unit(1, 0, 0)[None], bundle_id=BUNDLE).revision == after


def test_a_failed_write_changes_nothing(trio: Gallery) -> None:
    before = trio.stats()
    with pytest.raises(LookalikeError):
        trio.upsert([(Item(id="fine"), [photo("a", unit(1, 0, 0))]), (MUG, [photo("b", unit(1, 0))])], BUNDLE)
    assert trio.get_item("fine") is None
    assert trio.stats() == before


@pytest.mark.parametrize(
    "vector",
    [unit(1, 0), unit(1, 0, 0, 0), np.array([1, np.nan, 0], np.float32), np.array([np.inf, 0, 0], np.float32),
     np.array([1e6, 0, 0], np.float32), np.zeros(0, np.float32), unit(1, 0, 0)[None]],
    ids=["too short", "too long", "nan", "infinite", "beyond half precision", "empty", "a matrix"],
)  # fmt: skip
def test_an_invalid_vector_is_refused(trio: Gallery, vector: Vector) -> None:
    with pytest.raises(LookalikeError, match="'invalid'"):
        trio.upsert([(MUG, [photo("invalid", vector, 5)])], BUNDLE)
    assert trio.digests("mug", BUNDLE) == {"front": f"{1:064x}"}


def test_an_invalid_digest_is_refused(trio: Gallery) -> None:
    with pytest.raises(LookalikeError, match="digest"):
        trio.upsert([(MUG, [NewImage("invalid", "abc", unit(1, 0, 0), b"")])], BUNDLE)
    trio.compact(rebuild=True)
    assert search_ids(trio, 1, 0, 0)[0] == "mug"


def test_statistics_count_items_and_images(trio: Gallery) -> None:
    stats = trio.stats()
    assert (stats.items, stats.images, stats.dimension, stats.bundle_id) == (3, 4, 3, BUNDLE)
    assert stats.index and stats.index.revision == stats.revision
    assert stats.index.pending == 0
    trio.delete(["shoe"])
    stats = trio.stats()
    assert (stats.items, stats.images) == (2, 2)


def test_a_gallery_is_the_same_after_reopening(trio: Gallery, open_engine: OpenEngine) -> None:
    trio.upsert([(Item(id="lamp"), [photo("on", unit(0, 0, 1))])], BUNDLE)
    before, found = trio.stats(), search_ids(trio, 0, 0, 1)
    trio.close()
    reopened = open_engine()
    assert reopened.stats().model_copy(update={"store_bytes": before.store_bytes}) == before
    assert search_ids(reopened, 0, 0, 1) == found


def test_a_gallery_can_be_closed_twice(trio: Gallery, open_engine: OpenEngine) -> None:
    trio.close()
    trio.close()
    assert open_engine().stats().items == 3


# Scans


def test_a_scan_returns_all_items_in_the_order_of_their_ids(shop: Shop) -> None:
    found, after = [], ""
    while True:
        page = shop.gallery.scan(after=after, count=37)
        found += page.items
        if page.after is None:
            break
        after = page.after
    assert found == [shop.reference.items[item_id] for item_id in sorted(shop.reference.items)]


def test_a_filtered_scan_fills_its_pages(shop: Shop) -> None:
    wanted = Filter.parse({"stock": 3})
    matching = [item for _, item in sorted(shop.reference.items.items()) if wanted.matches(item.attributes)]
    first = shop.gallery.scan(filter=wanted, count=10)
    assert first.items == matching[:10]
    assert first.after == matching[9].id
    rest = shop.gallery.scan(filter=wanted, after=matching[9].id, count=1000)
    assert rest.items == matching[10:]
    assert rest.after is None


def test_a_page_that_ends_with_the_last_item_is_the_last_page(trio: Gallery) -> None:
    assert [item.id for item in trio.scan(count=3).items] == ["bag", "mug", "shoe"]
    assert trio.scan(count=3).after is None
    assert trio.scan(after="shoe").items == []


# Bundles


def test_vectors_of_another_bundle_are_never_compared(trio: Gallery) -> None:
    with pytest.raises(BundleMismatch, match=rf"bundle {BUNDLE}, not with {OTHER_BUNDLE}.*lookalike reindex"):
        trio.search(unit(1, 0, 0)[None], bundle_id=OTHER_BUNDLE)


def test_vectors_of_another_bundle_are_searched_after_its_activation(trio: Gallery, open_engine: OpenEngine) -> None:
    reader = open_engine()
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)]), (SHOE, [photo("left", unit(1, 0.1), 2)])], OTHER_BUNDLE)
    assert trio.stats().bundle_id == BUNDLE
    assert search_ids(reader, 1, 0, 0) == ["mug", "bag", "shoe"]
    trio.activate(OTHER_BUNDLE)
    for handle in (trio, reader, open_engine()):
        found = handle.search(unit(0, 1)[None], bundle_id=OTHER_BUNDLE)
        assert [hit.item.id for hit in found.hits[0]] == ["mug", "shoe"]
        stats = handle.stats()
        assert (stats.bundle_id, stats.previous_bundle_id, stats.dimension) == (OTHER_BUNDLE, BUNDLE, 2)
        assert [hit.item.id for hit in handle.search_item("mug").hits[0]] == ["shoe"]


def test_the_previous_bundle_can_be_activated_again(trio: Gallery) -> None:
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)
    trio.activate(OTHER_BUNDLE)
    trio.delete(["bag"])
    trio.compact()
    trio.upsert([(Item(id="lamp"), [photo("on", unit(1, 0))])], OTHER_BUNDLE)
    trio.compact()
    trio.activate(BUNDLE)
    assert search_ids(trio, 1, 0, 0) == ["mug", "shoe"]


def test_the_previous_bundle_stays_searchable_and_follows_deletions(trio: Gallery, open_engine: OpenEngine) -> None:
    reader = open_engine()
    assert search_ids(reader, 1, 0, 0) == ["mug", "bag", "shoe"]
    vectors = {"mug": unit(0, 1), "shoe": unit(1, 0), "bag": unit(1, 1)}
    trio.upsert([(Item(id=name), [photo("new", vector)]) for name, vector in vectors.items()], OTHER_BUNDLE)
    trio.activate(OTHER_BUNDLE)
    trio.delete(["bag"])
    trio.compact()
    for number in range(3):
        trio.upsert([(Item(id=f"lamp-{number}"), [photo("on", unit(number, 1))])], OTHER_BUNDLE)
        trio.compact()
    assert search_ids(reader, 1, 0, 0) == ["mug", "shoe"]


def test_a_first_bundle_is_active_after_a_write_unless_it_is_prepared(gallery: Gallery) -> None:
    entry = (MUG, [photo("front", unit(0, 1), 1)])
    gallery.upsert([entry], BUNDLE, activate_first=False)
    assert gallery.active_bundle() is None and gallery.stats().bundle_id is None
    assert gallery.search(unit(0, 1)[None], bundle_id=BUNDLE).hits == [[]]
    assert [(bundle.id, bundle.state, bundle.vectors) for bundle in gallery.bundles()] == [(BUNDLE, "unused", 1)]
    assert [hit.item.id for hit in gallery.search(unit(0, 1)[None], bundle_id=BUNDLE, rehearsal=True).hits[0]] == [
        "mug"
    ]
    gallery.upsert([(SHOE, [])], OTHER_BUNDLE)
    assert gallery.active_bundle() is None, "an item without images has no bundle"
    gallery.upsert([(SHOE, [photo("left", unit(1, 0), 2)])], BUNDLE)
    assert gallery.active_bundle() == BUNDLE
    assert [hit.item.id for hit in gallery.search(unit(0, 1)[None], bundle_id=BUNDLE).hits[0]] == ["mug", "shoe"]


def test_a_bundle_without_vectors_cannot_be_activated(trio: Gallery) -> None:
    with pytest.raises(LookalikeError, match=r"no vectors of bundle c.*lookalike reindex"):
        trio.activate(OTHER_BUNDLE)
    assert trio.stats().bundle_id == BUNDLE


def test_a_bundle_that_is_dropped_while_it_is_activated_does_not_become_active(
    trio: Gallery, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, prepare = open_engine(), trio.prepare
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)

    def drop_afterwards(bundle_id: str, *, on_progress: Progress) -> BuildReport:
        report = prepare(bundle_id, on_progress=on_progress)
        other.drop_bundle(bundle_id)
        other.upsert([(MUG, [photo("front", unit(1, 1), 1)])], "d" * 16)
        return report

    monkeypatch.setattr(trio, "prepare", drop_afterwards)
    with pytest.raises(LookalikeError, match=r"Bundle c+ was dropped meanwhile"):
        trio.activate(OTHER_BUNDLE)
    assert trio.active_bundle() == BUNDLE


def test_a_bundle_that_was_dropped_and_indexed_again_has_only_its_new_vectors(
    trio: Gallery, open_engine: OpenEngine
) -> None:
    reader = open_engine()
    both = [(MUG, [photo("front", unit(0, 1), 1)]), (SHOE, [photo("left", unit(1, 0), 2)])]

    def found(*, rehearsal: bool) -> list[str]:
        hits = reader.search(unit(0, 1)[None], bundle_id=OTHER_BUNDLE, rehearsal=rehearsal).hits[0]
        return [hit.item.id for hit in hits]

    trio.upsert(both, OTHER_BUNDLE)
    assert found(rehearsal=True) == ["mug", "shoe"]
    trio.activate(OTHER_BUNDLE)
    assert found(rehearsal=False) == ["mug", "shoe"]
    trio.activate(BUNDLE)
    trio.drop_bundle(OTHER_BUNDLE)
    trio.upsert(both[:1], OTHER_BUNDLE)
    assert found(rehearsal=True) == ["mug"]
    trio.activate(OTHER_BUNDLE)
    assert found(rehearsal=False) == ["mug"]


def test_a_rehearsal_of_a_dropped_bundle_never_compares_vectors_of_the_next(
    trio: Gallery, open_engine: OpenEngine
) -> None:
    reader = open_engine()
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)
    reader.search(unit(0, 1)[None], bundle_id=OTHER_BUNDLE, rehearsal=True)
    trio.drop_bundle(OTHER_BUNDLE)
    trio.upsert([(MUG, [photo("front", unit(1, 0), 1)])], "d" * 16)
    assert reader.search(unit(0, 1)[None], bundle_id=OTHER_BUNDLE, rehearsal=True).hits[0][0].score == 1


def test_a_changed_photo_drops_the_vectors_of_every_bundle(trio: Gallery) -> None:
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)
    trio.upsert([(MUG, [photo("front", unit(0, 0, 1), 99)])], BUNDLE)
    assert trio.digests("mug", OTHER_BUNDLE) == {}
    assert trio.digests("mug", BUNDLE) == {"front": f"{99:064x}"}


# Images without a vector


def test_images_without_a_vector_of_the_active_bundle_are_counted(trio: Gallery) -> None:
    images = trio.stats().images
    assert trio.stats().unsearchable == 0
    newest = []
    for name in ("lamp", "sofa"):
        newest.append(trio.newest_image())
        trio.upsert([(Item(id=name), [photo("front", unit(1, 0))])], OTHER_BUNDLE)
    assert trio.stats().unsearchable == trio.images_without(BUNDLE) == 2
    assert [trio.images_without(BUNDLE, through=key) for key in (*newest, trio.newest_image())] == [0, 1, 2]
    assert trio.images_without(OTHER_BUNDLE, through=newest[0]) == trio.images_without(OTHER_BUNDLE) == images
    trio.activate(OTHER_BUNDLE)
    assert trio.stats().unsearchable == images


def test_an_empty_gallery_has_no_images_without_a_vector(gallery: Gallery) -> None:
    assert (gallery.stats().unsearchable, gallery.newest_image()) == (0, 0)


# Verification


def test_verification_reports_images_that_no_search_finds(trio: Gallery) -> None:
    trio.upsert([(Item(id="lamp"), [photo("on", unit(1, 0)), photo("off", unit(0, 1))])], OTHER_BUNDLE)
    (fault,) = trio.verify()
    assert fault.problem == (
        "2 images have no vector of the active bundle, so no search finds them: lamp/on, lamp/off."
    )
    assert f"with bundle {BUNDLE}" in fault.remedy and "send them again" in fault.remedy


def test_verification_finds_no_fault_in_a_gallery_in_use(shop: Shop) -> None:
    shop.gallery.delete(["item-00003"])
    assert shop.gallery.verify() == []


def test_a_gallery_that_can_be_searched_passes_its_check(trio: Gallery) -> None:
    trio.check(BUNDLE)
    with pytest.raises(BundleMismatch):
        trio.check("c" * 16)


def test_an_empty_gallery_passes_its_check(gallery: Gallery) -> None:
    gallery.check(BUNDLE)
