"""The PostgreSQL store: schemas, several machines on one database, and what a user reads when something is wrong."""

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psycopg
import pytest

from index.embedding.bundle import Bundle, BundleError
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery, restore_gallery
from index.gallery.errors import StoreBusy, StoreError, StoreReadOnly, StoreUnavailable, VersionConflict
from index.gallery.maintenance import Maintainer
from index.gallery.settings import GallerySettings
from index.gallery.store.base import ImageRecord
from index.gallery.store.postgres import PostgresStore
from index.gallery.store.postgres_connection import Connection, PostgresSettings, Server
from index.gallery.store.postgres_schema import EXPIRY, HAS_EXPIRY, MIGRATIONS, migrate
from index.gallery.types import Item
from index.gallery.vectors.faiss.index import FaissIndex
from tests.index.gallery.reference import BUNDLE, TRIO, make_entries, photo, unit, wait_until
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.tiny_bundle import make_tiny_bundle

QUERY = TRIO[0][1][0].vector[None]


@pytest.fixture
def store(postgres_url: str, tmp_path: Path) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url, tmp_path / "cache", shared_index=False, create=True)) as opened:
        yield opened


def ids(gallery: Gallery) -> list[str]:
    return [hit.item.id for hit in gallery.search(QUERY, bundle_id=BUNDLE).hits[0]]


def test_a_new_machine_finds_everything_and_builds_an_index_of_its_own(postgres_url: str, tmp_path: Path) -> None:
    with open_gallery(postgres_url, create=True, cache=tmp_path / "one") as one:
        one.upsert(TRIO, BUNDLE)
        one.activate(BUNDLE)
        with open_gallery(postgres_url, cache=tmp_path / "two") as two:
            assert ids(two) == ids(one)
            assert two.stats().index.name is None
            two.upsert([(Item(id="late"), [photo("front", unit(*QUERY[0]))])], BUNDLE)
            assert "late" in ids(one)
            report = two.compact()
            assert report and report.is_new and report.revision == 2
            assert one.stats().index.revision == 1, "a machine keeps its own index"
            assert one.verify() == two.verify() == []


def test_a_bundle_activated_by_one_machine_is_searched_by_another(postgres_url: str, tmp_path: Path) -> None:
    other = "c" * 16
    with (
        open_gallery(postgres_url, create=True, cache=tmp_path / "one") as one,
        open_gallery(postgres_url, cache=tmp_path / "two") as two,
    ):
        one.upsert(TRIO, BUNDLE)
        one.activate(BUNDLE)
        assert len(ids(two)) == 3
        one.upsert(TRIO[:2], other)
        one.activate(other)
        assert two.active_bundle() == other
        assert len(two.search(QUERY, bundle_id=other).hits[0]) == 2
        assert two.rollback() == BUNDLE
        assert one.active_bundle() == BUNDLE
        assert len(ids(one)) == 3
        one.drop_bundle(other)
        assert two.compact() is not None
        assert [bundle.id for bundle in two.bundles()] == [BUNDLE]


def test_a_machine_without_its_cache_builds_its_index_again(postgres_url: str, tmp_path: Path) -> None:
    with open_gallery(postgres_url, create=True, cache=tmp_path / "one") as gallery:
        gallery.upsert(TRIO, BUNDLE)
        gallery.activate(BUNDLE)
    (record,) = (tmp_path / "one").glob("*/indexes.json")
    record.write_text("damaged")
    with open_gallery(postgres_url, cache=tmp_path / "one") as gallery:
        assert len(ids(gallery)) == 3
        assert gallery.stats().index.name is None
        assert gallery.compact() is not None
    with open_gallery(postgres_url, cache=tmp_path / "one") as gallery:
        assert gallery.stats().index.name


def test_two_galleries_share_a_database(postgres: PostgresServer, postgres_url: str, tmp_path: Path) -> None:
    other_url = f"{postgres.url()}?schema=another_shop"
    with (
        open_gallery(postgres_url, create=True, cache=tmp_path) as one,
        open_gallery(other_url, create=True, cache=tmp_path) as other,
    ):
        one.upsert(TRIO, BUNDLE)
        assert other.stats().items == 0
        job = other.jobs.begin("source", BUNDLE, exclusive=True)
        job.hold()
        one.jobs.begin("source", BUNDLE, exclusive=True)
        assert one.jobs.get(1).state == other.jobs.get(1).state == "running"
        job.release()
    postgres.execute("DROP SCHEMA another_shop CASCADE")


def test_a_write_is_visible_to_the_next_search_of_another_machine(postgres_url: str, tmp_path: Path) -> None:
    with (
        open_gallery(postgres_url, create=True, cache=tmp_path / "one") as one,
        open_gallery(postgres_url, cache=tmp_path / "two") as two,
    ):
        for number in range(100):
            writer, reader = (one, two) if number % 2 else (two, one)
            revision = writer.upsert([(Item(id="mug", title=str(number)), [photo("front", unit(*QUERY[0]))])], BUNDLE)
            found = reader.search(QUERY, bundle_id=BUNDLE)
            assert (found.hits[0][0].item.title, found.revision) == (str(number), revision)
            writer.delete(["mug"])
            assert reader.search(QUERY, bundle_id=BUNDLE).hits == [[]]


def test_concurrent_writers_with_expected_versions_lose_no_update(postgres_url: str, tmp_path: Path) -> None:
    def count_up(gallery: Gallery) -> None:
        for _ in range(20):
            while True:
                stored = gallery.get_item("counter")
                assert stored
                item = stored.item.model_copy(update={"title": str(int(stored.item.title) + 1)})
                try:
                    gallery.upsert([(item, [])], BUNDLE, expected={"counter": stored.version})
                    break
                except VersionConflict:
                    continue

    handles = [open_gallery(postgres_url, create=True, cache=tmp_path / str(number)) for number in range(3)]
    handles[0].upsert([(Item(id="counter", title="0"), [])], BUNDLE)
    threads = [Thread(target=count_up, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = handles[0].get_item("counter")
    assert found and found.item.title == "60"
    assert found.version == handles[0].stats().revision == 61, "every update had a revision of its own"
    for handle in handles:
        handle.close()


def test_texts_may_have_any_character(postgres_url: str, tmp_path: Path) -> None:
    names = ["\0", "\0\0", "\0\x01", "\x01", "\x01\x01", "\x01\x02", "\x02", "a\0b", "a\x01b", "é", "\U0001f600"]
    with open_gallery(postgres_url, create=True, cache=tmp_path) as gallery:
        items = [Item(id=name, title=f"<{name}>", url=name, attributes={name: name}) for name in names]
        gallery.upsert([(item, [photo(item.id, unit(*QUERY[0]))]) for item in items], BUNDLE)
        assert list(gallery.iter_items()) == sorted(items, key=lambda item: item.id)
        for item in items:
            stored = gallery.get_item(item.id)
            assert stored and stored.item == item and stored.images[0].id == item.id
        assert gallery.verify() == []


def test_changes_are_read_in_batches(store: PostgresStore) -> None:
    entries = make_entries(12)
    for entry in entries:
        store.upsert([entry], BUNDLE)
    bundle = store.read.bundle(BUNDLE)
    assert bundle
    since, seen = 0, set()
    for _ in range(100):
        changes = store.watch.changes(bundle.key, since, 2)
        assert len(changes.images) <= 2 + max(len(images) for _, images in entries)
        seen |= {row.id for row in changes.items.values()}
        since = changes.revision
        if changes.is_last:
            break
    assert seen == {item.id for item, _ in entries}


def test_an_address_without_a_gallery_is_refused_unless_one_may_be_created(postgres_url: str, tmp_path: Path) -> None:
    with pytest.raises(LookalikeError, match="no gallery in the schema test_"):
        open_gallery(postgres_url, cache=tmp_path)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda url, server: url.replace(server.url(), server.url(password="wrong")), "PGPASSWORD"),
        (lambda url, server: url.replace("/postgres?", "/nothing?"), "createdb"),
        (lambda url, server: url.replace(f":{server.port}/", ":1/"), "Start it"),
        (lambda url, server: url.replace("schema=", "schema=No-"), "small letters"),
    ],
)
def test_an_address_that_cannot_be_opened_has_a_remedy_and_shows_no_password(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, change: object, remedy: str
) -> None:
    assert callable(change)
    with pytest.raises(LookalikeError) as caught:
        open_gallery(change(postgres_url, postgres), create=True, cache=tmp_path)
    assert remedy in caught.value.remedy
    assert PASSWORD not in str(caught.value) and "%20" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(postgres_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "cache", Path("/proc/cache")):
        with pytest.raises(StoreError, match=f"cache folder {folder} cannot be used.*LOOKALIKE_CACHE"):
            open_gallery(postgres_url, create=True, cache=folder)


def test_nothing_is_created_at_an_address_whose_second_part_is_invalid(postgres_url: str, tmp_path: Path) -> None:
    with pytest.raises(LookalikeError, match="no valid prefix"):
        open_gallery(f"{postgres_url} qdrant://127.0.0.1:1", create=True, cache=tmp_path)
    with pytest.raises(LookalikeError, match="There is no gallery"):
        open_gallery(postgres_url, cache=tmp_path)


def test_a_gallery_shows_its_address_without_the_password(postgres_url: str, tmp_path: Path) -> None:
    with open_gallery(postgres_url, create=True, cache=tmp_path) as gallery:
        assert gallery.address.startswith("postgresql://lookalike:***@127.0.0.1:")
        assert "%20" not in gallery.address


def test_a_user_who_may_only_read_can_search_and_build(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    schema = postgres_url.partition("schema=")[2]
    with open_gallery(postgres_url, create=True, cache=tmp_path) as gallery:
        gallery.upsert(TRIO, BUNDLE)
    postgres.execute(
        "DROP ROLE IF EXISTS reader",
        "CREATE ROLE reader LOGIN PASSWORD 'reading'",
        f"GRANT USAGE ON SCHEMA {schema} TO reader",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader",
    )
    url = postgres_url.replace(postgres.url(), postgres.url(user="reader", password="reading"))
    with open_gallery(url, cache=tmp_path / "reader") as gallery:
        assert len(ids(gallery)) == 3
        assert gallery.compact() is not None
    with open_gallery(url, cache=tmp_path / "reader") as gallery:
        assert gallery.stats().index.name
        with pytest.raises(StoreReadOnly, match="permission denied"):
            gallery.delete(["mug"])
    postgres.execute("DROP OWNED BY reader", "DROP ROLE reader")


def test_a_read_only_server_can_be_searched(postgres_url: str, tmp_path: Path) -> None:
    with open_gallery(postgres_url, create=True, cache=tmp_path) as gallery:
        gallery.upsert(TRIO, BUNDLE)
    url = f"{postgres_url}&options=-c%20default_transaction_read_only%3Don"
    with open_gallery(url, cache=tmp_path, maintain=True) as gallery:
        assert len(ids(gallery)) == 3
        with pytest.raises(StoreReadOnly, match="read-only"):
            gallery.delete(["mug"])


def test_a_writer_waits_for_another_one_for_a_limited_time(postgres_url: str, tmp_path: Path) -> None:
    settings = PostgresSettings(lock_seconds=0.2)
    opened = PostgresStore(postgres_url, tmp_path, shared_index=False, create=True, postgres=settings)
    server = Server(postgres_url)
    with closing(opened), closing(server.connect(seconds=5)) as other:
        other.execute("BEGIN")
        other.execute("SELECT revision FROM state FOR UPDATE")
        with pytest.raises(StoreBusy):
            opened.upsert(TRIO, BUNDLE)
        other.execute("ROLLBACK")
        assert opened.upsert(TRIO, BUNDLE) == 1


def test_a_gallery_of_a_newer_release_is_refused(postgres_url: str, tmp_path: Path) -> None:
    open_gallery(postgres_url, create=True, cache=tmp_path).close()
    with closing(Server(postgres_url).connect(seconds=5)) as connection:
        connection.execute("UPDATE schema_version SET version = version + 1")
    with pytest.raises(
        LookalikeError, match=f"schema version {len(MIGRATIONS) + 1}; this release reads versions up to"
    ):
        open_gallery(postgres_url, create=True, cache=tmp_path)


def test_a_gallery_of_an_older_release_is_migrated_by_one_of_several_that_open_it(
    postgres_url: str, tmp_path: Path
) -> None:
    with open_gallery(postgres_url, create=True, cache=tmp_path) as gallery:
        gallery.upsert(TRIO, BUNDLE)
    server = Server(postgres_url)
    later = (*MIGRATIONS, "CREATE TABLE notes (text text)", "INSERT INTO notes VALUES ('migrated')")
    threads = [Thread(target=migrate, args=(server, later)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(server.connect(seconds=5)) as connection:
        assert connection.execute("SELECT text FROM notes").fetchall() == [("migrated",)]
        assert connection.execute("SELECT version FROM schema_version").fetchall() == [(len(later),)]
        assert connection.execute("SELECT count(*) FROM items").fetchall() == [(3,)]


def test_a_gallery_of_the_first_schema_gets_the_index_of_what_expires(postgres_url: str, tmp_path: Path) -> None:
    with open_gallery(postgres_url, create=True, cache=tmp_path) as gallery:
        items = [Item(id=f"{n}", attributes={"a": 'a"b', "expires_at": f"20{n}-01-01"}) for n in range(10, 40)]
        gallery.upsert([(item, []) for item in items], "")
    with closing(Server(postgres_url).connect(seconds=5)) as connection:
        connection.execute("DROP INDEX items_by_expiry")
        connection.execute("DROP TABLE rankings")
        connection.execute("UPDATE schema_version SET version = 1")
    with open_gallery(postgres_url, cache=tmp_path) as gallery:
        with closing(Server(postgres_url).connect(seconds=5)) as connection:
            connection.execute("SET enable_seqscan = off")
            query = f"SELECT id FROM items WHERE {HAS_EXPIRY} AND ({EXPIRY}) COLLATE \"C\" <= '2026'"
            assert "items_by_expiry" in str(connection.execute(f"EXPLAIN {query}").fetchall())
        assert gallery.remove_expired() == sum(f"20{n}-01-01" < "2026-11" for n in range(10, 40))


def test_the_schema_of_another_program_is_refused(postgres: PostgresServer, postgres_url: str, tmp_path: Path) -> None:
    schema = postgres_url.partition("schema=")[2]
    postgres.execute(f"CREATE SCHEMA {schema}", f"CREATE TABLE {schema}.orders (number int)")
    with pytest.raises(StoreError, match="tables of another program"):
        open_gallery(postgres_url, create=True, cache=tmp_path)


def test_snapshots_are_refused_with_the_remedy(postgres_url: str, tmp_path: Path) -> None:
    with open_gallery(postgres_url, create=True, cache=tmp_path / "cache") as gallery:
        with pytest.raises(LookalikeError, match="no snapshots") as caught:
            gallery.snapshot(tmp_path / "backup.tar")
        assert "gallery copy" in caught.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    with pytest.raises(LookalikeError, match="restored into a folder") as caught:
        restore_gallery(tmp_path / "backup.tar", postgres_url)
    assert PASSWORD not in str(caught.value)


def test_damaged_rows_are_found(store: PostgresStore, postgres_url: str) -> None:
    store.upsert(TRIO, BUNDLE)
    assert store.problems() == []
    with closing(Server(postgres_url).connect(seconds=5)) as connection:
        connection.execute("UPDATE vectors SET vector = '' WHERE image = 1")
        connection.execute("UPDATE items SET attributes = '[' WHERE key = 1")
        connection.execute("DELETE FROM thumbnails")
    problems = "; ".join(store.problems())
    for part in ("1 vectors are not of their bundle's dimension", "1 items have attributes", "lack their thumbnail"):
        assert part in problems


def test_a_gallery_that_was_created_again_is_not_the_one_that_is_open(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    schema = postgres_url.partition("schema=")[2]
    with open_gallery(postgres_url, create=True, cache=tmp_path) as gallery:
        gallery.upsert(TRIO, BUNDLE)
        gallery.activate(BUNDLE)
        postgres.execute(f"DROP SCHEMA {schema} CASCADE")
        with pytest.raises(StoreError):
            gallery.upsert(TRIO, BUNDLE)
        with open_gallery(postgres_url, create=True, cache=tmp_path) as other:
            assert other.stats().index.name is None
            assert other.verify() == []
            with pytest.raises(StoreError, match="removed or replaced"):
                gallery._store.check()


def test_the_build_lock_is_held_by_one_session(store: PostgresStore, postgres_url: str, tmp_path: Path) -> None:
    other = PostgresStore(postgres_url, tmp_path, shared_index=True)
    with closing(other), store.build_lock(wait=False) as first, other.build_lock(wait=False) as second:
        assert first and not second
        first()
    with closing(other), other.build_lock(wait=True) as again:
        assert again


def test_whoever_has_lost_the_build_lock_notices_it(
    store: PostgresStore, postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    other = PostgresStore(postgres_url, tmp_path, shared_index=True)
    with closing(other), store.build_lock(wait=True) as first:
        assert first
        postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted")
        with other.build_lock(wait=True) as second:
            assert second
            with pytest.raises(StoreUnavailable):
                first()
            second()


def test_a_shared_index_is_recorded_for_all_machines(postgres_url: str, tmp_path: Path) -> None:
    with (
        closing(PostgresStore(postgres_url, tmp_path / "one", shared_index=True, create=True)) as one,
        closing(PostgresStore(postgres_url, tmp_path / "two", shared_index=True)) as two,
    ):
        one.upsert(TRIO, BUNDLE)
        news = two.watch.news()
        bundle = one.read.bundle(BUNDLE)
        assert bundle
        one.set_index(bundle.key, "collection", 1)
        assert two.watch.news() != news
        found = two.read.bundle(BUNDLE)
        assert found and (found.index_name, found.index_revision) == ("collection", 1)


def test_a_lost_connection_is_replaced(store: PostgresStore, postgres: PostgresServer) -> None:
    store.upsert(TRIO, BUNDLE)
    query = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'lookalike'"
    for _ in range(2):
        assert postgres.execute(query) != [(0,)]
        assert store.read.counts()[0] == 3
        assert store.watch.news() == store.watch.news()
        assert store.upsert(TRIO, BUNDLE) == 1


@pytest.mark.parametrize("was_committed", [True, False])
def test_a_commit_whose_answer_was_lost_is_reported_as_it_is(
    store: PostgresStore, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, was_committed: bool
) -> None:
    execute = Connection.execute

    def lose_the_answer(self: Connection, query: Any, *args: Any, **options: Any) -> object:
        if query != "COMMIT":
            return execute(self, query, *args, **options)
        if was_committed:
            execute(self, "COMMIT")
        self.close()
        raise psycopg.OperationalError("the connection was lost")

    monkeypatch.setattr(Connection, "execute", lose_the_answer)
    if was_committed:
        assert store.upsert(TRIO, BUNDLE) == 1
    else:
        with pytest.raises(StoreUnavailable, match="Nothing was written"):
            store.upsert(TRIO, BUNDLE)
    monkeypatch.undo()
    assert store.read.counts()[0] == (3 if was_committed else 0)


def test_large_writes_are_divided_into_blocks(store: PostgresStore) -> None:
    vector = unit(*QUERY[0])
    entries = [
        (Item(id=f"item-{number % 1500}", title=str(number)), [photo("front", vector)]) for number in range(3000)
    ]
    assert store.upsert(entries, BUNDLE) == 1
    assert store.read.counts() == (1500, 1500)
    last = store.read.get_item("item-1499")
    assert last and last.item.title == "2999"
    keys = [record.key for record in _records(store)]
    assert len(np.unique(keys)) == 1500


def _records(store: PostgresStore) -> list[ImageRecord]:
    bundle = store.read.bundle(BUNDLE)
    assert bundle
    with store.open_reader() as reader:
        return list(reader.image_records(bundle.key))


def test_bundles_are_fetched_by_each_machine(postgres_url: str, tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    with (
        open_gallery(postgres_url, create=True, cache=tmp_path / "one") as one,
        open_gallery(postgres_url, cache=tmp_path / "two") as two,
    ):
        assert not two.has_bundle(bundle.id)
        with pytest.raises(BundleError, match="no copy"):
            two.load_bundle(bundle.id)
        one.keep_bundle(bundle)
        one.keep_bundle(bundle)
        assert two.has_bundle(bundle.id)
        copy = two.load_bundle(bundle.id)
        assert copy.card == bundle.card
        assert copy.model_path.read_bytes() == bundle.model_path.read_bytes()
        copy.model_path.write_bytes(b"damaged")
        assert two.load_bundle(bundle.id).model_path.read_bytes() == bundle.model_path.read_bytes()
        with closing(Server(postgres_url).connect(seconds=5)) as connection:
            connection.execute("UPDATE bundle_files SET data = 'damaged' WHERE name = 'model.onnx'")
        assert "1 parts of bundles are damaged" in one.verify()[0].problem
        one.keep_bundle(bundle)
        assert one.verify() == []


def test_a_compaction_in_the_background_uses_the_cache_and_hides_the_password(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    start = subprocess.Popen

    def record(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return start(command, **options)

    monkeypatch.setattr("index.gallery.maintenance.subprocess.Popen", record)
    with open_gallery(postgres_url, create=True, cache=tmp_path / "cache") as gallery:
        gallery.upsert(TRIO, BUNDLE)
    store = PostgresStore(postgres_url, tmp_path / "cache", shared_index=False)
    index = FaissIndex(store.cache, store)
    maintainer = Maintainer(postgres_url, index, GallerySettings(), cache=tmp_path / "cache")
    with closing(store), closing(maintainer):
        maintainer.request()
        wait_until((store.cache / "indexes.json").exists)
        found = store.read.bundle(BUNDLE)
        assert found and found.index_revision == 1
    assert "%20" not in str(commands)
