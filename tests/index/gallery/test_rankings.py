"""Stored rankings on every engine: versions, conditions, searches by name, and what becomes of them in copies."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery, restore_gallery
from index.gallery.errors import LimitExceeded, RankingMissing, StoreError, VersionConflict
from index.gallery.filters import FilterError
from index.gallery.store.postgres_connection import Server
from index.gallery.store.schema import SCHEMA_VERSION
from index.gallery.store.sqlite import STORE_FILE
from index.rankings import MAX_VERSIONS, Hidden, Ranking

from .conftest import OpenEngine
from .reference import BUNDLE, TRIO, Shop, unit

SALE = Ranking.model_validate({"boosts": [{"filter": {"sale": True}, "weight": 0.5}], "window": 100})
VARIED = Ranking(diversity=0.3)
LONG = Hidden(ids=[f"{number}{'x' * 500}" for number in range(200)])


def search(gallery: Gallery, ranking: Ranking | str, **bounds: Any) -> list[str]:
    found = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, ranking=ranking, **bounds)
    return [hit.item.id for hit in found.hits[0]]


def test_a_ranking_is_stored_in_versions(gallery: Gallery, open_engine: OpenEngine) -> None:
    assert gallery.rankings() == [] and gallery.get_ranking("home") is None
    first = gallery.put_ranking("home", SALE)
    second = gallery.put_ranking("home", VARIED)
    other = gallery.put_ranking("a.page-2", VARIED)
    assert (first.ranking, second.ranking) == (SALE, VARIED)
    assert first.version < second.version < other.version == gallery.stats().revision
    for handle in (gallery, open_engine()):
        assert handle.rankings() == [other, second]
        assert handle.get_ranking("home") == second
        assert handle.get_ranking("home", version=first.version) == first
        assert handle.get_ranking("home", version=other.version) is None
        assert handle.ranking_versions("home") == [second, first]
    assert gallery.delete_ranking("home") and not gallery.delete_ranking("home")
    assert gallery.rankings() == [other] and gallery.ranking_versions("home") == []
    assert gallery.put_ranking("home", SALE).version > other.version, "a version never comes back"


def test_equal_rules_make_no_version(gallery: Gallery) -> None:
    first = gallery.put_ranking("home", SALE)
    assert gallery.put_ranking("home", Ranking.model_validate_json(SALE.model_dump_json())) == first
    assert gallery.stats().revision == first.version


def test_rules_that_differ_only_in_a_type_make_a_version(gallery: Gallery) -> None:
    first = gallery.put_ranking("home", SALE)
    number = Ranking.model_validate({"boosts": [{"filter": {"sale": 1}, "weight": 0.5}], "window": 100})
    second = gallery.put_ranking("home", number)
    assert second.version > first.version and gallery.get_ranking("home") == second
    assert second.ranking.boosts[0].filter == {"sale": 1} and second.ranking.boosts[0].filter["sale"] is not True


def test_a_write_may_depend_on_the_version(gallery: Gallery) -> None:
    first = gallery.put_ranking("home", SALE, expected={"home": None})
    with pytest.raises(VersionConflict, match="Ranking 'home' was changed"):
        gallery.put_ranking("home", VARIED, expected={"home": None})
    second = gallery.put_ranking("home", VARIED, expected={"home": first.version})
    with pytest.raises(VersionConflict):
        gallery.delete_ranking("home", expected={"home": first.version})
    assert gallery.ranking_versions("home") == [second, first]
    assert gallery.delete_ranking("home", expected={"home": second.version})


@pytest.mark.parametrize("name", ["", "-home", "a/b", "a b", "h" * 101, "\N{SNOWMAN}"])
def test_an_invalid_name_is_refused(gallery: Gallery, name: str) -> None:
    with pytest.raises(LookalikeError, match="not a valid name"):
        gallery.put_ranking(name, SALE)


def test_rules_with_an_invalid_filter_are_refused(gallery: Gallery) -> None:
    with pytest.raises(FilterError, match=r"hide\.filter"):
        gallery.put_ranking("home", Ranking.model_validate({"hide": {"filter": {"price": {"over": 5}}}}))
    assert gallery.rankings() == []


def test_a_search_uses_the_newest_version_that_any_process_has_stored(trio: Gallery, open_engine: OpenEngine) -> None:
    other = open_engine()
    with pytest.raises(RankingMissing, match="no ranking 'home'"):
        search(trio, "home")
    other.put_ranking("home", Ranking(pin=["shoe"]))
    assert search(trio, "home")[0] == "shoe"
    other.put_ranking("home", Ranking(pin=["bag"]))
    assert search(trio, "home")[0] == "bag"
    other.delete_ranking("home")
    with pytest.raises(RankingMissing):
        search(trio, "home")


def test_a_cursor_ends_when_the_rules_change(shop: Shop) -> None:
    def page(cursor: str | None) -> tuple[list[str], str | None]:
        found = shop.gallery.search(shop.query[None], bundle_id=BUNDLE, ranking="home", cursor=cursor)
        return [hit.item.id for hit in found.hits[0]], found.cursor

    shop.gallery.put_ranking("home", SALE)
    first, cursor = page(None)
    shop.gallery.put_ranking("other", VARIED)
    second, _ = page(cursor)
    assert len({*first, *second}) == 20
    shop.gallery.put_ranking("home", VARIED)
    with pytest.raises(LookalikeError, match="its ranking has changed"):
        page(cursor)


def test_the_number_of_rankings_and_of_versions_is_limited(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = open_engine()
    if gallery.address == "memory":
        pytest.skip("the store in memory has no limits")
    monkeypatch.setattr("index.gallery.store.rankings.MAX_RANKINGS", 3)
    monkeypatch.setattr("index.gallery.store.rankings.MAX_VERSIONS", 4)
    for name in ("a", "b", "c"):
        gallery.put_ranking(name, SALE)
    with pytest.raises(LimitExceeded, match="3 rankings already"):
        gallery.put_ranking("d", SALE)
    versions = [gallery.put_ranking("a", Ranking(diversity=number / 10)).version for number in range(6)]
    assert [one.version for one in gallery.ranking_versions("a")] == versions[:1:-1]
    assert MAX_VERSIONS == 100
    with pytest.raises(LimitExceeded, match="the limit is 100,000"):
        gallery.put_ranking("a", Ranking(hide=LONG))
    assert len(gallery.ranking_versions("a")) == 4


# Copies, snapshots and older releases


def test_a_copy_has_the_rankings_with_their_history(trio: Gallery, tmp_path: Path) -> None:
    trio.put_ranking("home", SALE)
    trio.put_ranking("home", VARIED)
    trio.put_ranking("other", SALE)
    with open_gallery(tmp_path / "target", create=True) as target:
        target.put_ranking("own", SALE)
        with pytest.raises(LookalikeError, match="other content"):
            trio.copy_to(target)
        target.put_ranking("home", SALE)
        report = trio.copy_to(target, replace=True)
        assert report.is_equal and report.source.rankings == report.target.rankings == 3
        for gallery in (trio, target):
            assert [one.ranking for one in gallery.ranking_versions("home")] == [VARIED, SALE]
            assert [one.name for one in gallery.rankings()] == ["home", "other"]
        assert target.ranking_versions("home")[0].stored == trio.ranking_versions("home")[0].stored
        assert trio.copy_to(target).written == 0
        target.put_ranking("home", SALE)
        source, changed = trio.compare(target)
        assert not source.has_content_of(changed)


def test_a_snapshot_has_the_rankings(tmp_path: Path) -> None:
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        gallery.upsert(TRIO, BUNDLE)
        stored = [gallery.put_ranking("home", SALE), gallery.put_ranking("home", VARIED)]
        gallery.snapshot(tmp_path / "backup.tar")
    restore_gallery(tmp_path / "backup.tar", tmp_path / "restored")
    with open_gallery(tmp_path / "restored") as restored:
        assert restored.ranking_versions("home") == stored[::-1]
        assert restored.verify() == []


def make_old_store(folder: Path) -> None:
    """Makes a gallery as the release before wrote it."""
    with open_gallery(folder, create=True) as gallery:
        gallery.upsert(TRIO, BUNDLE)
    with closing(sqlite3.connect(folder / STORE_FILE)) as database:
        database.execute("DROP TABLE rankings")
        database.execute("DROP INDEX items_by_expiry")
        database.execute("PRAGMA user_version = 4")


def test_a_store_of_the_release_before_gets_the_table(tmp_path: Path) -> None:
    make_old_store(tmp_path)
    with open_gallery(tmp_path) as gallery:
        assert gallery.stats().items == 3 and gallery.rankings() == []
        assert gallery.put_ranking("home", SALE).ranking == SALE
        assert gallery.verify() == []
    with closing(sqlite3.connect(tmp_path / STORE_FILE)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_a_read_only_store_of_the_release_before_has_no_rankings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_old_store(tmp_path)
    for module in ("schema", "sqlite", "sqlite_connection"):
        monkeypatch.setattr(f"index.gallery.store.{module}.is_read_only", lambda path: True)
    with open_gallery(tmp_path) as gallery:
        assert gallery.rankings() == [] and gallery.get_item("mug")
        with pytest.raises(RankingMissing):
            search(gallery, "home")


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_damaged_rankings_are_reported(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    address: Any = tmp_path / "gallery" if engine == "sqlite" else request.getfixturevalue("postgres_url")
    statements = (
        "INSERT INTO rankings VALUES ('broken', 1, 0, '{\"window\": 1}')",
        "INSERT INTO rankings VALUES ('early', 99, 0, '{}')",
    )
    with open_gallery(address, create=True, cache=tmp_path / "cache") as gallery:
        gallery.upsert(TRIO, BUNDLE)
        gallery.activate(BUNDLE)
        for statement in statements:
            if engine == "sqlite":
                with closing(sqlite3.connect(address / STORE_FILE)) as database, database:
                    database.execute(statement)
            else:
                with closing(Server(address).connect(seconds=5)) as connection:
                    connection.execute(statement)
        problems = " ".join(fault.problem for fault in gallery.verify())
        assert "1 rankings are damaged" in problems
        assert "1 rankings have a revision that was never written" in problems
        with pytest.raises(StoreError, match="'broken' is not valid"):
            gallery.rankings()
