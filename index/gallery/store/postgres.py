"""The item store in a schema of a PostgreSQL database: the source of truth of a gallery on several machines."""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from time import monotonic, sleep
from types import MappingProxyType
from typing import Any, TypeVar

import psycopg

from index._util.files import create_directory
from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery.errors import StoreBusy, StoreError, StoreUnavailable
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow
from index.gallery.store.postgres_bundles import BundleCopies
from index.gallery.store.postgres_connection import (
    Connection,
    Connections,
    PostgresSettings,
    Server,
    store_errors,
)
from index.gallery.store.postgres_indexes import LocalIndexes, SharedIndexes
from index.gallery.store.postgres_jobs import PostgresJobs
from index.gallery.store.postgres_reader import PostgresReader, Snapshot, instant
from index.gallery.store.postgres_schema import is_current, migrate, read_version
from index.gallery.store.postgres_writer import Writer
from index.gallery.types import Item, NewImage
from index.rankings import Ranking, StoredRanking

Result = TypeVar("Result")
INDEXES_FILE = "indexes.json"
_ANY_VERSION: Mapping[str, int | None] = MappingProxyType({})
_NO_IMAGES: Mapping[str, Iterable[str]] = MappingProxyType({})
_LISTED_COMMITS = 10_000
"""Transactions that are listed, for writers that have to find out whether theirs was committed."""
_BUILD_LOCK = "build"


class PostgresStore:
    """A store in a schema. Any thread may call any method.

    Writers of all processes queue for the row of the revision, so that revisions are in the order of the commits.
    """

    def __init__(
        self,
        address: str,
        cache: Path,
        *,
        shared_index: bool,
        create: bool = False,
        settings: GallerySettings | None = None,
        postgres: PostgresSettings | None = None,
    ) -> None:
        """`cache` is a folder of this machine, below which each gallery has one.

        Without a `shared_index` each machine builds its own, and records there what it has built.
        """
        self._settings = settings or GallerySettings()
        self._server = server = Server(address, postgres)
        self.is_read_only = self._prepare(create)
        limits = server.settings
        # Small reads by key, whatever the planner believes about tables that were filled just now.
        self._watching = Connections(server, limit=1, seconds=limits.read_seconds, options="-c enable_seqscan=off")
        self._asking = Connections(server, limit=1, seconds=limits.news_seconds)
        self._reading = Connections(server, limit=limits.max_connections, seconds=limits.read_seconds)
        self._writing_connection = Connections(server, limit=1, seconds=0)
        ((identity,),) = self._rows("SELECT gallery::text FROM state")
        self.identity = identity
        """Never changes, and no other gallery has it; copies of the tables keep it."""
        self.cache = cache / _folder_name(server, identity)
        try:
            create_directory(self.cache)
        except OSError as error:
            raise StoreError(
                f"The cache folder {cache} cannot be used: {error.strerror}.",
                "Name one that may be written: LOOKALIKE_CACHE.",
            ) from error
        self._local = None if shared_index else LocalIndexes(self.cache / INDEXES_FILE)
        self._indexes = self._local or SharedIndexes()
        self.watch = _WatchReader(server, self._watching, self._indexes, self._asking)
        self.read = PostgresReader(self._reading, self._indexes)
        self.jobs = PostgresJobs(server, self._reading, self.cache / "jobs")
        self._copies = BundleCopies(self._reading, self.cache / "bundles")
        self._lock = RLock()

    def _prepare(self, create: bool) -> bool:
        """Creates or migrates the tables; returns whether nothing can be written."""
        server = self._server
        connection = server.connect(seconds=server.settings.read_seconds)
        try:
            with store_errors("read"):
                query = "SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean"
                read_only = bool(connection.execute(query).fetchall()[0][0])
                version = read_version(connection, server.schema)
                if version == 0 and (read_only or not create):
                    raise LookalikeError(
                        f"There is no gallery in the schema {server.schema} of the database.",
                        "Create one with `lookalike reindex`, or correct the address.",
                    )
                if not is_current(version):
                    migrate(server)
                query = "SELECT has_table_privilege('state', 'UPDATE')"
                return read_only or not connection.execute(query).fetchall()[0][0]
        finally:
            connection.close()

    @property
    def can_record_indexes(self) -> bool:
        return self._local is not None or not self.is_read_only

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._reading.run(lambda connection: connection.execute(query, values).fetchall())

    def close(self) -> None:
        self.jobs.close()
        for connections in (self._watching, self._asking, self._reading, self._writing_connection):
            connections.close()

    @contextmanager
    def open_reader(self) -> Iterator[PostgresReader]:
        indexes = self._indexes.fix()  # before the instant: an index is never newer than what is read
        connection = self._server.connect(seconds=0, options="-c idle_in_transaction_session_timeout=0")
        try:
            with store_errors("read"), instant(connection):
                connection.execute("SELECT revision FROM state")  # the first statement decides the instant
                yield PostgresReader(Snapshot(connection), indexes)
        finally:
            connection.close()

    # Transactions

    @contextmanager
    def _transaction(self) -> Iterator[tuple[Connection, int]]:
        """Runs a transaction that readers must notice; yields it with the revision so far.

        It holds the row of the state, so that one writer of all processes works at a time.
        """
        with self._lock, self._begin() as (connection, revision):
            try:
                with store_errors():
                    yield connection, revision
                    token = secrets.randbits(63)
                    connection.execute("UPDATE state SET token = %s", (token,))
                    connection.execute("INSERT INTO commits (token) VALUES (%s)", (token,))
            except BaseException:
                if not connection.is_lost:
                    connection.execute("ROLLBACK")
                raise
            self._commit(connection, token)

    @contextmanager
    def _begin(self) -> Iterator[tuple[Connection, int]]:
        """Begins a transaction, on a new connection if the server has closed the idle one."""
        for fresh in (False, True):
            with self._writing_connection.borrow(fresh=fresh) as connection:
                try:
                    revision = _begin(connection)
                except StoreUnavailable:
                    if fresh or not connection.is_lost:
                        raise
                    continue
                yield connection, revision
                return

    def _commit(self, connection: Connection, token: int) -> None:
        try:
            connection.execute("COMMIT")
        except psycopg.OperationalError as error:
            # The server may have committed before the connection was lost.
            if not connection.is_lost and connection.is_idle:
                with store_errors():
                    raise
            self._resolve(connection, token, error)

    def _resolve(self, connection: Connection, token: int, error: psycopg.Error) -> None:
        """Finds out whether a transaction was committed; raises StoreUnavailable if it was not or is not known."""
        connection.close()
        deadline = monotonic() + self._server.settings.resolve_seconds
        while True:
            try:
                is_committed = self._is_committed(token)
                break
            except (StoreUnavailable, StoreBusy):
                if monotonic() > deadline:
                    raise StoreUnavailable(
                        "It is unknown whether the write was kept: PostgreSQL was lost while it committed.",
                        "Read the items before you send it again.",
                    ) from error
                sleep(min(0.2, self._server.settings.retry_seconds))
        if not is_committed:
            raise StoreUnavailable(
                "Nothing was written: PostgreSQL was lost before it committed.", "Send it again."
            ) from error

    def _is_committed(self, token: int) -> bool:
        """Waits until no transaction can be committing any more, and looks for the token."""
        connection = self._server.connect(seconds=self._server.settings.read_seconds)
        try:
            _begin(connection)
            with store_errors("read"):
                found = connection.execute("SELECT 1 FROM commits WHERE token = %s", (token,)).fetchone()
                connection.execute("ROLLBACK")
            return found is not None
        finally:
            connection.close()

    @contextmanager
    def _writing(self) -> Iterator[Writer]:
        """Runs a transaction with its revision, which becomes the gallery's only if something changed."""
        with self._lock, self._begin() as (connection, revision):
            writer = Writer(connection, revision + 1)
            try:
                with store_errors():
                    yield writer
                    if writer.changes:
                        token = secrets.randbits(63)
                        self._record(connection, writer, token)
            except BaseException:
                if not connection.is_lost:
                    connection.execute("ROLLBACK")
                raise
            if writer.changes:
                self._commit(connection, token)
            else:
                writer.revision -= 1
                with store_errors():
                    connection.execute("ROLLBACK")

    def _record(self, connection: Connection, writer: Writer, token: int) -> None:
        with connection.pipeline():
            connection.execute("UPDATE state SET revision = %s, token = %s", (writer.revision, token))
            connection.execute("INSERT INTO commits (token) VALUES (%s)", (token,))
            if writer.revision % 100 == 0:
                query = "DELETE FROM commits WHERE number < (SELECT max(number) FROM commits) - %s"
                connection.execute(query, (_LISTED_COMMITS,))
        if writer.has_removed:
            _prune_removals(connection, self._settings.listed_removals)

    # Items and images

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Mapping[str, int | None] = _ANY_VERSION,
        without: Mapping[str, Iterable[str]] = _NO_IMAGES,
        activate_first: bool = True,
    ) -> int:
        with self._writing() as writer:
            writer.check_versions(expected)
            writer.remove_named((item_id, image_id) for item_id, names in without.items() for image_id in names)
            if writer.upsert(entries, bundle_id) and activate_first:
                query = "UPDATE state SET bundle = (SELECT key FROM bundles WHERE id = %(id)s) WHERE bundle IS NULL"
                writer.change(query, id=bundle_id)
        return writer.revision

    def delete(self, item_ids: Iterable[str], *, expected: Mapping[str, int | None] = _ANY_VERSION) -> int:
        with self._writing() as writer:
            writer.check_versions(expected)
            writer.remove_items(item_ids)
        return writer.revision

    def delete_expired(self, instant: int, limit: int) -> int:
        with self._writing() as writer:
            return writer.remove_expired(instant, limit)

    # Rankings

    def put_ranking(
        self,
        name: str,
        ranking: Ranking,
        *,
        expected: Mapping[str, int | None] = _ANY_VERSION,
        stored: float | None = None,
    ) -> StoredRanking:
        with self._writing() as writer:
            return writer.rankings.put(name, ranking, revision=writer.revision, expected=expected, stored=stored)

    def delete_ranking(self, name: str, *, expected: Mapping[str, int | None] = _ANY_VERSION) -> bool:
        with self._writing() as writer:
            return writer.rankings.delete(name, expected)

    # Bundles

    def set_index(self, bundle: int, name: str | None, revision: int) -> None:
        if self._local:
            # Each machine has built another revision, so none of them decides which removals are listed.
            self._local.record(bundle, name, revision)
            return
        with self._transaction() as (connection, _):
            # This bundle's last index counts too: a follower that has not yet opened the new one can still catch up.
            # Others count as they are: whoever opens one of them must learn what was removed since it was built.
            query = "SELECT min(index_revision) FROM bundles WHERE index_name IS NOT NULL OR key = %s"
            ((oldest,),) = connection.execute(query, (bundle,)).fetchall()
            query = "UPDATE bundles SET index_name = %s, index_revision = %s WHERE key = %s"
            connection.execute(query, (name, revision, bundle))
            if oldest is not None:
                _forget(connection, oldest)

    def set_active(self, bundle: BundleRow) -> None:
        with self._transaction() as (connection, _):
            if not connection.execute("SELECT 1 FROM bundles WHERE key = %s", (bundle.key,)).fetchone():
                raise LookalikeError(f"Bundle {bundle.id} was dropped meanwhile.", "Index with it again.")
            query = "UPDATE state SET previous = bundle, bundle = %s WHERE bundle IS DISTINCT FROM %s"
            connection.execute(query, (bundle.key, bundle.key))

    def drop_bundle(self, bundle: BundleRow) -> None:
        with self._transaction() as (connection, _):
            if connection.execute("SELECT 1 FROM state WHERE bundle = %s", (bundle.key,)).fetchone():
                raise LookalikeError(
                    f"Bundle {bundle.id} is active.", "Activate another one first: lookalike gallery activate."
                )
            connection.execute("UPDATE state SET previous = NULL WHERE previous = %s", (bundle.key,))
            connection.execute("DELETE FROM vectors WHERE bundle = %s", (bundle.key,))
            connection.execute("DELETE FROM bundles WHERE key = %s", (bundle.key,))
            connection.execute("DELETE FROM bundle_copies WHERE id = %s", (bundle.id,))
        self._copies.remove(bundle.id)

    def keep_bundle(self, bundle: Bundle) -> None:
        self._copies.keep(bundle)

    def has_bundle(self, bundle_id: str) -> bool:
        return self._copies.has(bundle_id)

    def load_bundle(self, bundle_id: str) -> Bundle:
        return self._copies.load(bundle_id)

    # Locks between machines

    @contextmanager
    def build_lock(self, *, wait: bool) -> Iterator[Callable[[], None] | None]:
        """Holds the lock of those who build a shared index; without `wait`, yields None when another one has it.

        It ends with the connection, also when this process is killed. What it yields raises an error once it is lost,
        as by a restart of the server: another process may then have begun to build.
        """
        key = lock_key(self._server.schema, _BUILD_LOCK)
        connection = self._server.connect(seconds=0, options="-c lock_timeout=0")

        def check() -> None:
            with store_errors():
                connection.execute("SELECT 1")

        try:
            with store_errors():
                if wait:
                    connection.execute("SELECT pg_advisory_lock(%s)", (key,))
                    is_held = True
                else:
                    is_held = bool(connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchall()[0][0])
            connection.seconds = self._server.settings.read_seconds
            yield check if is_held else None
        finally:
            connection.close()

    # The data as such

    def problems(self) -> list[str]:
        with self.open_reader() as reader:
            return reader.problems()

    def lost_writes(self) -> list[str]:
        return []  # only what was built or recorded elsewhere shows that a server has lost writes

    def check(self) -> None:
        if self._rows("SELECT gallery::text FROM state") != [(self.identity,)]:
            raise StoreError("The gallery was removed or replaced while it was open.", "Restart.")

    def probe(self) -> None:
        self.watch.news()

    def checkpoint(self, *, idle: bool) -> None:
        """Does nothing: the server does so itself."""

    def files(self, folder: Path) -> dict[str, Path]:
        raise LookalikeError(
            "A gallery in PostgreSQL has no snapshots.",
            "Copy it into a folder (lookalike gallery copy) and snapshot that, or back the database up with pg_dump.",
        )

    def size(self) -> int:
        query = (
            "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relkind = 'r'"
        )
        return int(self._rows(query, self._server.schema)[0][0])


class _WatchReader(PostgresReader):
    """Asks for news on a connection of its own, which no long read delays and which gives up soon."""

    def __init__(
        self, server: Server, watching: Connections, indexes: SharedIndexes | LocalIndexes, asking: Connections
    ) -> None:
        super().__init__(watching, indexes)
        self._server = server
        self._asking = PostgresReader(asking, indexes)

    def news(self) -> int:
        with self._server.alone_while_gone():
            return self._asking.news()


def lock_key(schema: str, purpose: str) -> int:
    """Returns the number of an advisory lock of a gallery."""
    return int.from_bytes(hashlib.sha256(f"{schema}\0{purpose}".encode()).digest()[:8], "big", signed=True)


def _folder_name(server: Server, identity: str) -> str:
    # The schema for people; the identity, because a gallery may be dropped and created again under its address.
    digest = hashlib.sha256(f"{server.place}\0{identity}".encode()).hexdigest()
    return f"{server.schema}-{digest[:16]}"


def _begin(connection: Connection) -> int:
    """Begins a transaction when all other writers have ended; returns the revision."""
    with store_errors():
        connection.execute("BEGIN")
        ((revision,),) = connection.execute("SELECT revision FROM state FOR UPDATE").fetchall()
        return int(revision)


def _prune_removals(connection: Connection, count: int) -> None:
    """Forgets the oldest removals: without a limit they would grow with every item that comes and goes."""
    query = "SELECT revision FROM removed ORDER BY revision DESC, image DESC LIMIT 1 OFFSET %s"
    for (revision,) in connection.execute(query, (count,)).fetchall():
        _forget(connection, revision)


def _forget(connection: Connection, revision: int) -> None:
    """Removes the removals up to a revision from the list."""
    query = "UPDATE state SET forgotten = %s WHERE forgotten < %s"
    if connection.execute(query, (revision, revision)).rowcount:
        connection.execute("DELETE FROM removed WHERE revision <= %s", (revision,))
