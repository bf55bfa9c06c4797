"""The item store in one SQLite file, and copies of the bundles next to it.

It is the only source of truth: vector indexes are derived from it and can be rebuilt.
"""

import json
import re
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType

import numpy as np

from index._util.files import create_directory
from index._util.system import exclusive_lock
from index.embedding.bundle import CARD_FILE, MODEL_FILE, README_FILE, Bundle
from index.errors import LookalikeError
from index.gallery.errors import StoreError, VersionConflict
from index.gallery.store.base import BundleRow
from index.gallery.store.schema import connect, prepare, store_error, transaction
from index.gallery.store.sqlite_jobs import JOBS_FILE, LOCK_FILE, SQLiteJobs
from index.gallery.store.sqlite_reader import SQLiteReader
from index.gallery.types import Item, NewImage

STORE_FILE = "catalogue.sqlite"
BUNDLES = "bundles"
BUNDLE_FILES = (MODEL_FILE, CARD_FILE, README_FILE)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ANY_VERSION: Mapping[str, int | None] = MappingProxyType({})
_NO_IMAGES: Mapping[str, Iterable[str]] = MappingProxyType({})


class SQLiteStore:
    """A store in a folder. Any thread may call any method.

    Writes, the change log and other reads have a connection each: none waits for another.
    """

    def __init__(self, directory: Path) -> None:
        create_directory(directory)
        self._directory = directory
        self.path = path = directory / STORE_FILE
        self.jobs = SQLiteJobs(directory)
        self._lock = threading.RLock()
        # Two processes that create the file would disturb each other; one that exists needs no lock.
        with nullcontext() if _has_content(path) else exclusive_lock(directory / LOCK_FILE):
            self._check_not_emptied()
            is_new = not path.exists()
            try:
                self._db = connect(path)
                prepare(self._db, path)
                self.watch = SQLiteReader(path)
                self.read = SQLiteReader(path)
            except sqlite3.DatabaseError as error:
                if is_new:
                    path.unlink(missing_ok=True)
                remedy = "Restore it from a snapshot."
                if isinstance(error, sqlite3.OperationalError):  # the file itself may be intact
                    remedy = "Check the permissions of its folder and the free space; if it is locked, wait and retry."
                raise StoreError(f"{path} cannot be opened: {error}.", remedy) from None

    def _check_not_emptied(self) -> None:
        """Refuses a store without content in a gallery that had some: it would become an empty gallery."""
        others = [name for name in (BUNDLES, "generations", JOBS_FILE) if (self._directory / name).exists()]
        if others and not _has_content(self.path):
            raise StoreError(
                f"{self.path} is missing or empty, but {self._directory} has {' and '.join(others)}.",
                "Restore a snapshot: lookalike gallery restore; or re-index into a new folder.",
            )

    def close(self) -> None:
        self.watch.close()
        self.read.close()
        self.jobs.close()
        with self._lock:
            self._db.close()

    @contextmanager
    def open_reader(self) -> Iterator[SQLiteReader]:
        reader = SQLiteReader(self.path)
        try:
            with reader.instant():
                yield reader
        finally:
            reader.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._lock, transaction(self._db):
                yield
        except sqlite3.OperationalError as error:
            raise store_error(self.path, error) from error

    @contextmanager
    def _writing(self) -> Iterator["_Write"]:
        """Runs a transaction with its revision, which becomes the gallery's only if something changed."""
        with self._transaction():
            before = self._db.total_changes
            write = _Write(self._count("SELECT value + 1 FROM counters WHERE name = 'revision'"))
            yield write
            if self._db.total_changes == before:
                write.revision -= 1
            else:
                self._db.execute("UPDATE counters SET value = ? WHERE name = 'revision'", (write.revision,))

    def _count(self, query: str, *values: object) -> int:
        count: int = self._db.execute(query, values).fetchone()[0]
        return count

    # Items and images

    def upsert(
        self,
        entries: Iterable[tuple[Item, Sequence[NewImage]]],
        bundle_id: str,
        *,
        expected: Mapping[str, int | None] = _ANY_VERSION,
        without: Mapping[str, Iterable[str]] = _NO_IMAGES,
    ) -> int:
        with self._writing() as write:
            self._check_versions(expected)
            for item, images in entries:
                key = self._store_item(item, write.revision)
                for image in images:
                    self._store_image(key, image, self._bundle(bundle_id, image, write.revision), write.revision)
            for item_id, image_ids in without.items():
                self._remove_named(item_id, image_ids, write.revision)
        return write.revision

    def _check_versions(self, expected: Mapping[str, int | None]) -> None:
        for item_id, version in expected.items():
            row = self._db.execute("SELECT revision FROM items WHERE id = ?", (item_id,)).fetchone()
            if (row[0] if row else None) != version:
                raise VersionConflict(item_id)

    def _store_item(self, item: Item, revision: int) -> int:
        attributes = json.dumps(item.attributes, sort_keys=True, ensure_ascii=False, allow_nan=False)
        content = (item.title, item.url, attributes)
        found = self._db.execute("SELECT key, title, url, attributes FROM items WHERE id = ?", (item.id,)).fetchone()
        if found is None:
            query = "INSERT INTO items (id, title, url, attributes, revision) VALUES (?, ?, ?, ?, ?) RETURNING key"
            return self._count(query, item.id, *content, revision)
        if found[1:] != content:
            query = "UPDATE items SET title = ?, url = ?, attributes = ?, revision = ? WHERE key = ?"
            self._db.execute(query, (*content, revision, found[0]))
        key: int = found[0]
        return key

    def _bundle(self, bundle_id: str, image: NewImage, revision: int) -> int:
        """Returns the bundle's key; the first bundle of a gallery becomes the active one."""
        row = self._db.execute("SELECT key, dimension FROM bundles WHERE id = ?", (bundle_id,)).fetchone()
        shape = np.shape(image.vector)
        # Also rejects NaN: every comparison with it is false.
        storable = bool((np.abs(image.vector) <= np.finfo(np.float16).max).all())
        if len(shape) != 1 or not shape[0] or (row and shape[0] != row[1]) or not storable:
            wanted = f"({row[1]},)" if row else "(n,)"
            raise StoreError(
                f"Image {image.id!r} has a vector of shape {shape}; bundle {bundle_id} makes finite ones of {wanted}.",
                "Embed it with this bundle.",
            )
        if row:
            key: int = row[0]
            return key
        # The key of a dropped bundle is never used again: followers would mix its vectors with those of the next.
        self._db.execute("INSERT INTO bundles (key, id, dimension) VALUES (?, ?, ?)", (revision, bundle_id, shape[0]))
        self._db.execute("UPDATE active SET bundle = ? WHERE bundle IS NULL", (revision,))
        return revision

    def _store_image(self, item: int, image: NewImage, bundle: int, revision: int) -> None:
        if not _DIGEST.fullmatch(image.digest):
            raise StoreError(
                f"Image {image.id!r} has the digest {image.digest[:80]!r}.", "Pass the SHA-256 of its bytes, in hex."
            )
        found = self._db.execute(
            "SELECT key, digest FROM images WHERE item = ? AND id = ?", (item, image.id)
        ).fetchone()
        if found and found[1] != image.digest:
            # Another photo with the same id: the old vectors, of every bundle, are removed with the old key.
            self._remove_images([found[0]], revision)
            found = None
        if found is None:
            query = "INSERT INTO images (item, id, digest) VALUES (?, ?, ?) RETURNING key"
            key = self._count(query, item, image.id, image.digest)
            self._db.execute("UPDATE items SET revision = ? WHERE key = ?", (revision, item))
            self._db.execute("INSERT OR IGNORE INTO thumbnails VALUES (?, ?)", (image.digest, image.thumbnail))
        else:
            key = found[0]
        # Half precision: what the exact index stores, so a score is the same before and after a compaction.
        vector = np.asarray(image.vector, "<f2").tobytes()
        self._db.execute(
            "INSERT INTO vectors VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET revision = excluded.revision, "
            "vector = excluded.vector WHERE vector <> excluded.vector",
            (bundle, key, revision, vector),
        )

    def delete(self, item_ids: Iterable[str], *, expected: Mapping[str, int | None] = _ANY_VERSION) -> int:
        with self._writing() as write:
            self._check_versions(expected)
            for item_id in item_ids:
                images = "SELECT images.key FROM images JOIN items ON item = items.key WHERE items.id = ?"
                self._remove_images([key for (key,) in self._db.execute(images, (item_id,))], write.revision)
                self._db.execute("DELETE FROM items WHERE id = ?", (item_id,))
        return write.revision

    def _remove_named(self, item_id: str, image_ids: Iterable[str], revision: int) -> None:
        query = "SELECT images.key FROM images JOIN items ON item = items.key WHERE items.id = ? AND images.id = ?"
        for image_id in image_ids:
            self._remove_images([key for (key,) in self._db.execute(query, (item_id, image_id))], revision)

    def _remove_images(self, keys: list[int], revision: int) -> None:
        for key in keys:
            self._db.execute("INSERT INTO removed VALUES (?, ?)", (revision, key))
            query = "UPDATE items SET revision = ? WHERE key = (SELECT item FROM images WHERE key = ?)"
            self._db.execute(query, (revision, key))
            (digest,) = self._db.execute("DELETE FROM images WHERE key = ? RETURNING digest", (key,)).fetchone()
            self._db.execute(
                "DELETE FROM thumbnails WHERE digest = ? AND NOT EXISTS (SELECT 1 FROM images WHERE digest = ?)",
                (digest, digest),
            )

    # Bundles

    def set_index(self, bundle: int, name: str | None, revision: int) -> None:
        with self._transaction():
            # This bundle's last index counts too: a follower that has not yet opened the new one can still catch up.
            # Others count as they are: whoever opens one of them must learn what was removed since it was built.
            oldest = self._count(
                "SELECT min(index_revision) FROM bundles WHERE index_name IS NOT NULL OR key = ?", bundle
            )
            self._db.execute(
                "UPDATE bundles SET index_name = ?, index_revision = ? WHERE key = ?", (name, revision, bundle)
            )
            query = "UPDATE counters SET value = ? WHERE name = 'forgotten' AND value < ?"
            if self._db.execute(query, (oldest, oldest)).rowcount:
                self._db.execute("DELETE FROM removed WHERE revision <= ?", (oldest,))

    def set_active(self, bundle: BundleRow) -> None:
        with self._transaction():
            if not self._count("SELECT count(*) FROM bundles WHERE key = ?", bundle.key):
                raise LookalikeError(f"Bundle {bundle.id} was dropped meanwhile.", "Index with it again.")
            query = "UPDATE active SET previous = bundle, bundle = ? WHERE bundle IS NOT ?"
            self._db.execute(query, (bundle.key, bundle.key))

    def drop_bundle(self, bundle: BundleRow) -> None:
        with self._transaction():
            if self._count("SELECT count(*) FROM active WHERE bundle = ?", bundle.key):
                raise LookalikeError(f"Bundle {bundle.id} is active.", "Activate another one first.")
            self._db.execute("UPDATE active SET previous = NULL WHERE previous = ?", (bundle.key,))
            self._db.execute("DELETE FROM vectors WHERE bundle = ?", (bundle.key,))
            self._db.execute("DELETE FROM bundles WHERE key = ?", (bundle.key,))
        shutil.rmtree(self._directory / BUNDLES / bundle.id, ignore_errors=True)

    def keep_bundle(self, bundle: Bundle) -> None:
        bundle.copy_to(self._directory / BUNDLES / bundle.id)

    def has_bundle(self, bundle_id: str) -> bool:
        return (self._directory / BUNDLES / bundle_id).exists()

    def load_bundle(self, bundle_id: str) -> Bundle:
        return Bundle.load(self._directory / BUNDLES / bundle_id)

    # The files as such

    def problems(self) -> list[str]:
        return self.read.problems()

    def files(self, folder: Path) -> dict[str, Path]:
        copy = folder / STORE_FILE
        self.read.copy_to(copy)
        names = [f"{BUNDLES}/{bundle.id}/{name}" for bundle in self.read.bundles() for name in BUNDLE_FILES]
        return {STORE_FILE: copy, **{name: path for name in names if (path := self._directory / name).is_file()}}

    def size(self) -> int:
        return sum(path.stat().st_size for path in self._directory.glob(f"{STORE_FILE}*"))


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


class _Write:
    """The revision of a transaction that is being written."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
