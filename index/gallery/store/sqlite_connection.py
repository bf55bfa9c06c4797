"""Connections to SQLite files: how they are opened, also where nothing can be written, and what their errors mean."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, NoReturn, Self, cast

from index._util.deadline import seconds_left
from index._util.files import is_disk_full
from index.gallery.errors import RESTORE, StorageFull, StoreBusy, StoreError, StoreReadOnly

_Action = Literal["opened", "read", "written"]


def store_error(path: Path, error: Exception, action: _Action = "written") -> StoreError:
    """Returns the error that says what happened and what to do; SQLite has rolled back a write that failed."""
    reason = error.strerror if isinstance(error, OSError) else error
    # The service shows the problem to whoever reads or writes: without the path.
    what = {
        "opened": f"{path} cannot be opened",
        "read": f"{path.name} cannot be read",
        "written": f"Nothing was written to {path.name}",
    }
    problem = f"{what[action]}: {reason}."
    name = getattr(error, "sqlite_errorname", "")
    number = getattr(error, "errno", None)
    # A disk that turns read-only while the file is open fails like a full one.
    is_unwritable = name == "SQLITE_IOERR_WRITE" and is_read_only(path)
    if is_unwritable or name.startswith(("SQLITE_READONLY", "SQLITE_PERM")) or number in _READ_ONLY:
        return StoreReadOnly(problem, "Make its folder writable, and try again.")
    if name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE") or is_disk_full(error):
        return StorageFull(problem, "Free space on its disk, and try again.")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        return StoreBusy(problem, "Wait until the other writer has ended, and try again.")
    if name.startswith("SQLITE_CANTOPEN") or number in (errno.EMFILE, errno.ENFILE):
        return StoreError(problem, "Check the permissions of its folder, and the limit of open files (ulimit -n).")
    if name.startswith(("SQLITE_IOERR_LOCK", "SQLITE_IOERR_RDLOCK", "SQLITE_IOERR_SHMLOCK")):
        return StoreError(problem, "Use a local disk: network file systems have no locks.")
    if name.startswith("SQLITE_IOERR") or number is not None:
        return StoreError(problem, "Check its disk, then run `lookalike gallery verify`.")
    return StoreError(problem, RESTORE)  # not a database, damaged pages, missing tables


SQLITE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""The second one if a message of SQLite contains damaged text."""
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
BUSY_SECONDS = 30.0
"""How long a write waits for another writer, unless a deadline ends sooner."""
_RETRY_SECONDS = 0.01
"""Between two attempts to begin a transaction while another writer holds the lock."""
_OUR_MISTAKES = (sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.NotSupportedError)


@contextmanager
def file_errors(path: Path, action: _Action = "written") -> Iterator[None]:
    """Raises what the operating system reports about files of a store as an error of the store."""
    try:
        yield
    except OSError as error:
        raise store_error(path, error, action) from error


class StoreConnection(sqlite3.Connection):
    """A connection that raises errors of the store instead of SQLite's, whoever reads or writes."""

    path: Path
    action: _Action
    """What its errors say that failed."""
    stamp: object = None
    """Of a file that is read as it is: what changes when somebody writes it nevertheless."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return self.cursor(_Cursor).execute(sql, parameters)

    def fail(self, error: Exception) -> NoReturn:
        if isinstance(error, _OUR_MISTAKES):
            raise error
        raise store_error(self.path, error, self.action) from error


class _Cursor(sqlite3.Cursor):
    """SQLite reports damage when a statement is run, and also when its rows are read."""

    def execute(self, sql: str, parameters: Any = (), /) -> Self:
        try:
            return super().execute(sql, parameters)
        except SQLITE_ERRORS as error:
            cast(StoreConnection, self.connection).fail(error)

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except SQLITE_ERRORS as error:
            cast(StoreConnection, self.connection).fail(error)

    def fetchone(self) -> Any:
        try:
            return super().fetchone()
        except SQLITE_ERRORS as error:
            cast(StoreConnection, self.connection).fail(error)

    def fetchmany(self, size: int | None = 1) -> list[Any]:
        try:
            return super().fetchmany(size)
        except SQLITE_ERRORS as error:
            cast(StoreConnection, self.connection).fail(error)

    def fetchall(self) -> list[Any]:
        try:
            return super().fetchall()
        except SQLITE_ERRORS as error:
            cast(StoreConnection, self.connection).fail(error)


def connect(path: Path, action: _Action = "opened") -> StoreConnection:
    """Opens a connection that any thread may use, one at a time; the caller begins transactions.

    Where nothing can be written, it is opened for reading only. Without a log the file is then read as it is, because
    SQLite could not create the files by which it notices writers.
    """
    read_only = is_read_only(path)
    if read_only and _has_log(path) and not path.with_name(f"{path.name}-shm").exists():
        raise StoreReadOnly(
            f"{path} has a log that must be recovered first, but its folder is read-only.",
            "Make its folder writable and open it once: lookalike gallery stats.",
        )
    stamp = read_stamp(path) if read_only and path.exists() and not _has_log(path) else None
    mode = "?mode=ro" + ("&immutable=1" if stamp else "") if read_only else ""
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}{mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            check_same_thread=False,
            isolation_level=None,
            factory=StoreConnection,
        )
    except sqlite3.DatabaseError as error:
        raise store_error(path, error, action) from error
    connection.path, connection.action, connection.stamp = path, action, stamp
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def is_read_only(path: Path) -> bool:
    """Returns whether this process may not write a file, or no other file into its folder."""
    return not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK))


def read_stamp(path: Path) -> object:
    """Returns what differs after a write to a file that this process may not write."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, _has_log(path)


def log_of(path: Path) -> Path:
    """Returns the write-ahead log of a SQLite file."""
    return path.with_name(f"{path.name}-wal")


def _has_log(path: Path) -> bool:
    log = log_of(path)
    return log.exists() and log.stat().st_size > 0


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Runs a transaction. IMMEDIATE, so that two writers queue instead of failing half-way."""
    _begin(connection)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite rolls back on its own when the disk is full.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _begin(connection: sqlite3.Connection) -> None:
    """Begins a transaction; waits for another writer as long as the connection's busy timeout and the deadline allow.

    It waits outside SQLite. Within, SQLite holds a mutex of the connection, and whoever frees a cursor of an earlier
    error waits for it: that was the event loop of the service, which answered nothing meanwhile.
    """
    (milliseconds,) = connection.execute("PRAGMA busy_timeout").fetchone()
    end = monotonic() + seconds_left(milliseconds / 1000)
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except (StoreBusy, sqlite3.OperationalError) as error:  # the job history raises those of SQLite
                is_busy = isinstance(error, StoreBusy) or error.sqlite_errorname.startswith("SQLITE_BUSY")
                if not is_busy or monotonic() >= end:
                    raise
            sleep(_RETRY_SECONDS)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
