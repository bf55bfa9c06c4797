"""The tables of the SQLite store, and how connections to it are set up."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from index.errors import LookalikeError
from index.gallery.errors import StorageFull, StoreBusy, StoreError, StoreReadOnly

SCHEMA_VERSION = 3

_PAGE_BYTES = 8192
"""Seven vectors of 512 half-precision numbers fill such a page; SQLite's default would waste a quarter of each."""

_TABLES = """
-- index_name and index_revision: what a vector index built of the bundle's vectors, and the revision it reflects.
CREATE TABLE bundles (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, dimension INTEGER NOT NULL,
    index_name TEXT, index_revision INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE active (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    bundle INTEGER REFERENCES bundles (key), previous INTEGER REFERENCES bundles (key)
);
INSERT INTO active VALUES (1, NULL, NULL);
CREATE TABLE items (
    key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL, url TEXT NOT NULL, attributes TEXT NOT NULL, revision INTEGER NOT NULL
);
CREATE INDEX items_by_revision ON items (revision);
-- AUTOINCREMENT: a key that once named a vector in an index is never given to another image.
CREATE TABLE images (
    key INTEGER PRIMARY KEY AUTOINCREMENT, item INTEGER NOT NULL REFERENCES items (key) ON DELETE CASCADE,
    id TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (item, id)
);
CREATE INDEX images_by_digest ON images (digest);
CREATE TABLE vectors (
    bundle INTEGER NOT NULL REFERENCES bundles (key), image INTEGER NOT NULL REFERENCES images (key) ON DELETE CASCADE,
    revision INTEGER NOT NULL, vector BLOB NOT NULL, PRIMARY KEY (bundle, image)
);
-- Without the first, every removal of an image would scan all vectors; the second finds what a follower has not seen.
CREATE INDEX vectors_by_image ON vectors (image);
CREATE INDEX vectors_by_revision ON vectors (bundle, revision);
-- Keys of removed images, for followers that still hold their vectors.
CREATE TABLE removed (revision INTEGER NOT NULL, image INTEGER NOT NULL, PRIMARY KEY (revision, image)) WITHOUT ROWID;
CREATE TABLE thumbnails (digest TEXT PRIMARY KEY, jpeg BLOB NOT NULL);
-- revision: the last write; forgotten: the last revision whose removals are no longer listed.
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counters VALUES ('revision', 0), ('forgotten', 0);
"""


def store_error(path: Path, error: sqlite3.Error) -> StoreError:
    """Returns the error of a failed write; SQLite has rolled it back."""
    problem = f"Nothing was written to {path.name}: {error}."
    name = getattr(error, "sqlite_errorname", "")
    if name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"):
        return StorageFull(problem, "Free space on its disk, and write again.")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreBusy(problem, "Wait until the other writer has ended, and write again.")
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN")):
        return StoreReadOnly(problem, "Make its folder writable, and write again.")
    return StoreError(problem, "Check its disk, then run `lookalike gallery verify`.")


def connect(path: Path) -> sqlite3.Connection:
    """Opens a connection that any thread may use, one at a time; the caller begins transactions."""
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Runs a transaction. IMMEDIATE, so that two writers queue instead of failing half-way."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite rolls back on its own when the disk is full.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Creates the tables in a new file; refuses a file of another schema version."""
    if connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
        return  # without waiting for a writer
    with transaction(connection):
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            # `executescript` would commit the open transaction, so the statements are run one by one.
            lines = (line for line in _TABLES.splitlines() if not line.startswith("--"))
            for statement in "\n".join(lines).split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise LookalikeError(
                f"{path} has schema version {version}; this release reads version {SCHEMA_VERSION}.",
                "Use the release that wrote it, or re-index into a new folder.",
            )
