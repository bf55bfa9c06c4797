"""What a source has named so far in one run: each image once, each item as it was first described."""

import sqlite3
from typing import NamedTuple, Self

from index.gallery.types import Item
from index.ingest.sources import SourceImage
from index.ingest.workers import Outcome, Reject, Unchanged


class Again(NamedTuple):
    """An image that the source named before, and what becomes of it."""

    image: SourceImage
    outcome: Outcome


class Seen:
    """What the source named so far; on disk, since a source may name more than memory holds.

    What it says first holds: an item whose rows differ would otherwise change with each of them, in every run, and two
    photos of one name would replace each other and be embedded again.
    """

    def __enter__(self) -> Self:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("CREATE TABLE items (id TEXT PRIMARY KEY, item TEXT)")
        self._db.execute("CREATE TABLE images (item TEXT, image TEXT, place TEXT, PRIMARY KEY (item, image))")
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def sorted_out(self, chunk: list[SourceImage]) -> tuple[list[SourceImage], list[Again]]:
        """Those that are named for the first time, and the others with what becomes of them."""
        new: list[SourceImage] = []
        again: list[Again] = []
        self._db.execute("BEGIN")
        for named in chunk:
            image = named._replace(item=self._item(named.item))
            first = self._place(image)
            if first is None:
                new.append(image)
            elif first == image.place:
                again.append(Again(image, Unchanged(image.image_id)))
            else:
                problem = (
                    f"The source names this image before, at {first}. Give each photo of an item its own image_id."
                )
                again.append(Again(image, Reject(image.item.id, image.image_id, image.place, "duplicate", problem)))
        self._db.execute("COMMIT")
        return new, again

    def _place(self, image: SourceImage) -> str | None:
        """Where the image was first said to lie; none if it is told now."""
        key = (image.item.id, image.image_id)
        if self._db.execute("INSERT OR IGNORE INTO images VALUES (?, ?, ?)", (*key, image.place)).rowcount:
            return None
        (place,) = self._db.execute("SELECT place FROM images WHERE item = ? AND image = ?", key).fetchone()
        return str(place)

    def _item(self, item: Item) -> Item:
        """As the source first described it."""
        text = item.model_dump_json()
        if self._db.execute("INSERT OR IGNORE INTO items VALUES (?, ?)", (item.id, text)).rowcount:
            return item
        (first,) = self._db.execute("SELECT item FROM items WHERE id = ?", (item.id,)).fetchone()
        return item if first == text else Item.model_validate_json(first)

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return self._db.execute("SELECT 1 FROM images WHERE item = ? AND image = ?", pair).fetchone() is not None

    def has_item(self, item_id: str) -> bool:
        return self._db.execute("SELECT 1 FROM items WHERE id = ?", (item_id,)).fetchone() is not None
