"""Connections to SQLite files: read-only folders, and errors with a problem and a remedy."""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from index.gallery.errors import StorageFull, StoreBusy, StoreError, StoreReadOnly
from index.gallery.store.sqlite_connection import connect, file_errors, store_error, transaction


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database in WAL mode with one table of a thousand rows."""
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE numbers (value TEXT)")
        database.executemany("INSERT INTO numbers VALUES (?)", [(f"number {value}" * 9,) for value in range(1000)])
    return path


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every folder look read-only; the tests may run as root, who ignores permissions."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)


@pytest.mark.parametrize(
    ("name", "kind", "remedy"),
    [
        ("SQLITE_FULL", StorageFull, "Free space"),
        ("SQLITE_IOERR_WRITE", StorageFull, "Free space"),
        ("SQLITE_BUSY", StoreBusy, "Wait until"),
        ("SQLITE_READONLY_DIRECTORY", StoreReadOnly, "Make its folder writable"),
        ("SQLITE_CANTOPEN", StoreError, "ulimit -n"),
        ("SQLITE_IOERR_LOCK", StoreError, "Use a local disk"),
        ("SQLITE_IOERR_READ", StoreError, "Check its disk"),
        ("SQLITE_CORRUPT", StoreError, "Restore a snapshot"),
        ("", StoreError, "Restore a snapshot"),
    ],
)
def test_each_fault_of_sqlite_has_a_remedy(tmp_path: Path, name: str, kind: type[StoreError], remedy: str) -> None:
    error = sqlite3.OperationalError("what SQLite says")
    error.sqlite_errorname = name
    found = store_error(tmp_path / "store.sqlite", error, "read")
    assert type(found) is kind and remedy in found.remedy
    assert found.problem == "store.sqlite cannot be read: what SQLite says."


def test_a_write_that_fails_because_the_disk_turned_read_only_is_not_reported_as_a_full_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite has the same error for both when the file was open before."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_WRITE"
    assert type(store_error(path, error)) is StorageFull
    make_read_only(monkeypatch)
    found = store_error(path, error)
    assert type(found) is StoreReadOnly and "Make its folder writable" in found.remedy


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFull), (errno.EROFS, StoreReadOnly), (errno.EMFILE, StoreError), (errno.EIO, StoreError)],
)
def test_faults_of_files_are_errors_of_the_store(number: int, kind: type[StoreError]) -> None:
    problem = f"Nothing was written to copy: {os.strerror(number)}"
    with pytest.raises(kind, match=problem) as error, file_errors(Path("/secret/copy")):
        raise OSError(number, os.strerror(number), "/secret/copy")
    assert type(error.value) is kind


def test_damage_is_an_error_of_the_store_wherever_rows_are_read(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"\xff" * 4096)
    with closing(connect(path, "read")) as connection:
        query = "SELECT value FROM numbers"
        with pytest.raises(StoreError, match=r"store.sqlite cannot be read: .*malformed.*Restore a snapshot"):
            list(connection.execute(query))
        with pytest.raises(StoreError, match="malformed"):
            connection.execute(query).fetchall()
        with pytest.raises(StoreError, match="malformed"):
            connection.execute(query).fetchmany(1000)
        with pytest.raises(StoreError, match="malformed"):
            connection.execute("SELECT max(value) FROM numbers").fetchone()
        with pytest.raises(StoreError, match="no such table: letters"):
            connection.execute("SELECT * FROM letters")


def test_a_mistake_in_a_query_is_not_reported_as_damage(path: Path) -> None:
    with closing(connect(path)) as connection, pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT ?", (1, 2))


def test_a_file_in_a_read_only_folder_is_read_but_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path.parent.iterdir())
    make_read_only(monkeypatch)
    with closing(connect(path, "written")) as connection:
        assert connection.execute("SELECT count(*) FROM numbers").fetchone() == (1000,)
        with pytest.raises(StoreReadOnly, match="Make its folder writable"), transaction(connection):
            connection.execute("DELETE FROM numbers")
        assert sorted(path.parent.iterdir()) == before, "neither a log nor an index of it was created"


def test_a_log_in_a_read_only_folder_is_read_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("DELETE FROM numbers")
        make_read_only(monkeypatch)
        with closing(connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM numbers").fetchone() == (0,)
        path.with_name("store.sqlite-shm").rename(path.with_name("moved"))
        with pytest.raises(StoreReadOnly, match=r"must be recovered first.*open it once"):
            connect(path)
