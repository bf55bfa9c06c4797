"""Decides which images of a source are embedded. This module holds the whole rule.

An image of a source is known by its item id and image id. It is embedded unless one of these holds, in this order:

1. The source named it before in this run. From the same place it counts as unchanged; from another place it is
   rejected as a duplicate. The first row wins, also for the title, URL and attributes of an item: otherwise rows that
   differ would replace each other in every run, and their photos would be embedded again each time.
2. The source named as many images of the item as an item may have. It is rejected.
3. The item has expired. It counts as unchanged: nothing would find its photos.
4. The gallery has a vector of the job's bundle for it, made from the same bytes (SHA-256). It is unchanged.

Only the last needs the photo's bytes, so the workers apply it (`is_unchanged`), to digests that were read beforehand.
"""

import sqlite3
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, Self

from index.gallery.expiry import current_instant, is_expired
from index.gallery.types import Item, NewImage
from index.ingest.sources import BadRow, SourceImage
from index.items import MAX_IMAGES_PER_ITEM

KnownDigests = Mapping[tuple[str, str], str]
"""Item id and image id to the digest of the photo that the gallery has a vector of."""


class Reject(NamedTuple):
    """A photo or a row of a table that could not be indexed, and why."""

    item_id: str
    image_id: str
    place: str
    reason: str
    problem: str

    @classmethod
    def of(cls, image: SourceImage, reason: str, problem: str) -> Self:
        return cls(image.item.id, image.image_id, image.place, reason, problem)

    @classmethod
    def of_row(cls, row: BadRow) -> Self:
        """Returns the reject of a row, whose place is the table and the line."""
        return cls(row.item_id, "", row.where, "row", f"{row.problem}. Correct the row.")


class Unchanged(NamedTuple):
    """A photo that the gallery already holds, byte for byte."""

    image_id: str


Outcome = NewImage | Unchanged | Reject


def is_unchanged(image: SourceImage, digest: str, known: KnownDigests) -> bool:
    """Returns whether the gallery has a vector of exactly these bytes for the image."""
    return known.get((image.item.id, image.image_id)) == digest


class SettledImage(NamedTuple):
    """An image that no worker needs to read, with its outcome."""

    image: SourceImage
    outcome: Unchanged | Reject


class PlannedChunk(NamedTuple):
    """A chunk of a source: the images to hand to a worker, with what the gallery has of them, and the others."""

    images: list[SourceImage]
    known: KnownDigests
    settled: list[SettledImage]


class EmbeddingPlan:
    """Applies the rule to a source, chunk by chunk, and keeps what the source named so far.

    That is kept in a temporary SQLite database: a source may name more images than fit in memory.
    """

    def __init__(self, read_digests: Callable[[str], Mapping[str, str]], *, cached_items: int = 1024) -> None:
        """`read_digests` returns image id to digest, of an item's images that have a vector of the job's bundle."""
        # The rows of an item mostly follow each other, but an item may have many photos all over a table.
        self._read_digests = lru_cache(cached_items)(read_digests)
        self._began = current_instant()

    def __enter__(self) -> Self:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("CREATE TABLE items (id TEXT PRIMARY KEY, item TEXT, images INTEGER DEFAULT 0)")
        self._db.execute("CREATE TABLE kept (item TEXT PRIMARY KEY)")
        self._db.execute("CREATE TABLE images (item TEXT, image TEXT, place TEXT, PRIMARY KEY (item, image))")
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def add(self, chunk: list[SourceImage]) -> PlannedChunk:
        """Records the images of a chunk as named, and returns what to do with each."""
        images: list[SourceImage] = []
        settled: list[SettledImage] = []
        self._db.execute("BEGIN")
        for row in chunk:
            image = row._replace(item=self._first_description(row.item))
            outcome = self._settle(image)
            if outcome is None:
                images.append(image)
            else:
                settled.append(SettledImage(image, outcome))
        self._db.execute("COMMIT")
        pairs = [(image.item.id, image.image_id) for image in images]
        known = {pair: digest for pair in pairs if (digest := self._read_digests(pair[0]).get(pair[1]))}
        return PlannedChunk(images, known, settled)

    def keep_item(self, item_id: str) -> None:
        """Records that the source names an item in a row that cannot be read: all it has must stay."""
        self._db.execute("INSERT OR IGNORE INTO kept VALUES (?)", (item_id,))

    def _settle(self, image: SourceImage) -> Unchanged | Reject | None:
        """Records the image; returns its outcome if that does not depend on its bytes."""
        first = self._first_place(image)
        if first == image.place:
            return Unchanged(image.image_id)
        if first is not None:
            problem = f"The source names this image twice, first at {first}. Give each photo its own image_id."
            return Reject.of(image, "duplicate", problem)
        query = "UPDATE items SET images = images + 1 WHERE id = ? RETURNING images"
        if self._db.execute(query, (image.item.id,)).fetchone()[0] > MAX_IMAGES_PER_ITEM:
            problem = f"The source names more than {MAX_IMAGES_PER_ITEM} images of this item. Remove some."
            return Reject.of(image, "limit", problem)
        return Unchanged(image.image_id) if is_expired(image.item.attributes, self._began) else None

    def _first_place(self, image: SourceImage) -> str | None:
        """Returns the place that the source named first for the image; None if it is named for the first time."""
        key = (image.item.id, image.image_id)
        if self._db.execute("INSERT OR IGNORE INTO images VALUES (?, ?, ?)", (*key, image.place)).rowcount:
            return None
        (place,) = self._db.execute("SELECT place FROM images WHERE item = ? AND image = ?", key).fetchone()
        return str(place)

    def _first_description(self, item: Item) -> Item:
        """Returns the item as the source described it first."""
        text = item.model_dump_json()
        if self._db.execute("INSERT OR IGNORE INTO items (id, item) VALUES (?, ?)", (item.id, text)).rowcount:
            return item
        (first,) = self._db.execute("SELECT item FROM items WHERE id = ?", (item.id,)).fetchone()
        return item if first == text else Item.model_validate_json(first)

    def has_image(self, item_id: str, image_id: str) -> bool:
        """Returns whether the source named the image, or must keep all of its item."""
        query = "SELECT 1 FROM images WHERE item = ? AND image = ? UNION SELECT 1 FROM kept WHERE item = ?"
        return self._db.execute(query, (item_id, image_id, item_id)).fetchone() is not None

    def has_item(self, item_id: str) -> bool:
        """Returns whether the source named the item."""
        query = "SELECT 1 FROM items WHERE id = ? UNION SELECT 1 FROM kept WHERE item = ?"
        return self._db.execute(query, (item_id, item_id)).fetchone() is not None
