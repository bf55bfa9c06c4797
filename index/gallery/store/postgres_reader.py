"""Reads of the PostgreSQL store."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from index.gallery.errors import RESTORE, StoreError
from index.gallery.store.base import BundleRow, Changes, FullImageRow, Head, ImageContent, ImageRecord, ImageRow
from index.gallery.store.postgres_connection import Connection, store_errors
from index.gallery.store.postgres_indexes import BuiltIndexes
from index.gallery.store.rankings import RankingTable
from index.gallery.store.rows import parse_item
from index.gallery.types import Item, StoredImage, StoredItem
from index.rankings import StoredRanking

Result = TypeVar("Result")
_BATCH_ROWS = 2048
"""Rows of a large result that are in memory at a time."""
_BLOCK_LENGTH = 4_000_000
"""Length of the attributes that are read at a time: those of one item have up to a million characters."""
_BLOCK_ITEMS = 64
"""Items that are read at first, and then twice as many: their attributes may be long."""
_BUNDLE = "SELECT (SELECT revision FROM state), key, id, dimension, index_name, index_revision FROM bundles"
_BUNDLE_KEY = "(SELECT key FROM bundles WHERE id = %(bundle)s)"
_SPAN = "revision > %(since)s AND revision <= %(until)s"
_NEW_IMAGES = f"SELECT image FROM vectors WHERE bundle = %(bundle)s AND {_SPAN}"
_CHANGED_ITEMS = f"SELECT key FROM items WHERE {_SPAN}"
_INSTANT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

_MALFORMED = {
    "{} vectors are not of their bundle's dimension": (
        "SELECT count(*) FROM vectors JOIN bundles ON bundle = bundles.key WHERE length(vector) <> 2 * dimension"
    ),
    "{} images have an invalid digest": "SELECT count(*) FROM images WHERE digest !~ '^[0-9a-f]{64}$'",
    "{} images lack their thumbnail": (
        "SELECT count(*) FROM images WHERE NOT EXISTS (SELECT 1 FROM thumbnails WHERE digest = images.digest)"
    ),
    "{} rows refer to rows that do not exist": (
        "SELECT (SELECT count(*) FROM images WHERE NOT EXISTS (SELECT 1 FROM items WHERE key = item)) + "
        "(SELECT count(*) FROM vectors WHERE NOT EXISTS (SELECT 1 FROM images WHERE key = image))"
    ),
    "{} rows have a revision that was never written": (
        "SELECT count(*) FROM (SELECT revision FROM vectors UNION ALL SELECT revision FROM items "
        "UNION ALL SELECT revision FROM removed) AS rows WHERE revision > (SELECT revision FROM state)"
    ),
    "{} parts of bundles are damaged": "SELECT count(*) FROM bundle_files WHERE sha256(data) <> digest",
}
"""Problems that no write of ours causes, and the query that counts the affected rows."""


class Source(Protocol):
    """Where a reader gets its connection from."""

    def run(self, task: Callable[[Connection], Result]) -> Result: ...


class Snapshot:
    """One connection in a transaction that sees one instant."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def run(self, task: Callable[[Connection], Result]) -> Result:
        with store_errors("read"):
            return task(self.connection)


@contextmanager
def instant(connection: Connection) -> Iterator[None]:
    """Reads everything within as of one instant; may be nested."""
    if not connection.is_idle:
        yield
        return
    connection.execute(_INSTANT)
    yield  # an error ends the transaction, as whoever lent the connection closes it
    connection.execute("COMMIT")


class PostgresReader:
    """Reads by connections that it borrows, or within one snapshot."""

    def __init__(self, source: Source, indexes: BuiltIndexes) -> None:
        self._source = source
        self._indexes = indexes
        self._news_lock = threading.Lock()
        self._begun = 0
        self._news = (0, 0)
        self._cursors = 0

    def _all(self, query: str, **values: object) -> list[tuple[Any, ...]]:
        return self._source.run(lambda connection: connection.execute(query, values).fetchall())

    def _one(self, query: str, **values: object) -> tuple[Any, ...]:
        """Returns the only row."""
        return self._source.run(lambda connection: _first(connection, query, **values))

    def _number(self, query: str, **values: object) -> int:
        number: int = self._one(query, **values)[0]
        return number

    def _stream(self, query: str, **values: object) -> Iterator[list[tuple[Any, ...]]]:
        """Yields batches of a large result; only within a snapshot."""
        assert isinstance(self._source, Snapshot), "large results are read within open_reader"
        self._cursors += 1
        name = f"lookalike_{self._cursors}"
        with store_errors("read"), self._source.connection.cursor(name, binary=True) as cursor:
            cursor.itersize = _BATCH_ROWS
            cursor.execute(query, values)
            while batch := cursor.fetchmany(_BATCH_ROWS):
                yield batch

    # Following

    def news(self) -> int:
        """Returns the token of the last transaction, and a number of what this machine has built.

        Callers that come while a query runs share the next one.
        """
        needed = self._begun + 1
        with self._news_lock:
            number, token = self._news
            if number < needed:
                self._begun += 1
                number = self._begun
                token = self._number("SELECT token FROM state")
                self._news = number, token
        return self._indexes.stamp() << 64 | token

    def revision(self) -> int:
        return self._number("SELECT revision FROM state")

    def counts(self) -> tuple[int, int]:
        items, images = self._one("SELECT (SELECT count(*) FROM items), (SELECT count(*) FROM images)")
        return items, images

    def head(self) -> Head:
        query = (
            "SELECT state.revision, forgotten, a.key, a.id, a.dimension, a.index_name, a.index_revision, "
            "p.key, p.id, p.dimension, p.index_name, p.index_revision FROM state "
            "LEFT JOIN bundles a ON a.key = bundle LEFT JOIN bundles p ON p.key = previous"
        )
        indexes, row = self._indexes.fix(), self._one(query)
        active, previous = (
            indexes.apply(BundleRow(*part), row[0]) if part[0] is not None else None for part in (row[2:7], row[7:12])
        )
        return Head(row[0], row[1], active, previous)

    def bundle(self, bundle_id: str) -> BundleRow | None:
        return next(iter(self._bundles(f"{_BUNDLE} WHERE id = %(bundle)s", bundle=bundle_id)), None)

    def bundles(self) -> list[BundleRow]:
        return self._bundles(f"{_BUNDLE} ORDER BY key")

    def _bundles(self, query: str, **values: object) -> list[BundleRow]:
        indexes = self._indexes.fix()
        return [indexes.apply(BundleRow(*row), revision) for revision, *row in self._all(query, **values)]

    def changes(self, bundle: int, since: int, limit: int | None = None, *, whole_items: bool = False) -> Changes:
        return self._source.run(lambda connection: _read_changes(connection, bundle, since, limit, whole_items))

    # Bulk reads, within one instant

    def image_count(self, bundle: int) -> int:
        return self._number("SELECT count(*) FROM vectors WHERE bundle = %(bundle)s", bundle=bundle)

    def image_keys(self, bundle: int) -> NDArray[np.int64]:
        batches = self._stream("SELECT image FROM vectors WHERE bundle = %(bundle)s", bundle=bundle)
        return np.fromiter((key for batch in batches for (key,) in batch), np.int64)

    def image_ids_without(self, bundle_id: str) -> Iterator[tuple[str, str]]:
        query = (
            "SELECT items.id, images.id FROM images JOIN items ON item = items.key WHERE NOT EXISTS "
            f"(SELECT 1 FROM vectors WHERE bundle = {_BUNDLE_KEY} AND image = images.key) ORDER BY images.key"
        )
        for batch in self._stream(query, bundle=bundle_id):
            yield from batch

    def image_records(self, bundle: int) -> Iterator[ImageRecord]:
        query = (
            "SELECT images.key, item, images.id, digest, revision FROM vectors JOIN images ON image = images.key "
            "WHERE bundle = %(bundle)s ORDER BY image"
        )
        for batch in self._stream(query, bundle=bundle):
            yield from map(ImageRecord._make, batch)

    def items(self, bundle: int) -> Iterator[tuple[int, Item]]:
        query = (
            "SELECT key, id, title, url, attributes FROM items WHERE key IN (SELECT item FROM images JOIN vectors "
            "ON image = images.key WHERE bundle = %(bundle)s) ORDER BY key"
        )
        for batch in self._stream(query, bundle=bundle):
            for key, *row in batch:
                yield key, parse_item(*row)

    def vectors(self, bundle: int, since: int, out: NDArray[np.float16]) -> None:
        query = "SELECT vector FROM vectors WHERE bundle = %(bundle)s AND revision > %(since)s ORDER BY image"
        start = 0
        for batch in self._stream(query, bundle=bundle, since=since):
            joined = np.frombuffer(b"".join(vector for (vector,) in batch), "<f2")
            if joined.size != out[start : start + len(batch)].size:
                raise StoreError("The gallery cannot be read: its tables do not fit together.", RESTORE)
            out[start : start + len(batch)] = joined.reshape(len(batch), out.shape[1])
            start += len(batch)

    # Single reads

    def get_item(self, item_id: str) -> StoredItem | None:
        def read(connection: Connection) -> StoredItem | None:
            query = "SELECT key, revision, id, title, url, attributes FROM items WHERE id = %s"
            with instant(connection):
                row = connection.execute(query, (item_id,)).fetchone()
                if row is None:
                    return None
                query = "SELECT id, digest FROM images WHERE item = %s ORDER BY key"
                images = connection.execute(query, (row[0],)).fetchall()
            stored = [StoredImage.model_construct(id=name, digest=digest) for name, digest in images]
            return StoredItem(parse_item(*row[2:]), stored, row[1])

        return self._source.run(read)

    def items_after(self, item_id: str, count: int) -> list[Item]:
        query = "SELECT id, title, url, attributes FROM items WHERE id > %(after)s ORDER BY id LIMIT %(count)s"
        items: list[Item] = []
        size, block = 0, _BLOCK_ITEMS
        while size <= _BLOCK_LENGTH and len(items) < count:
            rows = self._all(query, after=items[-1].id if items else item_id, count=min(block, count - len(items)))
            for row in rows:
                items.append(parse_item(*row))
                size += len(row[-1])
                if size > _BLOCK_LENGTH:
                    break
            if len(rows) < block:
                break
            block *= 2
        return items

    def item_keys(self, item_ids: Sequence[str]) -> set[int]:
        return {key for (key,) in self._all("SELECT key FROM items WHERE id = ANY(%(ids)s)", ids=list(item_ids))}

    def item_vectors(self, item_id: str, bundle: int) -> dict[str, NDArray[np.float32]]:
        query = (
            "SELECT images.id, vector FROM items JOIN images ON item = items.key JOIN vectors ON image = images.key "
            "WHERE items.id = %(item)s AND bundle = %(bundle)s ORDER BY images.key"
        )
        rows = self._all(query, item=item_id, bundle=bundle)
        return {name: np.frombuffer(vector, "<f2").astype(np.float32) for name, vector in rows}

    def digests(self, item_ids: Iterable[str], bundle_id: str) -> dict[tuple[str, str], str]:
        query = (
            "SELECT items.id, images.id, digest FROM items JOIN images ON item = items.key "
            f"JOIN vectors ON image = images.key WHERE items.id = ANY(%(ids)s) AND bundle = {_BUNDLE_KEY} "
            "ORDER BY images.key"
        )
        rows = self._all(query, ids=list(item_ids), bundle=bundle_id)
        return {(item_id, image_id): digest for item_id, image_id, digest in rows}

    def image_ids(self) -> Iterator[tuple[str, str]]:
        query = "SELECT items.id, images.id FROM images JOIN items ON item = items.key ORDER BY items.id, images.id"
        for batch in self._stream(query):
            yield from batch

    def images_without(self, bundle_id: str, *, through: int | None = None) -> int:
        query = (
            "SELECT (SELECT count(*) FROM images WHERE key <= %(through)s) - "
            f"(SELECT count(*) FROM vectors WHERE bundle = {_BUNDLE_KEY} AND image <= %(through)s)"
        )
        return self._number(query, bundle=bundle_id, through=2**63 - 1 if through is None else through)

    def newest_image(self) -> int:
        return self._number("SELECT coalesce(max(key), 0) FROM images")

    def thumbnail(self, digest: str) -> bytes | None:
        rows = self._all("SELECT jpeg FROM thumbnails WHERE digest = %(digest)s", digest=digest)
        return rows[0][0] if rows else None

    def image_contents(self, item_ids: Sequence[str], *, hashed: bool) -> dict[str, list[ImageContent]]:
        content = "sha256" if hashed else ""
        images = (
            f"SELECT images.key, items.id, images.id, images.digest, {content}(coalesce(jpeg, '')) "
            "FROM items JOIN images ON item = items.key LEFT JOIN thumbnails ON thumbnails.digest = images.digest "
            "WHERE items.id = ANY(%(ids)s) ORDER BY images.key"
        )
        vectors = (
            f"SELECT image, bundles.id, {content}(vector) FROM items JOIN images ON item = items.key "
            "JOIN vectors ON image = images.key JOIN bundles ON bundle = bundles.key WHERE items.id = ANY(%(ids)s)"
        )

        def read(connection: Connection) -> dict[str, list[ImageContent]]:
            found: dict[str, list[ImageContent]] = {}
            of_image: dict[int, dict[str, bytes]] = {}
            with instant(connection):
                values = {"ids": list(item_ids)}
                for key, bundle_id, vector in connection.execute(vectors, values, binary=True):
                    of_image.setdefault(key, {})[bundle_id] = vector
                for key, item_id, name, digest, jpeg in connection.execute(images, values, binary=True):
                    found.setdefault(item_id, []).append(ImageContent(name, digest, of_image.get(key, {}), jpeg))
            return found

        return self._source.run(read)

    def full_images(self, bundle: int) -> Iterator[list[FullImageRow]]:
        query = (
            "SELECT images.key, item, images.id, digest, vector, items.id, title, url, attributes FROM vectors "
            "JOIN images ON image = images.key JOIN items ON item = items.key WHERE bundle = %(bundle)s ORDER BY image"
        )
        for batch in self._stream(query, bundle=bundle):
            yield [FullImageRow(*row) for row in batch]

    # The data as such

    def ranking(self, name: str, version: int | None = None) -> StoredRanking | None:
        return self._rankings.get(name, version)

    def rankings(self) -> list[StoredRanking]:
        return self._rankings.newest()

    def ranking_versions(self, name: str | None = None) -> list[StoredRanking]:
        return self._rankings.versions(name)

    @property
    def _rankings(self) -> RankingTable:
        def run(query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
            return self._source.run(lambda connection: connection.execute(query, values).fetchall())

        return RankingTable(run, "%s")

    def problems(self) -> list[str]:
        """Returns which rows no write of ours makes; only within a snapshot."""
        counts = {problem: self._number(query) for problem, query in _MALFORMED.items()}
        broken = sum(
            not _is_object(text) for batch in self._stream("SELECT attributes FROM items") for (text,) in batch
        )
        counts["{} items have attributes that are not a JSON object"] = broken
        found = [problem.format(f"{count:,}") for problem, count in counts.items() if count]
        return found + self._rankings.problems(self.revision())


def _first(connection: Connection, query: str, **values: object) -> tuple[Any, ...]:
    row = connection.execute(query, values).fetchone()
    if row is None or None in row[:1]:
        raise StoreError("The gallery cannot be read: a row is missing.", RESTORE)
    return row


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _read_changes(connection: Connection, bundle: int, since: int, limit: int | None, whole_items: bool) -> Changes:
    # One more round trip than statements that return everything, but each can use its index.
    values: dict[str, Any] = {"bundle": bundle, "since": since, "skipped": (limit or 1) - 1}
    bound = "revision"
    if limit:
        tables = ("vectors WHERE bundle = %(bundle)s AND", "items WHERE", "removed WHERE")
        reached = (
            f"(SELECT revision FROM {table} revision > %(since)s ORDER BY revision LIMIT 1 OFFSET %(skipped)s)"
            for table in tables
        )
        bound = f"least(revision, {', '.join(reached)})"  # which ignores those that are null
    images = _NEW_IMAGES
    if whole_items:
        images += f" UNION SELECT key FROM images WHERE item IN ({_CHANGED_ITEMS})"
    with instant(connection):
        query = (
            f"SELECT {bound}, revision, forgotten, (SELECT dimension FROM bundles WHERE key = %(bundle)s) FROM state"
        )
        values["until"], revision, forgotten, dimension = _first(connection, query, **values)
        with connection.pipeline():
            removed = connection.execute(f"SELECT image FROM removed WHERE {_SPAN}", values)
            rows = connection.execute(
                "SELECT images.key, item, images.id, digest, vector FROM vectors JOIN images ON image = images.key "
                f"WHERE bundle = %(bundle)s AND image IN ({images}) ORDER BY 1",
                values,
                binary=True,
            )
            items = connection.execute(
                "SELECT key, id, title, url, attributes FROM items WHERE key IN "
                f"({_CHANGED_ITEMS} UNION SELECT item FROM images WHERE key IN ({_NEW_IMAGES}))",
                values,
            )
        found = [ImageRow(*row) for row in rows.fetchall()]
        if any(len(row.vector) != 2 * dimension for row in found):
            raise StoreError("The gallery cannot be read: a vector has a wrong length.", RESTORE)
        return Changes(
            values["until"],
            forgotten,
            [key for (key,) in removed.fetchall()],
            found,
            {key: parse_item(*row) for key, *row in items.fetchall()},
            is_last=values["until"] == revision,
        )
