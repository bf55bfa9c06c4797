"""The tables of the SQLite store."""

from pathlib import Path

from index.errors import LookalikeError
from index.gallery.errors import RESTORE, StoreError
from index.gallery.store.rows import EXPIRY_LENGTH, EXPIRY_MARK
from index.gallery.store.sqlite_connection import StoreConnection, is_read_only, transaction

SCHEMA_VERSION = 5
_OLDEST_VERSION = 4
"""The oldest version that becomes the current one when it is opened."""

PAGE_BYTES = 8192
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
-- The number of items that have each attribute, so that a write can check their limit without reading all items.
CREATE TABLE attribute_names (name TEXT PRIMARY KEY, items INTEGER NOT NULL) WITHOUT ROWID;
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
_RANKINGS = """
CREATE TABLE rankings (
    name TEXT NOT NULL, version INTEGER NOT NULL, stored REAL NOT NULL, document TEXT NOT NULL,
    PRIMARY KEY (name, version)
) WITHOUT ROWID;
"""

EXPIRY = f"substr(attributes, instr(attributes, '{EXPIRY_MARK}') + {len(EXPIRY_MARK)}, {EXPIRY_LENGTH})"
HAS_EXPIRY = f"instr(attributes, '{EXPIRY_MARK}') > 0"
"""Expressions of an item's attributes: the text of its expiry, and whether it has one."""
_EXPIRY_INDEX = f"CREATE INDEX IF NOT EXISTS items_by_expiry ON items ({EXPIRY}) WHERE {HAS_EXPIRY}"


def prepare(connection: StoreConnection) -> None:
    """Creates the tables in a new file; refuses a file that is not a store of this schema version, and keeps it."""
    version = _version(connection)
    is_new = version == 0 and not _count_tables(connection)
    if not is_new:
        _check_version(connection.path, version)
    if is_read_only(connection.path):
        return
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode = WAL")
    if version < SCHEMA_VERSION:
        with transaction(connection):
            _create_tables(connection)


def _version(connection: StoreConnection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _count_tables(connection: StoreConnection) -> int:
    count: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return count


def _check_version(path: Path, version: int) -> None:
    if version == 0:
        raise StoreError(f"{path} is a database of another program.", RESTORE)
    if not _OLDEST_VERSION <= version <= SCHEMA_VERSION:
        raise LookalikeError(
            f"{path} has schema version {version}; this release reads {_OLDEST_VERSION} to {SCHEMA_VERSION}.",
            "Use the release that wrote it, or re-index into a new folder.",
        )


def _create_tables(connection: StoreConnection) -> None:
    """Creates the tables that are missing: all of them in a new file."""
    version = _version(connection)
    # `executescript` would commit the open transaction, so the statements are run one by one.
    for since, tables in ((_OLDEST_VERSION, _TABLES), (5, _RANKINGS)):
        if version < since:  # else another process was faster
            lines = (line for line in tables.splitlines() if not line.startswith("--"))
            for statement in "\n".join(lines).split(";"):
                connection.execute(statement)
    connection.execute(_EXPIRY_INDEX)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
