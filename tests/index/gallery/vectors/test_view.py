"""Views: applying changes returns a new view, and memory does not grow with items that are put and deleted."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from index.gallery.filters import Filter
from index.gallery.settings import GallerySettings
from index.gallery.store.sqlite import SQLiteStore
from index.gallery.types import Item
from index.gallery.vectors.faiss.index import FaissIndex
from index.gallery.vectors.view import View
from tests.index.gallery.reference import BUNDLE, MUG, TRIO, photo, unit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with closing(SQLiteStore(tmp_path)) as store:
        store.upsert(TRIO, BUNDLE)
        yield store


def make_view(store: SQLiteStore, settings: GallerySettings | None = None) -> View:
    """Returns a view of the store's vectors without a delta."""
    bundle = store.read.bundle(BUNDLE)
    assert bundle
    with store.open_reader() as reader:
        built = FaissIndex(store.path.parent, store).load(reader, bundle)
    return View(bundle, built, built.revision, settings or GallerySettings())


def catch_up(view: View, store: SQLiteStore) -> View:
    with store.open_reader() as reader:
        return view.catch_up(reader)


def contents(view: View, filter: Filter | None = None) -> dict[tuple[str, str], str]:
    """Returns (item id, image id) to title, of everything that a search may return."""
    return {
        (segment.item(position).id, segment.image(position).id): segment.item(position).title
        for segment in view.segments(filter)
        for position in segment.positions().tolist()
    }


LAMP = Item(id="lamp", title="A lamp")
LAMP_IMAGE = photo("on", unit(0, 0, 1))


def test_changes_make_a_new_view_and_leave_the_old_one(store: SQLiteStore) -> None:
    first = make_view(store)
    store.upsert([(LAMP, [LAMP_IMAGE])], BUNDLE)
    second = catch_up(first, store)
    before = contents(second)
    store.upsert([(LAMP.model_copy(update={"title": "Renamed"}), [])], BUNDLE)
    store.delete(["mug"])
    third = catch_up(second, store)
    assert (first.revision, second.revision, third.revision) == (1, 2, 4)
    assert ("lamp", "on") not in contents(first) and len(contents(first)) == 4
    assert contents(second) == before and before["lamp", "on"] == "A lamp" and ("mug", "front") in before
    assert contents(third)["lamp", "on"] == "Renamed" and ("mug", "front") not in contents(third)
    assert [item.title for item in second.items.values()] == ["A lamp"]
    assert (first.pending, second.pending, third.pending) == (0, 1, 2)


def test_no_changes_return_the_same_view(store: SQLiteStore) -> None:
    view = make_view(store)
    assert catch_up(view, store) is view


def test_items_do_not_grow_with_puts_and_deletes(store: SQLiteStore) -> None:
    view = make_view(store)
    for number in range(60):
        item = Item(id=f"visitor-{number}", attributes={"text": f"{number}" * 400})
        store.upsert([(item, [LAMP_IMAGE])], BUNDLE)
        view = catch_up(view, store)
        assert len(view.items) == 1
        store.delete([item.id])
        view = catch_up(view, store)
        assert (len(view.items), view.blocks) == (0, ())
    assert len(contents(view)) == 4


def test_items_do_not_grow_with_changes_of_items_that_the_index_holds(store: SQLiteStore) -> None:
    view = make_view(store)
    store.upsert([(MUG.model_copy(update={"title": "Renamed"}), [])], BUNDLE)
    view = catch_up(view, store)
    assert view.items == {}
    assert contents(view)["mug", "front"] == "Renamed"


def test_a_filter_applies_to_the_index_and_to_the_delta(store: SQLiteStore) -> None:
    view = make_view(store)
    store.upsert([(Item(id="cup", attributes={"price": 5}), [LAMP_IMAGE]), (LAMP, [LAMP_IMAGE])], BUNDLE)
    view = catch_up(view, store)
    assert set(contents(view, Filter.parse({"price": {"lt": 10}}))) == {("mug", "front"), ("cup", "on")}
    assert contents(view, Filter.parse({"price": {"gt": 10}})) == {}


def test_segments_are_cached_for_the_most_recent_filters(store: SQLiteStore) -> None:
    view = make_view(store, GallerySettings(cached_filters=2))
    filters = [Filter.parse({"price": number}) for number in range(3)]
    first = view.segments(filters[0])
    assert view.segments(filters[0]) is first
    for filter in filters[1:]:
        view.segments(filter)
    assert view.segments(filters[0]) is not first


def test_segments_of_a_long_filter_are_not_cached(store: SQLiteStore) -> None:
    view = make_view(store, GallerySettings(cached_length=100))
    for document in ({"name": ["x" * 99]}, {"not": {"name": {"lt": "x" * 99}}}):
        long = Filter.parse(document)
        assert view.segments(long) is not view.segments(long)
    short = Filter.parse({"name": ["x" * 90], "new": {"exists": True}})
    assert view.segments(short) is view.segments(short)


def test_a_compaction_is_due_for_a_few_items_that_take_much_memory(store: SQLiteStore) -> None:
    view = make_view(store, GallerySettings(max_delta_bytes=100_000))
    assert not view.is_compaction_due
    for number in range(3):
        large = Item(id="large", attributes={f"text {name}": f"{number}" * 1000 for name in range(40)})
        store.upsert([(large, [LAMP_IMAGE])], BUNDLE)
        view = catch_up(view, store)
    assert view.is_compaction_due and view.pending < 10
    assert len(view.items) == 1, "only the newest version is kept, but all of them count"
