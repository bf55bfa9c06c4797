"""What every engine of the `Gallery` interface must do with what it is given; only the interface is used here."""

import numpy as np
import pytest

from index.errors import LookalikeError
from index.gallery import Gallery
from index.gallery.errors import BundleMismatch, JobMissing, JobRunning, VersionConflict
from index.gallery.filters import Filter
from index.gallery.types import Item, NewImage

from .conftest import OpenEngine
from .reference import BUNDLE, MUG, OTHER_BUNDLE, SHOE, TRIO, Shop, Vector, photo, search_ids, unit

# Writing and reading


def test_an_item_is_read_back_as_it_was_stored(trio: Gallery) -> None:
    stored = trio.stored("mug")
    assert stored and (stored.item, [image.id for image in stored.images]) == (MUG, ["front"])
    assert trio.stored("spoon") is None


def test_digests_are_told_for_images_with_a_vector_of_the_bundle(trio: Gallery) -> None:
    assert trio.digests("shoe", BUNDLE) == {"left": f"{2:064x}", "right": f"{3:064x}"}
    assert trio.digests("shoe", OTHER_BUNDLE) == {}
    assert trio.digests("spoon", BUNDLE) == {}


def test_a_thumbnail_stays_while_any_image_shows_the_picture(trio: Gallery) -> None:
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


def test_a_write_is_visible_to_another_handle_at_once(trio: Gallery, open_engine: OpenEngine) -> None:
    reader = open_engine()
    assert search_ids(reader, 0, 0, 1)[0] == "bag"
    trio.upsert([(Item(id="lamp"), [photo("on", unit(0, 0, 1))])], BUNDLE)
    assert search_ids(reader, 0, 0, 1)[0] == "lamp"
    trio.compact()
    assert search_ids(reader, 0, 0, 1)[0] == "lamp"
    trio.delete(["lamp"])
    assert search_ids(reader, 0, 0, 1)[0] == "bag"


@pytest.mark.parametrize("compacted", [False, True])
def test_a_deleted_item_is_gone_from_the_next_search(gallery: Gallery, compacted: bool) -> None:
    gallery.upsert(TRIO, BUNDLE)
    if compacted:
        gallery.compact()
    gallery.delete(["mug", "never there"])
    assert search_ids(gallery, 1, 0, 0) == ["bag", "shoe"]
    assert gallery.stored("mug") is None


def test_deleting_an_image_leaves_the_item_with_its_others(trio: Gallery) -> None:
    trio.delete_images("shoe", ["right", "never there"])
    (hit,) = trio.search(unit(0, 1, 0.2)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert (hit.item.id, hit.image.id) == ("shoe", "left")
    trio.delete_images("shoe", ["left"])
    assert search_ids(trio, 0, 1, 0) == ["bag", "mug"]
    stored = trio.stored("shoe")
    assert stored and stored.item == SHOE


def test_a_changed_picture_replaces_the_old_vector(trio: Gallery) -> None:
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


def test_new_images_take_the_place_of_others_in_one_change(trio: Gallery) -> None:
    before = trio.stats().revision
    entry = (SHOE, [photo("sole", unit(0, 0, 1), 9)])
    assert trio.upsert([entry], BUNDLE, without={"shoe": ["left", "right", "never there"]}) == before + 1
    assert trio.digests("shoe", BUNDLE) == {"sole": f"{9:064x}"}
    assert search_ids(trio, 0, 0, 1)[0] == "shoe"
    with pytest.raises(VersionConflict):
        trio.upsert([(SHOE, [])], BUNDLE, expected={"shoe": before}, without={"shoe": ["sole"]})
    assert trio.digests("shoe", BUNDLE) == {"sole": f"{9:064x}"}


def test_an_item_without_images_is_kept_but_not_found(gallery: Gallery) -> None:
    gallery.upsert([(MUG, [])], BUNDLE)
    stored = gallery.stored("mug")
    assert stored and stored.item == MUG
    assert search_ids(gallery, 1, 0, 0) == []


def test_a_deleted_item_that_comes_back_is_new(trio: Gallery) -> None:
    trio.delete(["shoe"])
    trio.upsert([(SHOE, [photo("left", unit(0, 0, 1), 2)])], BUNDLE)
    (hit,) = trio.search(unit(0, 0, 1)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert (hit.item.id, hit.image.id, hit.score) == ("shoe", "left", 1.0)
    assert trio.digests("shoe", BUNDLE) == {"left": f"{2:064x}"}


def test_changes_are_numbered_and_storing_the_same_again_is_none(trio: Gallery) -> None:
    before = trio.stats().revision
    assert trio.upsert(TRIO, BUNDLE) == before
    assert trio.delete(["never there"]) == before
    assert trio.delete_images("mug", ["never there"]) == before
    after = trio.delete(["bag"])
    assert after > before
    assert trio.search(unit(1, 0, 0)[None], bundle_id=BUNDLE).revision == after


def test_a_write_that_fails_keeps_nothing(trio: Gallery) -> None:
    before = trio.stats()
    with pytest.raises(LookalikeError):
        trio.upsert([(Item(id="fine"), [photo("a", unit(1, 0, 0))]), (MUG, [photo("b", unit(1, 0))])], BUNDLE)
    assert trio.stored("fine") is None
    assert trio.stats() == before


@pytest.mark.parametrize(
    "vector",
    [unit(1, 0), unit(1, 0, 0, 0), np.array([1, np.nan, 0], np.float32), np.array([np.inf, 0, 0], np.float32),
     np.array([1e6, 0, 0], np.float32), np.zeros(0, np.float32), unit(1, 0, 0)[None]],
    ids=["too short", "too long", "nan", "infinite", "beyond half precision", "empty", "a matrix"],
)  # fmt: skip
def test_a_vector_that_cannot_be_compared_is_not_stored(trio: Gallery, vector: Vector) -> None:
    with pytest.raises(LookalikeError, match="'strange'"):
        trio.upsert([(MUG, [photo("strange", vector, 5)])], BUNDLE)
    assert trio.digests("mug", BUNDLE) == {"front": f"{1:064x}"}


def test_a_digest_that_is_none_is_not_stored(trio: Gallery) -> None:
    with pytest.raises(LookalikeError, match="digest"):
        trio.upsert([(MUG, [NewImage("strange", "abc", unit(1, 0, 0), b"")])], BUNDLE)
    trio.compact(rebuild=True)
    assert search_ids(trio, 1, 0, 0)[0] == "mug"


def test_stats_count_what_is_there(trio: Gallery) -> None:
    stats = trio.stats()
    assert (stats.items, stats.images, stats.dimension, stats.bundle_id) == (3, 4, 3, BUNDLE)
    assert stats.index and stats.index.revision == stats.revision
    assert stats.index.pending == 0
    trio.delete(["shoe"])
    stats = trio.stats()
    assert (stats.items, stats.images) == (2, 2)


def test_a_gallery_is_the_same_after_reopening(trio: Gallery, open_engine: OpenEngine) -> None:
    trio.upsert([(Item(id="lamp"), [photo("on", unit(0, 0, 1))])], BUNDLE)
    before, answer = trio.stats(), search_ids(trio, 0, 0, 1)
    trio.close()
    again = open_engine()
    assert again.stats().model_copy(update={"store_bytes": before.store_bytes}) == before
    assert search_ids(again, 0, 0, 1) == answer


def test_closing_twice_does_no_harm(trio: Gallery) -> None:
    trio.close()
    trio.close()


# Scanning


def test_a_scan_goes_through_all_items_in_the_order_of_their_ids(shop: Shop) -> None:
    found, after = [], ""
    while True:
        scanned = shop.gallery.scan(after=after, count=37)
        found += scanned.items
        if scanned.after is None:
            break
        after = scanned.after
    assert found == [shop.reference.items[item_id] for item_id in sorted(shop.reference.items)]


def test_a_scan_fills_its_pages_with_what_matches(shop: Shop) -> None:
    wanted = Filter.parse({"stock": 3})
    matching = [item for _, item in sorted(shop.reference.items.items()) if wanted.matches(item.attributes)]
    first = shop.gallery.scan(filter=wanted, count=10)
    assert first.items == matching[:10]
    assert first.after == matching[9].id
    rest = shop.gallery.scan(filter=wanted, after=matching[9].id, count=1000)
    assert rest.items == matching[10:]
    assert rest.after is None


def test_a_scan_of_just_as_many_as_there_are_is_the_last(trio: Gallery) -> None:
    assert [item.id for item in trio.scan(count=3).items] == ["bag", "mug", "shoe"]
    assert trio.scan(count=3).after is None
    assert trio.scan(after="shoe").items == []


# Bundles


def test_vectors_of_another_bundle_are_never_compared(trio: Gallery) -> None:
    with pytest.raises(BundleMismatch, match=rf"bundle {BUNDLE}, not with {OTHER_BUNDLE}.*lookalike reindex"):
        trio.search(unit(1, 0, 0)[None], bundle_id=OTHER_BUNDLE)


def test_vectors_of_another_bundle_wait_for_their_activation(trio: Gallery, open_engine: OpenEngine) -> None:
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


def test_the_bundle_before_can_be_returned_to(trio: Gallery) -> None:
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)
    trio.activate(OTHER_BUNDLE)
    trio.delete(["bag"])
    trio.compact()
    trio.upsert([(Item(id="lamp"), [photo("on", unit(1, 0))])], OTHER_BUNDLE)
    trio.compact()
    trio.activate(BUNDLE)
    assert search_ids(trio, 1, 0, 0) == ["mug", "shoe"]


def test_who_began_with_the_bundle_before_is_answered_on_and_sees_what_went(
    trio: Gallery, open_engine: OpenEngine
) -> None:
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


def test_a_bundle_without_vectors_cannot_be_activated(trio: Gallery) -> None:
    with pytest.raises(LookalikeError, match=r"no vectors of bundle c.*lookalike reindex"):
        trio.activate(OTHER_BUNDLE)
    assert trio.stats().bundle_id == BUNDLE


def test_another_picture_drops_the_vectors_of_every_bundle(trio: Gallery) -> None:
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)
    trio.upsert([(MUG, [photo("front", unit(0, 0, 1), 99)])], BUNDLE)
    assert trio.digests("mug", OTHER_BUNDLE) == {}
    assert trio.digests("mug", BUNDLE) == {"front": f"{99:064x}"}


# Jobs


def test_a_job_is_recorded_from_its_start_to_its_end(gallery: Gallery, open_engine: OpenEngine) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE)
    job.hold()
    job.update(stage="embedding", total=10, done=4)
    seen = open_engine().jobs.get(job.record.id)
    assert (seen.source, seen.state, seen.stage, seen.done) == ("shop.csv", "running", "embedding", 4)
    job.update(state="done", done=10)
    assert [(record.state, record.done) for record in gallery.jobs.newest()] == [("done", 10)]
    with pytest.raises(JobMissing, match="no job 77"):
        gallery.jobs.get(77)


def test_an_exclusive_job_is_refused_while_another_runs(gallery: Gallery, open_engine: OpenEngine) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE, exclusive=True)
    job.hold()
    with pytest.raises(JobRunning, match=f"Job {job.record.id} is running") as refused:
        open_engine().jobs.begin("shop.csv", BUNDLE, exclusive=True)
    assert refused.value.job_id == job.record.id
    job.update(state="done")
    assert open_engine().jobs.begin("shop.csv", BUNDLE, exclusive=True).record.id > job.record.id


def test_a_job_sees_that_it_was_cancelled_through_another_handle(gallery: Gallery, open_engine: OpenEngine) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE)
    job.hold()
    assert not job.stopping
    open_engine().jobs.cancel(job.record.id)
    assert job.stopping and not job.was_stopped
    job.update(state="cancelled")
    with pytest.raises(LookalikeError, match="not running: it is cancelled"):
        gallery.jobs.cancel(job.record.id)


# Verification


def test_a_gallery_in_use_has_no_fault(shop: Shop) -> None:
    shop.gallery.delete(["item-00003"])
    assert shop.gallery.verify() == []
