"""The tables of the PostgreSQL store, and how those of an older release become the current ones."""

from collections.abc import Sequence

from psycopg import sql

from index.errors import LookalikeError
from index.gallery.errors import StoreError
from index.gallery.store.postgres_connection import Connection, Server, store_errors
from index.gallery.store.rows import EXPIRY_LENGTH, EXPIRY_MARK

_FIRST = """
-- index_name and index_revision: what a shared vector index built of the bundle's vectors, and of which revision.
CREATE TABLE bundles (
    key bigint PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE, dimension integer NOT NULL,
    index_name text, index_revision bigint NOT NULL DEFAULT 0
);
-- One row. revision: the last write; forgotten: the last revision whose removals are no longer listed; token: drawn by
-- each transaction that readers must notice; gallery: identifies the gallery in caches.
CREATE TABLE state (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    revision bigint NOT NULL DEFAULT 0, forgotten bigint NOT NULL DEFAULT 0, token bigint NOT NULL DEFAULT 0,
    gallery uuid NOT NULL DEFAULT gen_random_uuid(),
    bundle bigint REFERENCES bundles (key), previous bigint REFERENCES bundles (key)
) WITH (fillfactor = 10);
INSERT INTO state DEFAULT VALUES;
-- The last transactions, for a writer whose connection was lost during its commit.
CREATE TABLE commits (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, token bigint NOT NULL UNIQUE);
CREATE TABLE items (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, id text COLLATE "C" NOT NULL UNIQUE,
    title text NOT NULL, url text NOT NULL, attributes text NOT NULL, revision bigint NOT NULL
);
CREATE INDEX items_by_revision ON items (revision);
-- The number of items that have each attribute, so that a write can check their limit without reading all items.
CREATE TABLE attribute_names (name text COLLATE "C" PRIMARY KEY, items bigint NOT NULL);
CREATE TABLE images (
    key bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, item bigint NOT NULL REFERENCES items (key) ON DELETE CASCADE,
    id text COLLATE "C" NOT NULL, digest text COLLATE "C" NOT NULL, UNIQUE (item, id)
);
CREATE INDEX images_by_digest ON images (digest);
CREATE TABLE vectors (
    bundle bigint NOT NULL REFERENCES bundles (key), image bigint NOT NULL REFERENCES images (key) ON DELETE CASCADE,
    revision bigint NOT NULL, vector bytea NOT NULL, PRIMARY KEY (bundle, image)
);
-- Vectors and photos cannot be compressed.
ALTER TABLE vectors ALTER COLUMN vector SET STORAGE EXTERNAL;
CREATE INDEX vectors_by_image ON vectors (image);
CREATE INDEX vectors_by_revision ON vectors (bundle, revision);
-- Keys of removed images, for followers that still hold their vectors.
CREATE TABLE removed (revision bigint NOT NULL, image bigint NOT NULL, PRIMARY KEY (revision, image));
CREATE TABLE thumbnails (digest text COLLATE "C" PRIMARY KEY, jpeg bytea NOT NULL);
ALTER TABLE thumbnails ALTER COLUMN jpeg SET STORAGE EXTERNAL;
-- Files of bundles, in parts with the SHA-256 of each.
CREATE TABLE bundle_copies (
    id text COLLATE "C" PRIMARY KEY, added timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE bundle_files (
    bundle text COLLATE "C" NOT NULL REFERENCES bundle_copies (id) ON DELETE CASCADE, name text COLLATE "C" NOT NULL,
    part integer NOT NULL, data bytea NOT NULL, digest bytea NOT NULL, PRIMARY KEY (bundle, name, part)
);
ALTER TABLE bundle_files ALTER COLUMN data SET STORAGE EXTERNAL;
-- claimed: since when some process holds the job's advisory lock, unless it was killed.
CREATE TABLE jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, host text NOT NULL, process bigint NOT NULL,
    cancel boolean NOT NULL DEFAULT false, claimed timestamptz, record text NOT NULL
);
"""

EXPIRY = f"substring(attributes FROM position('{EXPIRY_MARK}' IN attributes) + {len(EXPIRY_MARK)} FOR {EXPIRY_LENGTH})"
HAS_EXPIRY = f"position('{EXPIRY_MARK}' IN attributes) > 0"
"""Expressions of an item's attributes: the text of its expiry, and whether it has one."""
_EXPIRY_INDEX = f'CREATE INDEX items_by_expiry ON items (({EXPIRY}) COLLATE "C") WHERE {HAS_EXPIRY}'

_RANKINGS = """
CREATE TABLE rankings (
    name text COLLATE "C" NOT NULL, version bigint NOT NULL, stored double precision NOT NULL, document text NOT NULL,
    PRIMARY KEY (name, version)
);
"""

MIGRATIONS: tuple[str, ...] = (_FIRST, _EXPIRY_INDEX, _RANKINGS)
"""The statements that lead to each version from the one before; the first creates the tables."""

_MIGRATION_LOCK = 0x100CA11E
"""The advisory lock of whoever creates or changes tables, whichever gallery of the database they are of."""


def read_version(connection: Connection, schema: str) -> int:
    """Returns the schema version, 0 if there is no gallery."""
    found = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.schema_version",)).fetchone()
    if not found or not found[0]:
        return 0
    row = connection.execute("SELECT version FROM schema_version").fetchone()
    if row is None:
        raise StoreError(f"The schema {schema} has no version.", "Restore a backup, or use another schema.")
    return int(row[0])


def migrate(server: Server, migrations: Sequence[str] = MIGRATIONS) -> None:
    """Creates the tables or brings them to the current version, unless another process does; refuses newer ones."""
    connection = server.connect(seconds=0)
    try:
        with store_errors(), connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
            version = read_version(connection, server.schema)
            if is_current(version, len(migrations)):
                return  # another process was faster
            if version == 0:
                _create_schema(connection, server.schema)
            for statements in migrations[version:]:
                connection.execute(statements)
            connection.execute("UPDATE schema_version SET version = %s", (len(migrations),))
    finally:
        connection.close()


def is_current(version: int, current: int = len(MIGRATIONS)) -> bool:
    """Whether tables of a version can be used as they are; refuses those of a newer release."""
    if version > current:
        raise LookalikeError(
            f"The gallery has schema version {version}; this release reads versions up to {current}.",
            "Use the release that wrote it, or a newer one.",
        )
    return version == current


def _create_schema(connection: Connection, schema: str) -> None:
    connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
    tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = %s", (schema,)).fetchone()
    if tables and tables[0]:
        raise StoreError(
            f"The schema {schema} has tables of another program.", "Name another one: postgresql://...?schema=NAME."
        )
    connection.execute("CREATE TABLE schema_version (version integer NOT NULL)")
    connection.execute("INSERT INTO schema_version VALUES (0)")
