"""Reads of the SQLite store: the change log, reads of one instant, bulk reads."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from index.gallery.errors import StoreError
from index.gallery.store.sqlite import SQLiteStore
from index.gallery.types import Attribute, Item
from tests.index.gallery.reference import BUNDLE, MUG, OTHER_BUNDLE, TRIO, photo, unit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    """A store with three items and four images, stored by revision 1."""
    with closing(SQLiteStore(tmp_path)) as store:
        store.upsert(TRIO, BUNDLE)
        yield store


def bundle_key(store: SQLiteStore) -> int:
    bundle = store.read.bundle(BUNDLE)
    assert bundle
    return bundle.key


def test_news_changes_with_every_commit_of_another_connection(store: SQLiteStore) -> None:
    before = store.watch.news()
    assert store.watch.news() == before
    store.delete(["mug"])
    assert store.watch.news() != before


def test_changes_contain_only_what_happened_after_a_revision(store: SQLiteStore) -> None:
    key = bundle_key(store)
    everything = store.read.changes(key, 0)
    assert (everything.revision, everything.removed) == (1, [])
    assert [row.id for row in everything.images] == ["front", "left", "right", "open"]
    assert {item.id for item in everything.items.values()} == {"mug", "shoe", "bag"}
    assert store.read.changes(key, 1)[2:5] == ([], [], {})
    store.upsert([(MUG.model_copy(update={"title": "Changed"}), [])], BUNDLE)
    store.upsert([(Item(id="shoe"), [photo("left", unit(0, 0, 1), 9)])], BUNDLE)
    changes = store.read.changes(key, 1)
    assert changes.revision == 3
    assert changes.removed == [everything.images[1].key], "the replaced photo"
    assert [(row.id, row.digest) for row in changes.images] == [("left", f"{9:064x}")]
    assert {item.title for item in changes.items.values()} == {"Changed", ""}


def test_changes_contain_all_images_of_changed_items_on_request(store: SQLiteStore) -> None:
    key = bundle_key(store)
    store.upsert([(Item(id="shoe", title="Changed"), [])], BUNDLE)
    assert store.read.changes(key, 1).images == []
    assert [row.id for row in store.read.changes(key, 1, whole_items=True).images] == ["left", "right"]
    store.upsert([(Item(id="shoe", title="Again"), [photo("left", unit(0, 0, 1), 9)])], BUNDLE)
    assert sorted(row.id for row in store.read.changes(key, 2, whole_items=True).images) == ["left", "right"]
    assert store.read.changes(key, 3, whole_items=True).images == []


def test_changes_of_one_bundle_contain_no_vector_of_another(store: SQLiteStore) -> None:
    store.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)
    assert store.read.changes(bundle_key(store), 1).images == []
    other = store.read.bundle(OTHER_BUNDLE)
    assert other and other.dimension == 2
    assert [row.id for row in store.read.changes(other.key, 0).images] == ["front"]


def test_changes_are_read_in_batches_of_complete_revisions(store: SQLiteStore) -> None:
    key = bundle_key(store)
    for number in range(5):
        store.upsert([(Item(id=f"lamp-{number}"), [photo("on", unit(0, 0, 1), 20 + number)])], BUNDLE)
    store.delete(["mug"])
    since, revisions, images, removed = 0, [], [], []
    while True:
        changes = store.read.changes(key, since, 3)
        since = changes.revision
        revisions.append(since)
        images += [row.digest for row in changes.images]
        removed += changes.removed
        if changes.is_last:
            break
    assert revisions == [1, 4, 7], "the first revision has more than three changes, the next three have one each"
    assert len(images) == len(set(images)) == 8 and len(removed) == 1


def test_damaged_rows_are_errors_of_the_store(store: SQLiteStore, tmp_path: Path) -> None:
    key = bundle_key(store)
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as database, database:
        database.execute("UPDATE items SET attributes = '{' WHERE id = 'mug'")
        database.execute("UPDATE vectors SET vector = x'00'")
        database.execute("UPDATE items SET title = CAST(x'ff' AS TEXT) WHERE id = 'bag'")
    for read in (
        lambda: store.read.get_item("mug"),
        lambda: store.read.get_item("bag"),
        lambda: store.read.changes(key, 0),
        lambda: store.read.items_after("", 10),
        lambda: list(store.read.items(key)),
    ):
        with pytest.raises(StoreError, match="Restore a snapshot"):
            read()


def test_a_long_read_is_of_one_instant(store: SQLiteStore) -> None:
    with store.open_reader() as reader:
        assert reader.revision() == 1
        store.delete(["mug"])
        assert (reader.revision(), reader.counts()) == (1, (3, 4))
        assert list(reader.image_ids()) == [("bag", "open"), ("mug", "front"), ("shoe", "left"), ("shoe", "right")]
    assert (store.read.revision(), store.read.counts()) == (2, (2, 3))


def test_bulk_reads_are_ordered_by_key_and_complete(store: SQLiteStore) -> None:
    key = bundle_key(store)
    store.upsert([(Item(id="lamp"), [photo("on", unit(0, 0, 1))])], BUNDLE)
    with store.open_reader() as reader:
        records = list(reader.image_records(key))
        assert [record.key for record in records] == sorted(record.key for record in records)
        assert [record.revision for record in records] == [1, 1, 1, 1, 2]
        assert [item.id for _, item in reader.items(key)] == ["mug", "shoe", "bag", "lamp"]
        vectors = np.empty((reader.image_count(key), 3), np.float16)
        reader.vectors(key, 0, vectors)
        newer = np.empty((1, 3), np.float16)
        reader.vectors(key, 1, newer)
        rows = [row for batch in reader.full_images(key) for row in batch]
    assert vectors[0].tolist() == [1, 0, 0] and newer.tolist() == [[0, 0, 1]]
    assert b"".join(row.vector for row in rows) == vectors.tobytes()
    assert [row.item_id for row in rows] == ["mug", "shoe", "shoe", "bag", "lamp"]


def test_images_without_a_vector_of_a_bundle_are_counted(store: SQLiteStore) -> None:
    assert store.read.images_without(BUNDLE) == 0
    store.upsert([(MUG, [photo("front", unit(0, 1), 1)])], OTHER_BUNDLE)
    assert store.read.images_without(OTHER_BUNDLE) == 3
    assert store.read.images_without("unknown") == 4
    with store.open_reader() as reader:
        assert ("mug", "front") not in reader.image_ids_without(OTHER_BUNDLE)
        assert len(list(reader.image_ids_without(OTHER_BUNDLE))) == 3


def test_large_items_are_read_a_few_at_a_time(store: SQLiteStore) -> None:
    large: dict[str, Attribute] = {f"text-{number}": "x" * 4000 for number in range(250)}
    names = [f"item-{number:02}" for number in range(12)]
    store.upsert([(Item(id=name, attributes=large), []) for name in names], BUNDLE)
    found: list[str] = []
    while block := store.read.items_after(found[-1] if found else "", 100):
        assert len(block) < 6
        found += [item.id for item in block]
    assert [name for name in found if name.startswith("item-")] == names
