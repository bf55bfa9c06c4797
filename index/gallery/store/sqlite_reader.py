"""Reads of the SQLite store."""

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.gallery.errors import RESTORE, StoreError
from index.gallery.store.base import BundleRow, Changes, FullImageRow, Head, ImageContent, ImageRecord, ImageRow
from index.gallery.store.rankings import RankingTable
from index.gallery.store.rows import parse_item
from index.gallery.store.sqlite_connection import StoreConnection, connect, read_stamp
from index.gallery.types import Item, StoredImage, StoredItem
from index.rankings import StoredRanking

_BATCH_ROWS = 2048
"""Rows of a large result that are in memory at a time."""
_BLOCK_LENGTH = 4_000_000
"""Length of the attributes that are read at a time: those of one item have up to a million characters."""

_BUNDLE_KEY = "(SELECT key FROM bundles WHERE id = ?)"

_MALFORMED = {
    "{} vectors are not of their bundle's dimension": (
        "SELECT count(*) FROM vectors JOIN bundles ON bundle = bundles.key "
        "WHERE typeof(vector) <> 'blob' OR length(vector) <> 2 * dimension"
    ),
    "{} items have attributes that are not a JSON object": (
        "SELECT count(*) FROM items "
        "WHERE CASE WHEN json_valid(attributes) THEN json_type(attributes) <> 'object' ELSE 1 END"
    ),
    "{} images have an invalid digest": (
        "SELECT count(*) FROM images WHERE length(digest) <> 64 OR digest GLOB '*[^0-9a-f]*'"
    ),
    "{} images lack their thumbnail": (
        "SELECT count(*) FROM images WHERE NOT EXISTS (SELECT 1 FROM thumbnails WHERE digest = images.digest)"
    ),
    "{} rows refer to rows that do not exist": "SELECT count(*) FROM pragma_foreign_key_check",
    "{} rows have a revision that was never written": (
        "SELECT count(*) FROM (SELECT revision FROM vectors UNION ALL SELECT revision FROM items "
        "UNION ALL SELECT revision FROM removed) "
        "WHERE revision > (SELECT value FROM counters WHERE name = 'revision')"
    ),
}
"""Problems that no write of ours causes, and the query that counts the affected rows."""


class SQLiteReader:
    """One connection for reads; threads take turns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._openings = 0
        self._open()

    def _open(self) -> None:
        self._connection = connect(self._path, "read")
        self._openings += 1

    @property
    def _db(self) -> StoreConnection:
        """The connection, with the lock held. A file that is read as it is was opened again if somebody wrote it."""
        stamp = self._connection.stamp
        if stamp is not None and not self._connection.in_transaction and stamp != read_stamp(self._path):
            self._connection.close()
            self._open()
        return self._connection

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def instant(self) -> Iterator[None]:
        """Reads everything within as of one instant; may be nested."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("COMMIT")

    def _all(self, query: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _one(self, query: str, *values: object) -> tuple[Any, ...]:
        """Returns the only row."""
        with self._lock:
            row: tuple[Any, ...] | None = self._db.execute(query, values).fetchone()
        if row is None or None in row[:1]:
            raise StoreError(f"{self._path.name} cannot be read: a row is missing.", RESTORE)
        return row

    def _number(self, query: str, *values: object) -> int:
        number: int = self._one(query, *values)[0]
        return number

    def news(self) -> int:
        """Returns SQLite's data version, which changes whenever another connection has written."""
        with self._lock:
            version: int = self._db.execute("PRAGMA data_version").fetchone()[0]
            return self._openings << 32 | version

    def revision(self) -> int:
        return self._number("SELECT value FROM counters WHERE name = 'revision'")

    def counts(self) -> tuple[int, int]:
        return self._number("SELECT count(*) FROM items"), self._number("SELECT count(*) FROM images")

    def head(self) -> Head:
        query = (
            "SELECT (SELECT value FROM counters WHERE name = 'revision'), "
            "(SELECT value FROM counters WHERE name = 'forgotten'), bundle, previous FROM active"
        )
        with self._lock:
            revision, forgotten, bundle, previous = self._one(query)
            return Head(revision, forgotten, self._bundle("key", bundle), self._bundle("key", previous))

    def bundle(self, bundle_id: str) -> BundleRow | None:
        return self._bundle("id", bundle_id)

    def bundles(self) -> list[BundleRow]:
        query = "SELECT key, id, dimension, index_name, index_revision FROM bundles ORDER BY key"
        return [BundleRow(*row) for row in self._all(query)]  # type: ignore[arg-type]

    def _bundle(self, column: str, value: object) -> BundleRow | None:
        query = f"SELECT key, id, dimension, index_name, index_revision FROM bundles WHERE {column} = ?"
        with self._lock:
            row = self._db.execute(query, (value,)).fetchone()
        return BundleRow(*row) if row else None

    def changes(self, bundle: int, since: int, limit: int | None = None, *, whole_items: bool = False) -> Changes:
        with self.instant():
            revision = self.revision()
            until = self._revision_after(bundle, since, limit) if limit else revision
            new = "vectors.bundle = ?1 AND vectors.revision > ?2 AND vectors.revision <= ?3"
            changed = "items.revision > ?2 AND items.revision <= ?3"
            row = "SELECT images.key, item, images.id, digest, vector"
            images = f"{row} FROM vectors JOIN images ON image = images.key WHERE {new}"
            if whole_items:
                images += (
                    f" UNION {row} FROM items JOIN images ON item = items.key JOIN vectors ON image = images.key "
                    f"WHERE vectors.bundle = ?1 AND {changed}"
                )
            items = (
                f"SELECT key, id, title, url, attributes FROM items WHERE {changed} UNION "
                "SELECT items.key, items.id, title, url, attributes FROM vectors JOIN images ON image = images.key "
                f"JOIN items ON item = items.key WHERE {new}"
            )
            removed = "SELECT image FROM removed WHERE revision > ? AND revision <= ?"
            span = bundle, since, until
            return Changes(
                until,
                self._number("SELECT value FROM counters WHERE name = 'forgotten'"),
                [key for (key,) in self._db.execute(removed, span[1:])],
                self._check_vectors(bundle, [ImageRow(*it) for it in self._db.execute(f"{images} ORDER BY 1", span)]),
                {key: parse_item(*it) for key, *it in self._db.execute(items, span)},
                is_last=until == revision,
            )

    def _check_vectors(self, bundle: int, rows: list[ImageRow]) -> list[ImageRow]:
        size = 2 * self._number("SELECT dimension FROM bundles WHERE key = ?", bundle) if rows else 0
        if any(type(row.vector) is not bytes or len(row.vector) != size for row in rows):
            raise StoreError(f"{self._path.name} cannot be read: a vector has a wrong length.", RESTORE)
        return rows

    def _revision_after(self, bundle: int, since: int, limit: int) -> int:
        """Returns the revision by which the first `limit` changes have happened; the newest one if there are fewer."""
        tables = "vectors WHERE bundle = ?1 AND", "items WHERE", "removed WHERE"
        reached = ", ".join(
            f"coalesce((SELECT revision FROM {table} revision > ?2 ORDER BY revision LIMIT 1 OFFSET ?3), newest)"
            for table in tables
        )
        newest = "(SELECT value AS newest FROM counters WHERE name = 'revision')"
        return self._number(f"SELECT min({reached}) FROM {newest}", bundle, since, limit - 1)

    # Bulk reads, within one instant

    def image_count(self, bundle: int) -> int:
        return self._number("SELECT count(*) FROM vectors WHERE bundle = ?", bundle)

    def image_keys(self, bundle: int) -> NDArray[np.int64]:
        rows = self._db.execute("SELECT image FROM vectors WHERE bundle = ?", (bundle,))
        return np.fromiter((key for (key,) in rows), np.int64)

    def image_ids_without(self, bundle_id: str) -> Iterator[tuple[str, str]]:
        query = (
            "SELECT items.id, images.id FROM images JOIN items ON item = items.key WHERE NOT EXISTS "
            f"(SELECT 1 FROM vectors WHERE bundle = {_BUNDLE_KEY} AND image = images.key) ORDER BY images.key"
        )
        yield from self._db.execute(query, (bundle_id,))

    def image_records(self, bundle: int) -> Iterator[ImageRecord]:
        query = (
            "SELECT images.key, item, images.id, digest, revision FROM vectors JOIN images ON image = images.key "
            "WHERE bundle = ? ORDER BY image"
        )
        return map(ImageRecord._make, self._db.execute(query, (bundle,)))

    def items(self, bundle: int) -> Iterator[tuple[int, Item]]:
        # CROSS fixes the order of the join: else SQLite would read all vectors again for every item.
        query = (
            "SELECT key, id, title, url, attributes FROM items WHERE EXISTS (SELECT 1 FROM images CROSS JOIN vectors "
            "ON image = images.key WHERE images.item = items.key AND bundle = ?) ORDER BY key"
        )
        for key, *row in self._db.execute(query, (bundle,)):
            yield key, parse_item(*row)

    def vectors(self, bundle: int, since: int, out: NDArray[np.float16]) -> None:
        # Without a bound there is no condition on the revision: with one, SQLite would sort the vectors on disk.
        newer = "AND revision > ?" if since else "AND ? = 0"
        query = f"SELECT vector FROM vectors WHERE bundle = ? {newer} ORDER BY image"
        rows, start = self._db.execute(query, (bundle, since)), 0
        while batch := rows.fetchmany(_BATCH_ROWS):
            joined = np.frombuffer(b"".join(vector for (vector,) in batch), "<f2")
            if joined.size != out[start : start + len(batch)].size:
                raise StoreError(f"{self._path.name} cannot be read: its tables do not fit together.", RESTORE)
            out[start : start + len(batch)] = joined.reshape(len(batch), out.shape[1])
            start += len(batch)

    # Single reads

    def get_item(self, item_id: str) -> StoredItem | None:
        query = "SELECT key, revision, id, title, url, attributes FROM items WHERE id = ?"
        with self.instant():
            row = self._db.execute(query, (item_id,)).fetchone()
            if row is None:
                return None
            images = self._db.execute("SELECT id, digest FROM images WHERE item = ? ORDER BY key", (row[0],))
            stored = [StoredImage.model_construct(id=name, digest=digest) for name, digest in images]
        return StoredItem(parse_item(*row[2:]), stored, row[1])

    def items_after(self, item_id: str, count: int) -> list[Item]:
        query = "SELECT id, title, url, attributes FROM items WHERE id > ? ORDER BY id LIMIT ?"
        items: list[Item] = []
        size = 0
        with self._lock:
            for row in self._db.execute(query, (item_id, count)):
                items.append(parse_item(*row))
                size += len(row[-1])
                if size > _BLOCK_LENGTH:
                    break
        return items

    def item_keys(self, item_ids: Sequence[str]) -> set[int]:
        with self._lock:
            return {
                key
                for item_id in item_ids
                for (key,) in self._db.execute("SELECT key FROM items WHERE id = ?", (item_id,))
            }

    def item_vectors(self, item_id: str, bundle: int) -> dict[str, NDArray[np.float32]]:
        query = (
            "SELECT images.id, vector FROM items JOIN images ON item = items.key JOIN vectors ON image = images.key "
            "WHERE items.id = ? AND bundle = ? ORDER BY images.key"  # ordered by `image`, SQLite would read all vectors
        )
        with self._lock:
            rows = self._db.execute(query, (item_id, bundle)).fetchall()
        return {name: np.frombuffer(vector, "<f2").astype(np.float32) for name, vector in rows}

    def digests(self, item_ids: Iterable[str], bundle_id: str) -> dict[tuple[str, str], str]:
        query = (
            "SELECT images.id, digest FROM items JOIN images ON item = items.key JOIN vectors ON image = images.key "
            f"WHERE items.id = ? AND bundle = {_BUNDLE_KEY} ORDER BY images.key"
        )
        with self._lock:
            return {
                (item_id, image_id): digest
                for item_id in item_ids
                for image_id, digest in self._db.execute(query, (item_id, bundle_id))
            }

    def image_ids(self) -> Iterator[tuple[str, str]]:
        query = "SELECT items.id, images.id FROM items JOIN images ON item = items.key ORDER BY items.id, images.id"
        yield from self._db.execute(query)

    def images_without(self, bundle_id: str, *, through: int | None = None) -> int:
        images, vectors = "SELECT count(*) FROM images", f"SELECT count(*) FROM vectors WHERE bundle = {_BUNDLE_KEY}"
        if through is None:
            return self._number(f"SELECT ({images}) - ({vectors})", bundle_id)
        query = f"SELECT ({images} WHERE key <= ?) - ({vectors} AND image <= ?)"
        return self._number(query, through, bundle_id, through)

    def newest_image(self) -> int:
        return self._number("SELECT coalesce(max(key), 0) FROM images")

    def thumbnail(self, digest: str) -> bytes | None:
        with self._lock:
            row = self._db.execute("SELECT jpeg FROM thumbnails WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row else None

    def image_contents(self, item_ids: Sequence[str], *, hashed: bool) -> dict[str, list[ImageContent]]:
        query = (
            "SELECT images.key, images.id, images.digest, jpeg FROM items JOIN images ON item = items.key "
            "LEFT JOIN thumbnails ON thumbnails.digest = images.digest WHERE items.id = ? ORDER BY images.key"
        )
        of_image = "SELECT bundles.id, vector FROM vectors JOIN bundles ON bundle = bundles.key WHERE image = ?"
        content = _sha256 if hashed else bytes
        found: dict[str, list[ImageContent]] = {}
        with self.instant():
            for item_id in item_ids:
                for key, name, digest, jpeg in self._db.execute(query, (item_id,)):
                    vectors = {bundle: content(vector) for bundle, vector in self._db.execute(of_image, (key,))}
                    image = ImageContent(name, digest, vectors, content(jpeg or b""))
                    found.setdefault(item_id, []).append(image)
        return found

    def full_images(self, bundle: int) -> Iterator[list[FullImageRow]]:
        query = (
            "SELECT images.key, item, images.id, digest, vector, items.id, title, url, attributes FROM vectors "
            "JOIN images ON image = images.key JOIN items ON item = items.key WHERE bundle = ? ORDER BY image"
        )
        rows = self._db.execute(query, (bundle,))
        while batch := rows.fetchmany(_BATCH_ROWS):
            yield [FullImageRow(*row) for row in batch]

    # The file as such

    def ranking(self, name: str, version: int | None = None) -> StoredRanking | None:
        return self._rankings.get(name, version)

    def rankings(self) -> list[StoredRanking]:
        return self._rankings.newest()

    def ranking_versions(self, name: str | None = None) -> list[StoredRanking]:
        return self._rankings.versions(name)

    @property
    def _rankings(self) -> RankingTable:
        return RankingTable(self._read_rankings, "?")

    def _read_rankings(self, query: str, values: Sequence[object]) -> list[tuple[object, ...]]:
        """Returns no rows of a file of an older release that cannot be written, which has no such table."""
        with self._lock:
            has_table = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rankings'").fetchone()
            return self._db.execute(query, values).fetchall() if has_table else []

    def problems(self) -> list[str]:
        """Returns what SQLite's integrity check finds; if nothing, rows that no write of ours makes."""
        with self._lock:
            fault = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if fault != "ok":
            return [f"SQLite finds the store damaged: {fault}"]
        counts = {problem: self._number(query) for problem, query in _MALFORMED.items()}
        found = [problem.format(f"{count:,}") for problem, count in counts.items() if count]
        return found + self._rankings.problems(self.revision())

    def copy_to(self, path: Path) -> None:
        """Writes a consistent copy of the file while others write."""
        with self._lock:
            self._db.execute("VACUUM INTO ?", (str(path),))


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
