"""The item store in one SQLite file, and copies of the bundles next to it.

It is the only source of truth: vector indexes are derived from it and can be rebuilt.
"""

import json
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from os.path import samestat
from pathlib import Path
from types import MappingProxyType

from index._util.deadline import deadline
from index._util.files import create_directory
from index._util.system import exclusive_lock
from index.embedding.bundle import CARD_FILE, MODEL_FILE, README_FILE, Bundle
from index.errors import LookalikeError
from index.gallery.errors import RESTORE, StoreError, TooManyAttributes, TooManyImages, VersionConflict
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow
from index.gallery.store.rankings import RankingTable
from index.gallery.store.rows import (
    check_digest,
    check_vector,
    find_expired,
    format_attributes,
    pack_vector,
)
from index.gallery.store.schema import EXPIRY, HAS_EXPIRY, PAGE_BYTES, prepare
from index.gallery.store.sqlite_connection import (
    BUSY_SECONDS,
    connect,
    file_errors,
    is_read_only,
    log_of,
    transaction,
)
from index.gallery.store.sqlite_jobs import JOBS_FILE, LOCK_FILE, SQLiteJobs
from index.gallery.store.sqlite_reader import SQLiteReader
from index.gallery.store.wal import find_damage, keep_damaged_log, kept_logs
from index.gallery.types import Item, NewImage
from index.items import MAX_ATTRIBUTE_NAMES, MAX_IMAGES_PER_ITEM
from index.rankings import Ranking, StoredRanking

STORE_FILE = "catalogue.sqlite"
BUNDLES = "bundles"
BUNDLE_FILES = (MODEL_FILE, CARD_FILE, README_FILE)
_MAX_LOG_BYTES = 32 << 20
"""The size up to which the write-ahead log may grow while writes follow each other without a pause."""
_ANY_VERSION: Mapping[str, int | None] = MappingProxyType({})
_NO_IMAGES: Mapping[str, Iterable[str]] = MappingProxyType({})


class SQLiteStore:
    """A store in a folder. Any thread may call any method.

    Writes, the change log and other reads have a connection each: none waits for another.
    """

    def __init__(self, directory: Path, settings: GallerySettings | None = None) -> None:
        with file_errors(directory):
            create_directory(directory)
        self._settings = settings or GallerySettings()
        self._directory = directory
        self.path = path = directory / STORE_FILE
        self.jobs = SQLiteJobs(directory)
        self._lock = threading.RLock()
        # Two processes that create the file would disturb each other; one that exists needs no lock.
        with nullcontext() if _has_content(path) else exclusive_lock(directory / LOCK_FILE):
            check_not_emptied(directory)
            is_new = not path.exists()
            try:
                self._open()
            except StoreError:
                if is_new:
                    path.unlink(missing_ok=True)
                raise

    def _open(self) -> None:
        with file_errors(self.path):
            lost = keep_damaged_log(self.path, PAGE_BYTES)
        with ExitStack() as opened:
            self._db = opened.enter_context(closing(connect(self.path)))
            prepare(self._db)
            self.watch = opened.enter_context(closing(SQLiteReader(self.path)))
            self.read = opened.enter_context(closing(SQLiteReader(self.path)))
            self.read.head()  # fails if the file is a database of another program, or damaged
            opened.pop_all()
        self._db.action = "written"
        self._opened_file = self.path.stat()
        if lost:
            self.checkpoint(idle=True)  # the rest of the damaged log must not be found again

    @property
    def is_read_only(self) -> bool:
        return is_read_only(self.path)

    @property
    def can_record_indexes(self) -> bool:
        return not self.is_read_only

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
        # One deadline for both waits: another thread may hold the lock while it waits for another process.
        with deadline(BUSY_SECONDS), self._lock:
            self.check()
            with transaction(self._db):
                yield

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
                self._prune_removals()

    def _prune_removals(self) -> None:
        """Forgets the oldest removals: without a limit they would grow with every item that comes and goes."""
        query = "SELECT revision FROM removed ORDER BY revision DESC, image DESC LIMIT 1 OFFSET ?"
        for (revision,) in self._db.execute(query, (self._settings.listed_removals,)).fetchall():
            self._forget(revision)

    def _forget(self, revision: int) -> None:
        """Removes the removals up to a revision from the list."""
        query = "UPDATE counters SET value = ? WHERE name = 'forgotten' AND value < ?"
        if self._db.execute(query, (revision, revision)).rowcount:
            self._db.execute("DELETE FROM removed WHERE revision <= ?", (revision,))

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
        activate_first: bool = True,
    ) -> int:
        with self._writing() as write:
            self._check_versions(expected)
            for item_id, image_ids in without.items():
                self._remove_named(item_id, image_ids, write.revision)
            has_images = False
            for item, images in entries:
                self._store_entry(item, images, bundle_id, write.revision)
                has_images = has_images or bool(images)
            if activate_first and has_images:
                query = "UPDATE active SET bundle = (SELECT key FROM bundles WHERE id = ?) WHERE bundle IS NULL"
                self._db.execute(query, (bundle_id,))
        return write.revision

    def _store_entry(self, item: Item, images: Sequence[NewImage], bundle_id: str, revision: int) -> None:
        key = self._store_item(item, revision)
        new = [
            image.id
            for image in images
            if self._store_image(key, image, self._bundle(bundle_id, image, revision), revision)
        ]
        count = self._count("SELECT count(*) FROM images WHERE item = ?", key) if new else 0
        if count > MAX_IMAGES_PER_ITEM:
            raise TooManyImages(item.id, count, new[MAX_IMAGES_PER_ITEM - count :])

    def _check_versions(self, expected: Mapping[str, int | None]) -> None:
        for item_id, version in expected.items():
            row = self._db.execute("SELECT revision FROM items WHERE id = ?", (item_id,)).fetchone()
            if (row[0] if row else None) != version:
                raise VersionConflict(item_id)

    def _store_item(self, item: Item, revision: int) -> int:
        content = (item.title, item.url, format_attributes(item.attributes))
        found = self._db.execute("SELECT key, title, url, attributes FROM items WHERE id = ?", (item.id,)).fetchone()
        self._rename_attributes(item, found[3] if found else "{}")
        if found is None:
            query = "INSERT INTO items (id, title, url, attributes, revision) VALUES (?, ?, ?, ?, ?) RETURNING key"
            return self._count(query, item.id, *content, revision)
        if found[1:] != content:
            query = "UPDATE items SET title = ?, url = ?, attributes = ?, revision = ? WHERE key = ?"
            self._db.execute(query, (*content, revision, found[0]))
        key: int = found[0]
        return key

    def _rename_attributes(self, item: Item, stored: str) -> None:
        """Counts the names that an item gains and loses; refuses a new one beyond the limit."""
        old = json.loads(stored).keys()
        self._drop_names(old - item.attributes.keys())
        query = "INSERT INTO attribute_names VALUES (?, 1) ON CONFLICT DO UPDATE SET items = items + 1 RETURNING items"
        new = [name for name in item.attributes.keys() - old if self._count(query, name) == 1]
        if new and self._count("SELECT count(*) FROM attribute_names") > MAX_ATTRIBUTE_NAMES:
            raise TooManyAttributes(item.id, min(new))

    def _drop_names(self, names: Iterable[str]) -> None:
        for name in names:
            self._db.execute("UPDATE attribute_names SET items = items - 1 WHERE name = ?", (name,))
            self._db.execute("DELETE FROM attribute_names WHERE name = ? AND items = 0", (name,))

    def _bundle(self, bundle_id: str, image: NewImage, revision: int) -> int:
        """Returns the bundle's key."""
        row = self._db.execute("SELECT key, dimension FROM bundles WHERE id = ?", (bundle_id,)).fetchone()
        dimension = check_vector(image, bundle_id, row[1] if row else None)
        if row:
            key: int = row[0]
            return key
        # The key of a dropped bundle is never used again: followers would mix its vectors with those of the next.
        self._db.execute("INSERT INTO bundles (key, id, dimension) VALUES (?, ?, ?)", (revision, bundle_id, dimension))
        return revision

    def _store_image(self, item: int, image: NewImage, bundle: int, revision: int) -> bool:
        """Returns whether the item had no image of this id."""
        check_digest(image)
        found = self._db.execute(
            "SELECT key, digest FROM images WHERE item = ? AND id = ?", (item, image.id)
        ).fetchone()
        is_new = found is None
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
        self._db.execute(
            "INSERT INTO vectors VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET revision = excluded.revision, "
            "vector = excluded.vector WHERE vector <> excluded.vector",
            (bundle, key, revision, pack_vector(image)),
        )
        return is_new

    def delete(self, item_ids: Iterable[str], *, expected: Mapping[str, int | None] = _ANY_VERSION) -> int:
        with self._writing() as write:
            self._check_versions(expected)
            self._remove_items(item_ids, write.revision)
        return write.revision

    def delete_expired(self, instant: int, limit: int) -> int:
        query = f"SELECT id, attributes FROM items WHERE {HAS_EXPIRY} AND {EXPIRY} <= ? ORDER BY {EXPIRY} LIMIT ?"
        with self._writing() as write:
            expired = find_expired(lambda *values: self._db.execute(query, values).fetchall(), instant, limit)
            self._remove_items(expired, write.revision)
        return len(expired)

    def _remove_items(self, item_ids: Iterable[str], revision: int) -> None:
        for item_id in item_ids:
            images = "SELECT images.key FROM images JOIN items ON item = items.key WHERE items.id = ?"
            self._remove_images([key for (key,) in self._db.execute(images, (item_id,))], revision)
            query = "DELETE FROM items WHERE id = ? RETURNING attributes"
            for (attributes,) in self._db.execute(query, (item_id,)).fetchall():
                self._drop_names(json.loads(attributes))

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

    # Rankings

    def put_ranking(
        self,
        name: str,
        ranking: Ranking,
        *,
        expected: Mapping[str, int | None] = _ANY_VERSION,
        stored: float | None = None,
    ) -> StoredRanking:
        with self._writing() as write:
            return self._rankings.put(name, ranking, revision=write.revision, expected=expected, stored=stored)

    def delete_ranking(self, name: str, *, expected: Mapping[str, int | None] = _ANY_VERSION) -> bool:
        with self._writing():
            return self._rankings.delete(name, expected)

    @property
    def _rankings(self) -> RankingTable:
        return RankingTable(lambda query, values: self._db.execute(query, values).fetchall(), "?")

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
            self._forget(oldest)

    def set_active(self, bundle: BundleRow) -> None:
        with self._transaction():
            if not self._count("SELECT count(*) FROM bundles WHERE key = ?", bundle.key):
                raise LookalikeError(f"Bundle {bundle.id} was dropped meanwhile.", "Index with it again.")
            query = "UPDATE active SET previous = bundle, bundle = ? WHERE bundle IS NOT ?"
            self._db.execute(query, (bundle.key, bundle.key))

    def drop_bundle(self, bundle: BundleRow) -> None:
        with self._transaction():
            if self._count("SELECT count(*) FROM active WHERE bundle = ?", bundle.key):
                raise LookalikeError(
                    f"Bundle {bundle.id} is active.", "Activate another one first: lookalike gallery activate."
                )
            self._db.execute("UPDATE active SET previous = NULL WHERE previous = ?", (bundle.key,))
            self._db.execute("DELETE FROM vectors WHERE bundle = ?", (bundle.key,))
            self._db.execute("DELETE FROM bundles WHERE key = ?", (bundle.key,))
        shutil.rmtree(self._directory / BUNDLES / bundle.id, ignore_errors=True)

    def keep_bundle(self, bundle: Bundle) -> None:
        copy = self._directory / BUNDLES / bundle.id
        with file_errors(copy):
            bundle.copy_to(copy)

    def has_bundle(self, bundle_id: str) -> bool:
        return (self._directory / BUNDLES / bundle_id).exists()

    def load_bundle(self, bundle_id: str) -> Bundle:
        return Bundle.load(self._directory / BUNDLES / bundle_id)

    # The files as such

    def problems(self) -> list[str]:
        return self.read.problems()

    def lost_writes(self) -> list[str]:
        damages = {copy.name: find_damage(copy, PAGE_BYTES) for copy in kept_logs(self.path)}
        return [
            f"Up to {damage.commits:,} acknowledged writes were lost with the damaged log {name}"
            for name, damage in damages.items()
            if damage
        ]

    def check(self) -> None:
        opened = self._opened_file
        with file_errors(self.path, "read"), suppress(FileNotFoundError):
            found = self.path.stat()
            if samestat(opened, found) and found.st_size >= opened.st_size:  # SQLite never shrinks it
                self._opened_file = found
                return
        problem = f"{self.path.name} was deleted, replaced or cut while it was open."
        raise StoreError(problem, f"{RESTORE} Then restart.")

    def probe(self) -> None:
        self.check()
        with closing(connect(self.path, "read")) as connection:
            connection.execute("PRAGMA busy_timeout = 1000")
            connection.execute("SELECT count(*) FROM active, counters").fetchone()

    def checkpoint(self, *, idle: bool) -> None:
        size = _file_bytes(log_of(self.path))
        if not size or self.is_read_only or (not idle and size < _MAX_LOG_BYTES):
            return
        # A connection of its own, which never waits. What the first statement has copied, while others write, the
        # second one, for which they would have to wait, need not copy.
        with closing(connect(self.path)) as connection:
            connection.execute("PRAGMA busy_timeout = 0")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def files(self, folder: Path) -> dict[str, Path]:
        copy = folder / STORE_FILE
        self.read.copy_to(copy)
        names = [f"{BUNDLES}/{bundle.id}/{name}" for bundle in self.read.bundles() for name in BUNDLE_FILES]
        return {STORE_FILE: copy, **{name: path for name in names if (path := self._directory / name).is_file()}}

    def size(self) -> int:
        return _file_bytes(self.path) + _file_bytes(log_of(self.path))


def check_not_emptied(directory: Path) -> None:
    """Refuses a store without content in a gallery that had some: it would become an empty gallery."""
    others = [name for name in (BUNDLES, "generations", JOBS_FILE) if (directory / name).exists()]
    if others and not _has_content(directory / STORE_FILE):
        raise StoreError(
            f"{directory / STORE_FILE} is missing or empty, but {directory} has {' and '.join(others)}.",
            "Restore a snapshot: lookalike gallery restore; or re-index into a new folder.",
        )


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # whoever closes the store last removes its log
        return 0


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


class _Write:
    """The revision of a transaction that is being written."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
