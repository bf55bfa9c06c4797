"""The SQLite store: opening, locked and damaged files, revisions of removals, and copies of bundles."""

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import open_gallery, verify_gallery
from index.gallery.errors import StorageFull, StoreBusy, StoreError, StoreReadOnly
from index.gallery.settings import GallerySettings
from index.gallery.store.sqlite import STORE_FILE, SQLiteStore
from index.gallery.store.sqlite_jobs import LOCK_FILE
from index.gallery.types import Item
from tests.index.gallery.reference import BUNDLE, TRIO, photo, unit
from tests.support.disk import files_up_to
from tests.support.filled_gallery import entry, fill, vector
from tests.support.tiny_bundle import make_tiny_bundle


def test_a_folder_with_other_files_is_not_a_gallery(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LookalikeError, match="is not a gallery"):
        open_gallery(tmp_path, create=True)
    with pytest.raises(LookalikeError, match="lookalike reindex"):
        open_gallery(tmp_path / "nothing")


def test_opening_does_not_wait_for_a_writer(tmp_path: Path) -> None:
    SQLiteStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / STORE_FILE, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with closing(SQLiteStore(tmp_path)) as store:
            assert store.read.revision() == 0


def test_a_store_that_cannot_be_opened_is_not_reported_as_damaged(tmp_path: Path) -> None:
    (tmp_path / STORE_FILE).mkdir()
    with pytest.raises(StoreError, match=r"unable to open database file\. Check the permissions") as error:
        SQLiteStore(tmp_path)
    assert "snapshot" not in str(error.value)
    assert (tmp_path / STORE_FILE).is_dir()


def test_a_file_that_is_not_a_database_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / STORE_FILE
    file.write_text("this is not a database, but long enough to be read")
    with pytest.raises(LookalikeError, match=r"cannot be opened: .* Restore a snapshot"):
        open_gallery(tmp_path)
    assert file.read_text().startswith("this is not a database")


def test_removals_are_listed_until_every_index_reflects_them(tmp_path: Path) -> None:
    with closing(SQLiteStore(tmp_path)) as store:
        store.upsert(TRIO, BUNDLE)
        bundle = store.read.bundle(BUNDLE)
        assert bundle
        store.set_index(bundle.key, "first", 1)
        store.delete(["mug"])
        store.set_index(bundle.key, "second", 2)
        assert store.read.head().forgotten == 1, "followers of the first index can still catch up"
        assert len(store.read.changes(bundle.key, 1).removed) == 1
        store.set_index(bundle.key, "third", 2)
        assert store.read.head().forgotten == 2
        assert store.read.changes(bundle.key, 1).removed == []


def test_the_list_of_removals_does_not_grow_with_items_that_come_and_go(tmp_path: Path) -> None:
    with closing(SQLiteStore(tmp_path, GallerySettings(listed_removals=5))) as store:
        store.upsert(TRIO, BUNDLE)
        bundle = store.read.bundle(BUNDLE)
        assert bundle
        for number in range(20):
            store.upsert([(Item(id="visitor"), [photo("front", unit(1, number, 0))])], BUNDLE)
            revision = store.delete(["visitor"])
            assert len(store.read.changes(bundle.key, 0).removed) == min(number + 1, 5)
        assert len(store.read.changes(bundle.key, revision - 1).removed) == 1
        assert store.read.head().forgotten == revision - 10
        store.delete(["mug", "shoe", "bag"])
        assert len(store.read.changes(bundle.key, revision).removed) == 4
        store.upsert([(Item(id="crate"), [photo(str(view), unit(view, 1, 1)) for view in range(6)])], BUNDLE)
        last = store.delete(["crate"])
        assert (store.read.changes(bundle.key, 0).removed, store.read.head().forgotten) == ([], last)


def test_the_copy_of_a_bundle_is_kept_until_the_bundle_is_dropped(tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    with closing(SQLiteStore(tmp_path / "gallery")) as store:
        store.upsert(TRIO, BUNDLE)
        store.upsert(TRIO, bundle.id)
        assert not store.has_bundle(bundle.id)
        store.keep_bundle(bundle)
        assert store.has_bundle(bundle.id) and store.load_bundle(bundle.id).id == bundle.id
        row = store.read.bundle(bundle.id)
        assert row
        store.drop_bundle(row)
        assert not store.has_bundle(bundle.id) and store.read.bundle(bundle.id) is None


# Faults


@pytest.mark.parametrize("damage", ["emptied", "removed"])
@pytest.mark.parametrize("create", [False, True])
def test_a_store_that_lost_its_content_does_not_become_an_empty_gallery(
    tmp_path: Path, damage: str, create: bool
) -> None:
    directory = fill(tmp_path / "gallery")
    file = directory / "catalogue.sqlite"
    file.unlink()
    if damage == "emptied":
        file.touch()
    before = {path: path.stat().st_size for path in directory.rglob("*")}
    with pytest.raises(LookalikeError, match=r"(is missing or empty.*Restore a snapshot|is not a gallery)"):
        open_gallery(directory, create=create)
    if damage == "emptied":
        [fault] = verify_gallery(directory)
        assert "is missing or empty" in fault.problem
    after = {path: path.stat().st_size for path in directory.rglob("*") if path.name != LOCK_FILE}
    assert after == {path: size for path, size in before.items() if path.name != LOCK_FILE}, "nothing was written"


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with open_gallery(fill(tmp_path / "gallery")) as gallery:
        size = max(path.stat().st_size for path in (tmp_path / "gallery").glob("catalogue*"))
        with files_up_to(size), pytest.raises(StorageFull, match=r"Nothing was written.*Free space"):
            for number in range(100, 2000):
                gallery.upsert([entry(number)], BUNDLE)


def test_a_writer_that_holds_the_lock_is_named(tmp_path: Path) -> None:
    directory = fill(tmp_path / "gallery")
    store = SQLiteStore(directory)
    store._db.execute("PRAGMA busy_timeout = 50")
    with closing(sqlite3.connect(directory / "catalogue.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="Wait until the other writer has ended"):
            store.delete(["item-00001"])
    store.close()


def test_freeing_the_error_of_a_writer_does_not_wait_for_the_next_one(tmp_path: Path) -> None:
    """Whoever frees an error frees its cursor too; in a service that is the event loop."""
    directory = fill(tmp_path / "gallery")
    store = SQLiteStore(directory)
    store._db.execute("PRAGMA busy_timeout = 50")
    errors: list[BaseException | None] = []
    with closing(sqlite3.connect(directory / "catalogue.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy) as raised:
            store.delete(["item-00001"])
        errors.append(raised.value)
        store._db.execute("PRAGMA busy_timeout = 3000")
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(store.delete, ["item-00002"])
            time.sleep(0.5)  # it waits for the lock
            del raised
            errors.clear()
            other.execute("ROLLBACK")
            assert writing.result() is not None
    store.close()


def test_writers_of_several_threads_wait_at_the_same_time_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits for the first, which waits for the process: it must not wait as long again then."""
    monkeypatch.setattr("index.gallery.store.sqlite.BUSY_SECONDS", 1.0)
    directory = fill(tmp_path / "gallery")
    store = SQLiteStore(directory)

    def fail_to_delete(name: str) -> float:
        started = time.monotonic()
        with pytest.raises(StoreBusy):
            store.delete([name])
        return time.monotonic() - started

    with closing(sqlite3.connect(directory / STORE_FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(4) as threads:
            started = time.monotonic()
            waits = list(threads.map(fail_to_delete, ["item-00001"] * 4))
            total = time.monotonic() - started
        other.execute("ROLLBACK")
    assert min(waits) >= 1, "each waited for the lock until its deadline"
    assert total < sum(waits) / 2, "they waited at the same time, not in turn"
    assert store.delete(["item-00001"])
    store.close()


def test_a_gallery_is_opened_while_a_command_holds_a_lock_on_its_folder(tmp_path: Path) -> None:
    directory = fill(tmp_path / "gallery")
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with open_gallery(directory) as gallery:
            assert gallery.jobs.newest() == [] and gallery.stats().items == 20
    finally:
        os.close(descriptor)


def zero_header(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(100))


def replace_with_another_database(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE invoices (number INTEGER)")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.truncate(file, file.stat().st_size // 2),
        lambda file: os.truncate(file, 8192),
        lambda file: os.truncate(file, 100),
        zero_header,
        replace_with_another_database,
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: file.write_bytes(b"not a database" * 1000),
    ],
    ids=["half", "page", "100 bytes", "header", "another database", "folder", "garbage"],
)
def test_a_damaged_store_is_refused_and_not_changed(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    directory = fill(tmp_path / "gallery")
    file = directory / STORE_FILE
    damage(file)
    before = file.read_bytes() if file.is_file() else b""
    for create in (False, True):
        with pytest.raises(StoreError, match="Restore a snapshot"):
            open_gallery(directory, create=create)
    [fault] = verify_gallery(directory)
    assert "Restore a snapshot" in fault.remedy
    assert not file.is_file() or file.read_bytes() == before


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
def test_nothing_is_written_to_a_store_that_lost_its_place(tmp_path: Path, replaced: bool) -> None:
    directory = fill(tmp_path / "gallery")
    with open_gallery(directory) as gallery:
        shutil.copy(directory / STORE_FILE, tmp_path / "copy")
        (directory / STORE_FILE).unlink()
        if replaced:
            shutil.copy(tmp_path / "copy", directory / STORE_FILE)
        with pytest.raises(StoreError, match="was deleted, replaced or cut while it was open"):
            gallery.delete(["item-00001"])
        assert gallery.search(vector(2)[None], bundle_id=BUNDLE).hits[0][0].item.id == "item-00001", "reads continue"


def test_acknowledged_writes_that_a_damaged_log_lost_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, crashed = fill(tmp_path / "gallery"), tmp_path / "crashed"
    with open_gallery(directory) as gallery:
        for number in range(100, 110):
            gallery.upsert([entry(number)], BUNDLE)
        shutil.copytree(directory, crashed, ignore=shutil.ignore_patterns("*-shm"))
    log = crashed / f"{STORE_FILE}-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with open_gallery(crashed) as gallery:
        kept = gallery.stats().items - 20
        assert 0 < kept < 10
        gallery.upsert([entry(200)], BUNDLE)  # it can still be used
    assert f"up to {10 - kept} acknowledged writes are lost" in caplog.text
    for _ in range(2):
        [fault] = verify_gallery(crashed)
        assert fault.problem.startswith(f"Up to {10 - kept} acknowledged writes were lost with the damaged log")
        assert "repeat the writes" in fault.remedy
    for copy in crashed.glob("*.damaged-*"):
        copy.unlink()
    assert verify_gallery(crashed) == []


def test_a_checkpoint_empties_the_log_when_nobody_writes(tmp_path: Path) -> None:
    with closing(SQLiteStore(tmp_path)) as store:
        store.upsert(TRIO, BUNDLE)
        log = tmp_path / f"{STORE_FILE}-wal"
        store.checkpoint(idle=False)
        assert log.stat().st_size > 0, "a short log is kept while others write"
        with store.open_reader() as reader:
            assert reader.revision() == 1
            store.delete(["mug"])
            store.checkpoint(idle=True)  # does not wait for the reader
            assert log.stat().st_size > 0
        store.checkpoint(idle=True)
        assert log.stat().st_size == 0
        assert store.read.counts() == (2, 3)
    assert not log.exists()


# Where nothing can be written


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every folder look read-only; the tests may run as root, who ignores permissions."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)


def test_a_read_only_gallery_is_searched_and_verified_but_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fill(tmp_path / "gallery", later=3)
    (directory / LOCK_FILE).unlink()
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    make_read_only(monkeypatch)
    with open_gallery(directory, maintain=True) as gallery:
        assert gallery.search(vector(2)[None], bundle_id=BUNDLE).hits[0][0].item.id == "item-00001"
        assert gallery.get_item("item-00002") and gallery.jobs.newest() == [] and gallery.verify() == []
        gallery.snapshot(tmp_path / "backup.tar")
        with pytest.raises(StoreReadOnly, match="Make its folder writable"):
            gallery.delete(["item-00001"])
        with pytest.raises(StoreReadOnly, match="Make its folder writable"):
            gallery.jobs.begin("shop.csv", BUNDLE)
        assert gallery.fault is None
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_a_read_only_gallery_follows_a_writer_that_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fill(tmp_path / "gallery")
    with monkeypatch.context() as patch:
        make_read_only(patch)
        reader = open_gallery(directory)
        assert len(reader.search(vector(2)[None], bundle_id=BUNDLE, top=50).hits[0]) == 20
    with open_gallery(directory) as writer:
        for number in (30, 31):
            writer.upsert([entry(number)], BUNDLE)
            with monkeypatch.context() as patch:
                make_read_only(patch)
                hits = reader.search(vector(2 * number)[None], bundle_id=BUNDLE).hits[0]
                assert hits[0].item.id == f"item-{number:05}"
                assert reader.get_item(f"item-{number:05}")
    reader.close()
