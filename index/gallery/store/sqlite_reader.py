"""Reading the catalogue: one connection, its queries, and what they answer."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.store.schema import connect
from index.gallery.types import Item, StoredImage, StoredItem

_ROWS = 2048
"""Rows of a large result that are in memory at a time."""


class BundleRow(NamedTuple):
    """A bundle whose vectors the catalogue holds, and the generation built from them."""

    key: int
    id: str
    dimension: int
    generation: str | None
    generation_change: int


class Current(NamedTuple):
    """What is live at one instant."""

    change: int
    forgotten: int
    """Removals up to this change are no longer listed: a reader that has seen less starts again."""
    bundle: BundleRow | None
    previous: BundleRow | None


class ImageRow(NamedTuple):
    """An image with its vector for one bundle."""

    key: int
    item: int
    id: str
    digest: str
    vector: bytes


class Changes(NamedTuple):
    """What happened after a change number, as far as one bundle's vectors are concerned."""

    change: int
    forgotten: int
    """As of the same instant: a reader that had seen less has missed removals."""
    removed: list[int]
    images: list[ImageRow]
    items: dict[int, Item]
    """Items that changed, and those of the images."""


class WholeImage(NamedTuple):
    """All that the catalogue holds of an image for one bundle, its item included."""

    key: int
    item: int
    id: str
    digest: str
    vector: bytes
    item_id: str
    title: str
    url: str
    attributes: str


_MALFORMED = {
    "{} vectors are not of their bundle's dimension": (
        "SELECT count(*) FROM vectors JOIN bundles ON bundle = bundles.key "
        "WHERE typeof(vector) <> 'blob' OR length(vector) <> 2 * dimension"
    ),
    "{} items have attributes that are no JSON object": (
        "SELECT count(*) FROM items "
        "WHERE CASE WHEN json_valid(attributes) THEN json_type(attributes) <> 'object' ELSE 1 END"
    ),
    "{} images have a digest that is none": (
        "SELECT count(*) FROM images WHERE length(digest) <> 64 OR digest GLOB '*[^0-9a-f]*'"
    ),
    "{} images lack their small picture": (
        "SELECT count(*) FROM images WHERE NOT EXISTS (SELECT 1 FROM thumbnails WHERE digest = images.digest)"
    ),
    "{} rows belong to others that are gone": "SELECT count(*) FROM pragma_foreign_key_check",
    "{} rows have a change number that was never given": (
        "SELECT count(*) FROM (SELECT change FROM vectors UNION ALL SELECT change FROM items "
        "UNION ALL SELECT change FROM removed) WHERE change > (SELECT value FROM counters WHERE name = 'change')"
    ),
}
"""Rows that no write makes, and the query that counts them."""


class Reader:
    """One reading connection to a catalogue; threads take turns."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = connect(path)
        self._watched = self._db.cursor()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def instant(self) -> Iterator[None]:
        """Everything read within is of one instant, whatever is written meanwhile; within another it is that one."""
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

    def _number(self, query: str, *values: object) -> int:
        with self._lock:
            number: int = self._db.execute(query, values).fetchone()[0]
        return number

    def version(self) -> int:
        """Differs from the last answer whenever another connection has written: the cheapest look for news."""
        with self._lock:
            version: int = self._watched.execute("PRAGMA data_version").fetchone()[0]
        return version

    def change(self) -> int:
        """The number of the newest write."""
        return self._number("SELECT value FROM counters WHERE name = 'change'")

    def counts(self) -> tuple[int, int]:
        """Items and images."""
        return self._number("SELECT count(*) FROM items"), self._number("SELECT count(*) FROM images")

    def current(self) -> Current:
        """The live bundle and the counters."""
        query = (
            "SELECT (SELECT value FROM counters WHERE name = 'change'), "
            "(SELECT value FROM counters WHERE name = 'forgotten'), bundle, previous FROM current"
        )
        with self._lock:
            change, forgotten, bundle, previous = self._db.execute(query).fetchone()
            return Current(change, forgotten, self._bundle("key", bundle), self._bundle("key", previous))

    def bundle(self, bundle_id: str) -> BundleRow | None:
        """What the catalogue knows of a bundle."""
        return self._bundle("id", bundle_id)

    def bundles(self) -> list[BundleRow]:
        """All bundles with vectors."""
        query = "SELECT key, id, dimension, generation, generation_change FROM bundles ORDER BY key"
        return [BundleRow(*row) for row in self._all(query)]  # type: ignore[arg-type]

    def _bundle(self, column: str, value: object) -> BundleRow | None:
        query = f"SELECT key, id, dimension, generation, generation_change FROM bundles WHERE {column} = ?"
        with self._lock:
            row = self._db.execute(query, (value,)).fetchone()
        return BundleRow(*row) if row else None

    def changes(self, bundle: int, since: int) -> Changes:
        """What a reader that has seen the writes up to `since` must apply."""
        new = "vectors.bundle = ? AND vectors.change > ?"
        images = (
            "SELECT images.key, item, images.id, digest, vector FROM vectors JOIN images ON image = images.key "
            f"WHERE {new} ORDER BY images.key"
        )
        items = (
            "SELECT key, id, title, url, attributes FROM items WHERE change > ? UNION "
            "SELECT items.key, items.id, title, url, attributes FROM vectors JOIN images ON image = images.key "
            f"JOIN items ON item = items.key WHERE {new}"
        )
        with self.instant():
            return Changes(
                self.change(),
                self._number("SELECT value FROM counters WHERE name = 'forgotten'"),
                [key for (key,) in self._db.execute("SELECT image FROM removed WHERE change > ?", (since,))],
                [ImageRow(*row) for row in self._db.execute(images, (bundle, since))],
                {key: stored_item(*row) for key, *row in self._db.execute(items, (since, bundle, since))},
            )

    # Whole reads, for building a generation; to be called within one instant

    def image_count(self, bundle: int) -> int:
        """Images that have a vector of the bundle."""
        return self._number("SELECT count(*) FROM vectors WHERE bundle = ?", bundle)

    def images(self, bundle: int) -> Iterator[tuple[int, int, str, str, int]]:
        """Key, item, id, digest and the vector's change of each image of the bundle, by key."""
        query = (
            "SELECT images.key, item, images.id, digest, change FROM vectors JOIN images ON image = images.key "
            "WHERE bundle = ? ORDER BY image"
        )
        yield from self._db.execute(query, (bundle,))

    def items(self, bundle: int) -> Iterator[tuple[int, Item]]:
        """The items with at least one such image, by key."""
        # CROSS: SQLite keeps this order of the join, where it would walk all vectors again for every item.
        query = (
            "SELECT key, id, title, url, attributes FROM items WHERE EXISTS (SELECT 1 FROM images CROSS JOIN vectors "
            "ON image = images.key WHERE images.item = items.key AND bundle = ?) ORDER BY key"
        )
        for key, *row in self._db.execute(query, (bundle,)):
            yield key, stored_item(*row)

    def vectors(self, bundle: int, since: int, out: NDArray[np.float16]) -> None:
        """Fills `out` with the vectors that are newer than `since`, in the order of their images' keys."""
        # For all of them the condition on the change is left out: with it SQLite would sort them on disk.
        newer = "AND change > ?" if since else "AND ? = 0"
        query = f"SELECT vector FROM vectors WHERE bundle = ? {newer} ORDER BY image"
        rows, place = self._db.execute(query, (bundle, since)), 0
        while block := rows.fetchmany(_ROWS):
            joined = np.frombuffer(b"".join(vector for (vector,) in block), "<f2")
            out[place : place + len(block)] = joined.reshape(len(block), out.shape[1])
            place += len(block)

    # Single things

    def item(self, item_id: str) -> Item | None:
        with self._lock:
            row = self._db.execute("SELECT id, title, url, attributes FROM items WHERE id = ?", (item_id,)).fetchone()
        return stored_item(*row) if row else None

    def stored(self, item_id: str) -> StoredItem | None:
        """An item with its images and its version."""
        query = "SELECT key, change, id, title, url, attributes FROM items WHERE id = ?"
        with self.instant():
            row = self._db.execute(query, (item_id,)).fetchone()
            if row is None:
                return None
            images = self._db.execute("SELECT id, digest FROM images WHERE item = ? ORDER BY key", (row[0],))
            shown = [StoredImage.model_construct(id=name, digest=digest) for name, digest in images]
        return StoredItem(stored_item(*row[2:]), shown, row[1])

    def items_after(self, item_id: str, count: int) -> list[Item]:
        """Items in the order of their ids, beginning after one."""
        query = "SELECT id, title, url, attributes FROM items WHERE id > ? ORDER BY id LIMIT ?"
        with self._lock:
            return [stored_item(*row) for row in self._db.execute(query, (item_id, count))]

    def item_keys(self, item_ids: Sequence[str]) -> set[int]:
        """The keys of those items that exist."""
        with self._lock:
            return {
                key
                for item_id in item_ids
                for (key,) in self._db.execute("SELECT key FROM items WHERE id = ?", (item_id,))
            }

    def item_vectors(self, item_id: str, bundle: int) -> dict[str, NDArray[np.float32]]:
        """Image id to vector, of the item's images that have one of the bundle."""
        query = (
            "SELECT images.id, vector FROM items JOIN images ON item = items.key JOIN vectors ON image = images.key "
            "WHERE items.id = ? AND bundle = ? ORDER BY images.key"  # by `image` SQLite would read all vectors
        )
        with self._lock:
            rows = self._db.execute(query, (item_id, bundle)).fetchall()
        return {name: np.frombuffer(vector, "<f2").astype(np.float32) for name, vector in rows}

    def digests(self, item_id: str, bundle_id: str | None = None) -> dict[str, str]:
        """Image id to digest of an item's images; with a bundle, of those that have a vector of it."""
        query = "SELECT images.id, digest FROM items JOIN images ON item = items.key WHERE items.id = ?"
        values = [item_id]
        if bundle_id is not None:
            query += (
                " AND EXISTS (SELECT 1 FROM vectors JOIN bundles ON bundle = bundles.key "
                "WHERE image = images.key AND bundles.id = ?)"
            )
            values.append(bundle_id)
        with self._lock:
            return dict(self._db.execute(query + " ORDER BY images.key", values).fetchall())

    def known(self, item_ids: list[str], bundle_id: str) -> dict[tuple[str, str], str]:
        """Item and image id to digest, of the items' images that have a vector of the bundle."""
        query = (
            "SELECT images.id, digest FROM items JOIN images ON item = items.key JOIN vectors ON image = images.key "
            "WHERE items.id = ? AND bundle = (SELECT key FROM bundles WHERE id = ?)"
        )
        with self._lock:
            return {
                (item_id, image_id): digest
                for item_id in item_ids
                for image_id, digest in self._db.execute(query, (item_id, bundle_id))
            }

    def image_ids(self) -> Iterator[tuple[str, str]]:
        """Item and image id of every image, by item; within one instant."""
        query = "SELECT items.id, images.id FROM items JOIN images ON item = items.key ORDER BY items.id, images.id"
        yield from self._db.execute(query)

    def images_without(self, bundle_id: str) -> int:
        """Images that have no vector of a bundle."""
        with_one = "SELECT count(*) FROM vectors WHERE bundle = (SELECT key FROM bundles WHERE id = ?)"
        return self._number(f"SELECT (SELECT count(*) FROM images) - ({with_one})", bundle_id)

    def thumbnail(self, digest: str) -> bytes | None:
        with self._lock:
            row = self._db.execute("SELECT jpeg FROM thumbnails WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row else None

    def fault(self) -> str | None:
        """What SQLite's own check of the whole file finds wrong."""
        with self._lock:
            answer = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        return None if answer == "ok" else str(answer)

    def backup(self, path: Path) -> None:
        """A consistent copy of the whole catalogue, made while others write."""
        with self._lock:
            self._db.execute("VACUUM INTO ?", (str(path),))

    def malformed(self) -> list[str]:
        """Rows that are sound for SQLite, but that no write of ours makes: what is wrong with how many."""
        counts = {problem: self._number(query) for problem, query in _MALFORMED.items()}
        return [problem.format(f"{count:,}") for problem, count in counts.items() if count]

    def whole_images(self, bundle: int) -> Iterator[list[WholeImage]]:
        """All images of the bundle by key, in blocks; to be called within one instant."""
        query = (
            "SELECT images.key, item, images.id, digest, vector, items.id, title, url, attributes FROM vectors "
            "JOIN images ON image = images.key JOIN items ON item = items.key WHERE bundle = ? ORDER BY image"
        )
        rows = self._db.execute(query, (bundle,))
        while block := rows.fetchmany(_ROWS):
            yield [WholeImage(*row) for row in block]


def stored_item(item_id: str, title: str, url: str, attributes: str) -> Item:
    """An item as it was stored: it was checked then, so it is not checked again."""
    return Item.model_construct(id=item_id, title=title, url=url, attributes=json.loads(attributes))
