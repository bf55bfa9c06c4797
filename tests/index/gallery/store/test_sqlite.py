"""The SQLite store: opening, locked and damaged files, revisions of removals, and copies of bundles."""

import fcntl
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import open_gallery, verify_gallery
from index.gallery.errors import StorageFull, StoreBusy, StoreError
from index.gallery.store.sqlite import STORE_FILE, SQLiteStore
from index.gallery.store.sqlite_jobs import LOCK_FILE
from tests.index.gallery.reference import BUNDLE, TRIO
from tests.support.disk import files_up_to
from tests.support.filled_gallery import entry, fill
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
    with pytest.raises(LookalikeError, match=r"cannot be opened: .* Restore it from a snapshot"):
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


def test_a_gallery_is_opened_while_a_command_holds_a_lock_on_its_folder(tmp_path: Path) -> None:
    directory = fill(tmp_path / "gallery")
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with open_gallery(directory) as gallery:
            assert gallery.jobs.newest() == [] and gallery.stats().items == 20
    finally:
        os.close(descriptor)
