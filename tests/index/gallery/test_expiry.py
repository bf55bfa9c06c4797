"""Items that expire, on every engine: from that instant on no answer contains them, and maintenance removes them."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from index.dates import format_instant
from index.gallery import Gallery, open_gallery
from index.gallery.errors import ItemMissing
from index.gallery.expiry import current_instant, hide_expired, is_expired
from index.gallery.filters import Filter
from index.gallery.maintenance import ExpiredItems
from index.gallery.settings import GallerySettings
from index.gallery.types import Item, NewImage
from index.items import Attribute

from .conftest import OpenEngine
from .reference import BUNDLE, ReferenceGallery, make_entries, photo, search_ids, unit, wait_until

PAST, FUTURE = "2020-01-01", "2100-01-01T00:00:00+02:00"
EXPIRED: dict[str, Attribute] = {"expires_at": PAST}
SOON = 1_500_000
"""Microseconds until the items of a test expire: long enough for its writes, short enough to wait for."""


def entry(name: str, angle: float, **attributes: Attribute) -> tuple[Item, Sequence[NewImage]]:
    return Item(id=name, attributes=attributes), [photo("front", unit(1, angle, 0))]


SHELF = [
    entry("now", 0, colour="red"),
    entry("gone", 0.1, colour="red", **EXPIRED),
    entry("later", 0.2, expires_at=FUTURE),
]


@pytest.fixture(params=["delta", "index", "changed since"])
def shelf(request: pytest.FixtureRequest, gallery: Gallery) -> Gallery:
    """An item that has expired, one that will, and one that never does."""
    if request.param == "changed since":
        gallery.upsert([(Item(id=item.id), images) for item, images in SHELF], BUNDLE)
        gallery.activate(BUNDLE)
        gallery.upsert([(item, []) for item, _ in SHELF], BUNDLE)
    else:
        gallery.upsert(SHELF, BUNDLE)
        if request.param == "index":
            gallery.prepare(BUNDLE)
    return gallery


def test_what_has_expired_is_in_no_answer(shelf: Gallery, open_engine: OpenEngine) -> None:
    for gallery in (shelf, open_engine()):
        assert search_ids(gallery, 1, 0, 0) == ["now", "later"]
        assert search_ids(gallery, 1, 0, 0, top=1) == ["now"]
        vectors = np.stack([unit(1, 0.1, 0), unit(1, 0.2, 0)])
        found = gallery.search(vectors, bundle_id=BUNDLE, top=1, filter=Filter.parse({"not": {"colour": "blue"}}))
        assert {hits[0].item.id for hits in found.hits} <= {"now", "later"} and found.hits[1][0].item.id == "later"
        red = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, filter=Filter.parse({"colour": "red"})).hits[0]
        assert [hit.item.id for hit in red] == ["now"]
        wanted = Filter.parse({"expires_at": {"lt": "2200-01-01"}})
        dated = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, filter=wanted).hits[0]
        assert [(hit.item.id, hit.item.expires_at) for hit in dated] == [("later", "2099-12-31T22:00:00Z")]
        assert [item.id for item in gallery.scan().items] == ["later", "now"]
        assert [hit.item.id for hit in gallery.search_item("now").hits[0]] == ["later"]
        assert gallery.get_item("gone") is None and gallery.get_item("later")
        with pytest.raises(ItemMissing):
            gallery.search_item("gone")


def test_pages_leave_out_what_has_expired(gallery: Gallery) -> None:
    entries = [entry(f"{n:03}", n / 100, **(EXPIRED if n % 3 else {})) for n in range(90)]
    gallery.upsert(entries[:60], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert(entries[60:], BUNDLE)
    found, cursor = [], None
    while True:
        page = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=7, cursor=cursor)
        found += [hit.item.id for hit in page.hits[0]]
        cursor = page.cursor
        if not cursor:
            break
    assert found == [f"{n:03}" for n in range(0, 90, 3)]


def test_an_item_is_found_until_the_instant_at_which_it_expires(gallery: Gallery, open_engine: OpenEngine) -> None:
    expiry = current_instant() + SOON
    text = format_instant(expiry)
    gallery.upsert([entry("stays", 0.3), entry("indexed", 0, expires_at=text)], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert([entry("new", 0.1, expires_at=text)], BUNDLE)
    reader = open_engine()
    while True:
        before = current_instant()
        found = search_ids(reader, 1, 0, 0)
        after = current_instant()
        if after < expiry:
            assert found == ["indexed", "new", "stays"]
        elif before >= expiry:
            assert found == ["stays"]
            break
        time.sleep(0.05)
    assert [item.id for item in reader.scan().items] == ["stays"] and reader.get_item("new") is None


def test_an_item_comes_back_with_a_later_expiry_or_none(shelf: Gallery) -> None:
    revivals: list[dict[str, Attribute]] = [{"expires_at": FUTURE}, {}]
    for attributes in revivals:
        shelf.upsert([(Item(id="gone", attributes=EXPIRED), [])], BUNDLE)
        assert search_ids(shelf, 1, 0, 0) == ["now", "later"]
        shelf.upsert([(Item(id="gone", attributes=attributes), [])], BUNDLE)
        assert search_ids(shelf, 1, 0, 0) == ["now", "gone", "later"] and shelf.get_item("gone")


def test_statistics_count_what_has_expired_until_it_is_removed(shelf: Gallery, open_engine: OpenEngine) -> None:
    reader = open_engine()
    assert search_ids(reader, 1, 0, 0) == ["now", "later"]
    before = shelf.stats()
    assert (before.items, before.images) == (3, 3)
    shelf.compact()
    after = shelf.stats()
    assert (after.items, after.images, after.revision) == (2, 2, before.revision + 1)
    assert shelf.get_item("gone", with_expired=True) is None
    assert search_ids(reader, 1, 0, 0) == ["now", "later"] and reader.stats().revision == after.revision
    assert shelf.remove_expired() == 0 and shelf.stats().revision == after.revision


def test_removal_takes_some_items_at_a_time(gallery: Gallery) -> None:
    expired = ExpiredItems(gallery._store, GallerySettings(expiry_batch=3))
    # The texts of some items only look like an expiry.
    similar: dict[str, Attribute] = {"note": '"expires_at": "2020-01-01"', 'x"expires_at': "2020-01-01"}
    others = [Item(id=f"text-{n}", attributes=similar) for n in range(7)]
    others.append(Item(id="never", attributes={"expired": PAST}))
    gallery.upsert([(item, []) for item in others], BUNDLE)
    gallery.upsert([(Item(id=f"{n}", attributes=EXPIRED), []) for n in range(7)], BUNDLE)
    gallery.upsert(
        [(Item(id="soon", attributes={"expires_at": format_instant(current_instant() + 10**9)}), [])], BUNDLE
    )
    revision = gallery.stats().revision
    assert expired.remove() == 7
    assert gallery.stats().revision == revision + 3
    assert [item.id for item in gallery.scan().items] == ["never", "soon", *(f"text-{n}" for n in range(7))]


def test_one_attempt_of_maintenance_removes_one_batch(gallery: Gallery) -> None:
    expired = ExpiredItems(gallery._store, GallerySettings(expiry_batch=3, expiry_seconds=1000))
    gallery.upsert([(Item(id=f"{n}", attributes=EXPIRED), []) for n in range(7)], BUNDLE)
    for left in (4, 1, 0):
        expired.remove_if_due()
        assert gallery.stats().items == left
    gallery.upsert([(Item(id="late", attributes=EXPIRED), [])], BUNDLE)
    expired.remove_if_due()
    assert gallery.stats().items == 1, "the next removal is due after `expiry_seconds`"


def test_facets_do_not_count_what_has_expired(shelf: Gallery, open_engine: OpenEngine) -> None:
    shelf.upsert([entry("red", 0.5, colour="red")], BUNDLE)
    shelf._index.build(BUNDLE)
    reader = open_engine()
    search_ids(reader, 1, 0, 0)
    facets = {facet.name: facet for facet in reader.facets()}
    if reader.stats().index.engine == "memory":  # has no facets
        return
    assert list(facets) == ["colour"] and facets["colour"].values == [("red", 2)]
    (facet,) = reader.facets(names=["expires_at"])
    assert facet.values == [("2099-12-31T22:00:00Z", 1)]
    assert next(reader.facets(filter=Filter.parse({"colour": "red"}))).values == [("red", 2)]


def test_searches_with_expired_items_return_what_the_reference_does(gallery: Gallery) -> None:
    random = np.random.default_rng(6)
    dates: list[Attribute] = [PAST, FUTURE, "2026-01-01T12:00:00Z", "2099-01-01"]

    def dated(item: Item) -> Item:
        expiry = {"expires_at": dates[random.integers(4)]} if random.random() < 0.6 else {}
        return Item(**{**item.model_dump(), "attributes": {**item.attributes, **expiry}})

    entries = [(dated(item), images) for item, images in make_entries(160)]
    gallery.upsert(entries[:80], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert(entries[80:], BUNDLE)
    reference, query = ReferenceGallery(entries), entries[7][1][0].vector[None]
    for document in ({}, {"colour": "red"}, {"any": [{"price": {"lt": 9}}, {"expires_at": {"exists": True}}]}):
        wanted = Filter.parse(document)
        for top in (1, 10, 1000):
            hits = gallery.search(query, bundle_id=BUNDLE, top=top, filter=wanted).hits[0]
            reference.check(hits, query, top=top, filter=hide_expired(wanted, current_instant()))


def test_an_expiry_is_a_date_or_has_a_time_zone() -> None:
    def stored(value: Attribute) -> str | None:
        return Item(id="a", attributes={"expires_at": value}).expires_at

    assert stored("2026-11-19") == "2026-11-19T00:00:00Z"
    assert stored("2026-11-19T12:00+02:00") == "2026-11-19T10:00:00Z"
    assert Item(id="a").expires_at is None
    refused: list[Attribute] = ["2026-11-19T12:00", "soon", 5, True, ("2026-11-19",), "", "2026-02-30"]
    for value in refused:
        with pytest.raises(ValueError, match="expires_at must be a date, or a date and time with its time zone"):
            stored(value)


def test_an_expiry_that_was_stored_unchecked_may_be_anything() -> None:
    now = current_instant()
    values: list[tuple[Attribute, bool]] = [(5, False), ("soon", False), ((PAST,), False), ("2020-01-01 10:00", True)]
    for value, expected in values:
        assert is_expired({"expires_at": value}, now) == expected
        if not isinstance(value, tuple):
            assert hide_expired(None, now).matches({"expires_at": value}) != expected


def test_a_process_that_keeps_running_removes_what_has_expired(tmp_path: Path, postgres_url: str) -> None:
    settings = GallerySettings(follow_seconds=0.05, expiry_seconds=0.1, expiry_batch=2)
    for address in (tmp_path / "gallery", postgres_url):
        with open_gallery(address, create=True, cache=tmp_path / "cache") as writer:
            writer.upsert([*SHELF, *(entry(f"old-{n}", n, **EXPIRED) for n in range(5))], BUNDLE)
            with open_gallery(address, maintain=True, cache=tmp_path / "cache", settings=settings) as maintained:
                wait_until(lambda: writer.stats().items == 2)
                assert search_ids(maintained, 1, 0, 0) == ["now", "later"]
                writer.upsert([entry("new", 0, expires_at=format_instant(current_instant() + 10**6))], BUNDLE)
                assert writer.stats().items == 3
                wait_until(lambda: writer.stats().items == 2)


def test_a_gallery_of_an_older_release_can_find_what_has_expired(tmp_path: Path) -> None:
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        gallery.upsert(SHELF, BUNDLE)
        for statement in ("DROP INDEX items_by_expiry", "DROP TABLE rankings", "PRAGMA user_version = 4"):
            gallery._store._db.execute(statement)  # type: ignore[attr-defined]
    with open_gallery(tmp_path / "gallery") as gallery:
        plan = 'EXPLAIN QUERY PLAN SELECT id FROM items WHERE instr(attributes, \'"expires_at": "\') > 0'
        assert "items_by_expiry" in str(gallery._store._db.execute(plan).fetchall())  # type: ignore[attr-defined]
        assert gallery.remove_expired() == 1


def test_a_read_only_gallery_hides_what_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        gallery.upsert(SHELF, BUNDLE)
        gallery.prepare(BUNDLE)
    monkeypatch.setattr("index.gallery.store.sqlite_connection.os.access", lambda path, mode: mode != os.W_OK)
    with open_gallery(tmp_path / "gallery") as gallery:
        assert search_ids(gallery, 1, 0, 0) == ["now", "later"]
        assert gallery.get_item("gone") is None and gallery.remove_expired() == 0
        assert gallery.stats().items == 3
