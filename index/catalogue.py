"""The catalogue: items, images and vectors in SQLite, the only truth of a gallery.

Everything else in a gallery (the FAISS generations) is derived from it and can be made again.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.errors import LookalikeError
from index.items import Hit, Item, StoredImage

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE items (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, url TEXT NOT NULL, attributes TEXT NOT NULL, change INTEGER NOT NULL
);
-- AUTOINCREMENT: a key that once named a vector in a generation is never given to another image.
CREATE TABLE images (
    key INTEGER PRIMARY KEY AUTOINCREMENT, item_id TEXT NOT NULL REFERENCES items (id) ON DELETE CASCADE,
    id TEXT NOT NULL, digest TEXT NOT NULL, change INTEGER NOT NULL, UNIQUE (item_id, id)
);
CREATE TABLE vectors (
    bundle_id TEXT NOT NULL, image_key INTEGER NOT NULL REFERENCES images (key) ON DELETE CASCADE,
    vector BLOB NOT NULL, PRIMARY KEY (bundle_id, image_key)
) WITHOUT ROWID;
-- Without it every deletion of an image would scan all vectors.
CREATE INDEX vectors_by_image ON vectors (image_key);
CREATE TABLE thumbnails (digest TEXT PRIMARY KEY, jpeg BLOB NOT NULL);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counters VALUES ('change', 0);
"""


class NewImage(NamedTuple):
    """An image ready to be stored: its vector for one bundle, and a small JPEG to show."""

    id: str
    digest: str
    vector: NDArray[np.float32]
    thumbnail: bytes


class Catalogue:
    """One SQLite file. Methods may be called from any thread; writes are acknowledged after their commit."""

    def __init__(self, path: Path) -> None:
        new = not path.exists()
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._prepare(path)
        except sqlite3.DatabaseError as error:
            self._db.close()
            if new:
                path.unlink(missing_ok=True)
            raise LookalikeError(f"{path} cannot be used as a catalogue: {error}.", "Restore it from a copy.") from None

    def _prepare(self, path: Path) -> None:
        with self._writing():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _statements(_SCHEMA):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise LookalikeError(
                    f"{path} has schema version {version}; this release reads version {SCHEMA_VERSION}.",
                    "Use the release that wrote it, or re-index into a new folder.",
                )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction; IMMEDIATE, so that two writers queue instead of failing half-way."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def _next_change(self) -> int:
        query = "UPDATE counters SET value = value + 1 WHERE name = 'change' RETURNING value"
        change: int = self._db.execute(query).fetchone()[0]
        return change

    # Writing

    def upsert(self, entries: Iterable[tuple[Item, Sequence[NewImage]]], bundle_id: str) -> int:
        """Stores items and the given images of each; other images of an item stay. Answers the change number."""
        with self._writing():
            change = self._next_change()
            for item, images in entries:
                self._db.execute(
                    "INSERT INTO items VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET title = excluded.title, "
                    "url = excluded.url, attributes = excluded.attributes, change = excluded.change",
                    (item.id, item.title, item.url, json.dumps(item.attributes), change),
                )
                for image in images:
                    self._store_image(item.id, image, bundle_id, change)
        return change

    def _store_image(self, item_id: str, image: NewImage, bundle_id: str, change: int) -> None:
        found = self._db.execute(
            "SELECT key, digest FROM images WHERE item_id = ? AND id = ?", (item_id, image.id)
        ).fetchone()
        if found and found[1] != image.digest:
            # Another picture under the same name: its old vectors, of every bundle, go with the old key.
            self._db.execute("DELETE FROM images WHERE key = ?", (found[0],))
            found = None
        if found is None:
            key = self._db.execute(
                "INSERT INTO images (item_id, id, digest, change) VALUES (?, ?, ?, ?)",
                (item_id, image.id, image.digest, change),
            ).lastrowid
        else:
            key = found[0]
        vector = np.ascontiguousarray(image.vector, "<f4").tobytes()
        self._db.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", (bundle_id, key, vector))
        self._db.execute("INSERT OR IGNORE INTO thumbnails VALUES (?, ?)", (image.digest, image.thumbnail))

    def delete(self, item_ids: Iterable[str]) -> int:
        """Removes items with their images and vectors; unknown ids are ignored. Answers the change number."""
        with self._writing():
            change = self._next_change()
            self._db.executemany("DELETE FROM items WHERE id = ?", ((item_id,) for item_id in item_ids))
            self._db.execute("DELETE FROM thumbnails WHERE digest NOT IN (SELECT digest FROM images)")
        return change

    # Reading

    def change(self) -> int:
        """The number of the newest write."""
        return self._count("SELECT value FROM counters WHERE name = 'change'")

    def counts(self) -> tuple[int, int]:
        """Items and images."""
        return self._count("SELECT count(*) FROM items"), self._count("SELECT count(*) FROM images")

    def _count(self, query: str) -> int:
        with self._lock:
            count: int = self._db.execute(query).fetchone()[0]
        return count

    def get(self, item_id: str) -> Item | None:
        with self._lock:
            row = self._db.execute("SELECT id, title, url, attributes FROM items WHERE id = ?", (item_id,)).fetchone()
        return _item(*row) if row else None

    def thumbnail(self, digest: str) -> bytes | None:
        with self._lock:
            row = self._db.execute("SELECT jpeg FROM thumbnails WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row else None

    def digests(self, item_id: str, bundle_id: str) -> dict[str, str]:
        """Image id to digest, for the item's images that have a vector of the bundle."""
        query = (
            "SELECT images.id, digest FROM images JOIN vectors ON image_key = key WHERE item_id = ? AND bundle_id = ?"
        )
        with self._lock:
            return dict(self._db.execute(query, (item_id, bundle_id)).fetchall())

    def vectors(self, bundle_id: str) -> tuple[int, NDArray[np.int64], NDArray[np.float32]]:
        """Change number, image keys and vectors of a bundle, read at one instant."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                change = self.change()
                rows = self._db.execute(
                    "SELECT image_key, vector FROM vectors WHERE bundle_id = ? ORDER BY image_key",
                    (bundle_id,),
                ).fetchall()
            finally:
                self._db.execute("COMMIT")
        keys = np.array([key for key, _ in rows], np.int64)
        vectors = np.frombuffer(b"".join(blob for _, blob in rows), "<f4").reshape(len(rows), -1 if rows else 0)
        return change, keys, vectors

    def hits(self, scores: dict[int, float]) -> list[Hit]:
        """The best image of each item among image keys with their scores; keys that are gone are left out."""
        query = (
            "SELECT key, images.id, digest, items.id, title, url, attributes FROM images "
            "JOIN items ON items.id = item_id WHERE key IN (SELECT value FROM json_each(?))"
        )
        with self._lock:
            rows = self._db.execute(query, (json.dumps(list(scores)),)).fetchall()
        best: dict[str, Hit] = {}
        # Equal scores are ordered by key so that the same search always gives the same answer.
        for key, image_id, digest, *item in sorted(rows, key=lambda row: (-scores[row[0]], row[0])):
            if item[0] not in best:
                image = StoredImage(id=image_id, digest=digest)
                best[item[0]] = Hit(item=_item(*item), image=image, score=scores[key])
        return list(best.values())


def _item(item_id: str, title: str, url: str, attributes: str) -> Item:
    return Item(id=item_id, title=title, url=url, attributes=json.loads(attributes))


def _statements(script: str) -> Iterator[str]:
    """`executescript` would commit the open transaction, so the schema is run a statement at a time."""
    lines = (line for line in script.splitlines() if not line.startswith("--"))
    return (statement for statement in "\n".join(lines).split(";") if statement.strip())
