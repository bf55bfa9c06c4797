"""The catalogue: items, images and vectors in SQLite, the only truth of a gallery.

Everything else in a gallery (the FAISS generations) is derived from it and can be made again.
"""

import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np

from index._util.system import exclusive_lock
from index.errors import LookalikeError
from index.gallery.store.schema import connect, prepare
from index.gallery.store.sqlite_reader import Reader
from index.gallery.types import Item, NewImage

_DIGEST = re.compile(r"[0-9a-f]{64}")


class CatalogueError(LookalikeError):
    """The catalogue cannot be read or written, or would be written wrongly."""

    kind = "catalogue"


class VersionConflict(LookalikeError):
    """An item that is no longer as the writer saw it."""

    kind = "version-conflict"

    def __init__(self, item_id: str) -> None:
        super().__init__(f"Item {item_id!r} was changed since it was read.", "Read it again and repeat the change.")


_ANY_VERSION: Mapping[str, int | None] = MappingProxyType({})
_NO_IMAGES: Mapping[str, Iterable[str]] = MappingProxyType({})


class Catalogue:
    """One SQLite file. Any thread may call any method; a write is acknowledged after its commit.

    Writing, following the writes of others and other reading have a connection each: none waits for another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        with exclusive_lock(path.parent):  # those who make a new file would get into each other's way
            new = not path.exists()
            try:
                self._db = connect(path)
                prepare(self._db, path)
                self.watch = Reader(path)
                self.read = Reader(path)
            except sqlite3.DatabaseError as error:
                if new:
                    path.unlink(missing_ok=True)
                remedy = "Restore it from a copy."
                if isinstance(error, sqlite3.OperationalError):  # nothing is wrong with the file itself
                    remedy = "Check the rights on its folder and the room on its disk; if it is locked, wait and retry."
                raise CatalogueError(f"{path} cannot be used as a catalogue: {error}.", remedy) from None

    def close(self) -> None:
        self.watch.close()
        self.read.close()
        with self._lock:
            self._db.close()

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """A connection of its own for a long read, all of one instant."""
        reader = Reader(self.path)
        try:
            with reader.instant():
                yield reader
        finally:
            reader.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing. IMMEDIATE, so that two writers queue instead of failing half-way."""
        try:
            with self._lock:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    # SQLite has rolled back by itself when the disk was full.
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
        except sqlite3.OperationalError as error:
            raise CatalogueError(
                f"{self.path} could not be written, and nothing of this write was kept: {error}.",
                "Free space on its disk, or wait until the other writer has ended, and write again.",
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[int]:
        """A transaction and its change number, which is taken only if something changed."""
        with self._transaction():
            before = self._db.total_changes
            change = self._count("SELECT value + 1 FROM counters WHERE name = 'change'")
            yield change
            if self._db.total_changes != before:
                self._db.execute("UPDATE counters SET value = ? WHERE name = 'change'", (change,))

    def _count(self, query: str, *values: object) -> int:
        count: int = self._db.execute(query, values).fetchone()[0]
        return count

    # Items and images

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        expected: Mapping[str, int | None] = _ANY_VERSION,
        without: Mapping[str, Iterable[str]] = _NO_IMAGES,
    ) -> int:
        """Stores items and the given images of each; other images of an item stay, save those named in `without`.

        Answers the number of the newest change; storing what is already there is none.
        """
        with self._writing() as change:
            self._check_versions(expected)
            for item, images in entries:
                key = self._store_item(item, change)
                for image in images:
                    self._store_image(key, image, self._bundle(bundle_id, image), change)
            for item_id, image_ids in without.items():
                self._remove_named(item_id, image_ids, change)
        return self.read.change()

    def _check_versions(self, expected: Mapping[str, int | None]) -> None:
        """Refuses a write that rests on what somebody has changed since."""
        for item_id, version in expected.items():
            row = self._db.execute("SELECT change FROM items WHERE id = ?", (item_id,)).fetchone()
            if (row[0] if row else None) != version:
                raise VersionConflict(item_id)

    def _store_item(self, item: Item, change: int) -> int:
        attributes = json.dumps(item.attributes, sort_keys=True, ensure_ascii=False, allow_nan=False)
        content = (item.title, item.url, attributes)
        found = self._db.execute("SELECT key, title, url, attributes FROM items WHERE id = ?", (item.id,)).fetchone()
        if found is None:
            query = "INSERT INTO items (id, title, url, attributes, change) VALUES (?, ?, ?, ?, ?) RETURNING key"
            return self._count(query, item.id, *content, change)
        if found[1:] != content:
            query = "UPDATE items SET title = ?, url = ?, attributes = ?, change = ? WHERE key = ?"
            self._db.execute(query, (*content, change, found[0]))
        key: int = found[0]
        return key

    def _bundle(self, bundle_id: str, image: NewImage) -> int:
        """The bundle's key; the first bundle that a gallery meets becomes the live one."""
        row = self._db.execute("SELECT key, dimension FROM bundles WHERE id = ?", (bundle_id,)).fetchone()
        shape = np.shape(image.vector)
        storable = bool((np.abs(image.vector) <= np.finfo(np.float16).max).all())  # which is said of no NaN
        if len(shape) != 1 or not shape[0] or (row and shape[0] != row[1]) or not storable:
            raise CatalogueError(
                f"Image {image.id!r} has a vector of shape {shape}; bundle {bundle_id} makes finite ones of "
                f"{row[1] if row else 'one dimension'}.",
                "Embed it with this bundle.",
            )
        if row:
            key: int = row[0]
            return key
        key = self._count("INSERT INTO bundles (id, dimension) VALUES (?, ?) RETURNING key", bundle_id, shape[0])
        self._db.execute("UPDATE current SET bundle = ? WHERE bundle IS NULL", (key,))
        return key

    def _store_image(self, item: int, image: NewImage, bundle: int, change: int) -> None:
        if not _DIGEST.fullmatch(image.digest):
            raise CatalogueError(
                f"Image {image.id!r} has the digest {image.digest[:80]!r}.", "Give the SHA-256 of its bytes, in hex."
            )
        found = self._db.execute(
            "SELECT key, digest FROM images WHERE item = ? AND id = ?", (item, image.id)
        ).fetchone()
        if found and found[1] != image.digest:
            # Another picture under the same name: its old vectors, of every bundle, go with the old key.
            self._remove_images([found[0]], change)
            found = None
        if found is None:
            query = "INSERT INTO images (item, id, digest) VALUES (?, ?, ?) RETURNING key"
            key = self._count(query, item, image.id, image.digest)
            self._db.execute("UPDATE items SET change = ? WHERE key = ?", (change, item))
            self._db.execute("INSERT OR IGNORE INTO thumbnails VALUES (?, ?)", (image.digest, image.thumbnail))
        else:
            key = found[0]
        # Half precision: what the exact index stores, so a score is the same before and after a compaction.
        vector = np.asarray(image.vector, "<f2").tobytes()
        self._db.execute(
            "INSERT INTO vectors VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET change = excluded.change, "
            "vector = excluded.vector WHERE vector <> excluded.vector",
            (bundle, key, change, vector),
        )

    def delete(self, item_ids: Iterable[str], expected: Mapping[str, int | None] = _ANY_VERSION) -> int:
        """Removes items with their images and vectors; unknown ids are ignored. Answers the newest change."""
        with self._writing() as change:
            self._check_versions(expected)
            for item_id in item_ids:
                images = "SELECT images.key FROM images JOIN items ON item = items.key WHERE items.id = ?"
                self._remove_images([key for (key,) in self._db.execute(images, (item_id,))], change)
                self._db.execute("DELETE FROM items WHERE id = ?", (item_id,))
        return self.read.change()

    def delete_images(
        self, item_id: str, image_ids: Iterable[str], expected: Mapping[str, int | None] = _ANY_VERSION
    ) -> int:
        """Removes images of an item that stays; unknown ones are ignored. Answers the newest change."""
        with self._writing() as change:
            self._check_versions(expected)
            self._remove_named(item_id, image_ids, change)
        return self.read.change()

    def _remove_named(self, item_id: str, image_ids: Iterable[str], change: int) -> None:
        query = "SELECT images.key FROM images JOIN items ON item = items.key WHERE items.id = ? AND images.id = ?"
        for image_id in image_ids:
            self._remove_images([key for (key,) in self._db.execute(query, (item_id, image_id))], change)

    def _remove_images(self, keys: list[int], change: int) -> None:
        for key in keys:
            self._db.execute("INSERT INTO removed VALUES (?, ?)", (change, key))
            query = "UPDATE items SET change = ? WHERE key = (SELECT item FROM images WHERE key = ?)"
            self._db.execute(query, (change, key))
            (digest,) = self._db.execute("DELETE FROM images WHERE key = ? RETURNING digest", (key,)).fetchone()
            self._db.execute(
                "DELETE FROM thumbnails WHERE digest = ? AND NOT EXISTS (SELECT 1 FROM images WHERE digest = ?)",
                (digest, digest),
            )

    # Bundles and generations

    def set_generation(self, bundle: int, generation: str | None, change: int) -> None:
        """Names the newest generation of a bundle, and forgets the removals that no reader can miss."""
        with self._transaction():
            # One generation back for this bundle: a reader that has not yet opened the new one can still follow.
            # The others count as they are: whoever opens one of them must learn what went since it was built.
            oldest = self._count(
                "SELECT min(generation_change) FROM bundles WHERE generation IS NOT NULL OR key = ?", bundle
            )
            self._db.execute(
                "UPDATE bundles SET generation = ?, generation_change = ? WHERE key = ?", (generation, change, bundle)
            )
            query = "UPDATE counters SET value = ? WHERE name = 'forgotten' AND value < ?"
            if self._db.execute(query, (oldest, oldest)).rowcount:
                self._db.execute("DELETE FROM removed WHERE change <= ?", (oldest,))

    def set_current(self, bundle: int) -> None:
        """Makes a bundle the live one, with its generation."""
        with self._transaction():
            self._db.execute("UPDATE current SET previous = bundle, bundle = ? WHERE bundle IS NOT ?", (bundle, bundle))

    def drop_bundle(self, bundle: int) -> None:
        """Removes a bundle and its vectors; it must not be the live one."""
        with self._transaction():
            self._db.execute("UPDATE current SET previous = NULL WHERE previous = ?", (bundle,))
            self._db.execute("DELETE FROM vectors WHERE bundle = ?", (bundle,))
            self._db.execute("DELETE FROM bundles WHERE key = ?", (bundle,))
