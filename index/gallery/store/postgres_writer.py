"""The statements of a transaction that writes items and images: a few per block, however many images it has."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from index.gallery.errors import TooManyAttributes, TooManyImages, VersionConflict
from index.gallery.store.postgres_connection import Connection
from index.gallery.store.postgres_schema import EXPIRY, HAS_EXPIRY
from index.gallery.store.rankings import RankingTable
from index.gallery.store.rows import (
    check_digest,
    check_vector,
    find_expired,
    format_attributes,
    pack_vector,
)
from index.gallery.types import Item, NewImage
from index.items import MAX_ATTRIBUTE_NAMES, MAX_IMAGES_PER_ITEM

Entry = tuple[Item, Sequence[NewImage]]
_BLOCK_IMAGES = 1024
"""Images that are written at a time: it bounds the memory."""
_BLOCK_ITEMS = 1024


class _Image(NamedTuple):
    """An image to store, of an item with a key."""

    item: int
    image: NewImage


class Writer:
    """Writes items and images as one revision; the transaction's owner holds the lock of the state's row."""

    def __init__(self, connection: Connection, revision: int) -> None:
        self._connection = connection
        self.revision = revision
        self.changes = 0
        """Rows that were changed."""
        self.has_removed = False

    def _all(self, query: str, **values: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, values).fetchall()

    def change(self, query: str, **values: object) -> int:
        """Runs a statement and returns the number of rows that it changed."""
        count = self._connection.execute(query, values, binary=True).rowcount
        self.changes += count
        return count

    def check_versions(self, expected: Mapping[str, int | None]) -> None:
        if not expected:
            return
        rows = self._all("SELECT id, revision FROM items WHERE id = ANY(%(ids)s)", ids=list(expected))
        found: dict[str, int] = dict(rows)
        for item_id, version in expected.items():
            if found.get(item_id) != version:
                raise VersionConflict(item_id)

    @property
    def rankings(self) -> RankingTable:
        def run(query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
            rows = self._connection.execute(query, values).fetchall()
            self.changes += len(rows) * (not query.startswith("SELECT"))
            return rows

        return RankingTable(run, "%s")

    # Items and images

    def upsert(self, entries: Iterable[Entry], bundle_id: str) -> bool:
        """Stores items and images; returns whether there were any images."""
        has_images = False
        for block in _blocks(entries):
            keys = self._store_items([item for item, _ in block])
            has_images = self._store_images(block, keys, bundle_id) or has_images
        return has_images

    def _store_items(self, items: Sequence[Item]) -> dict[str, int]:
        """Returns item id to key."""
        query = "SELECT id, key, title, url, attributes FROM items WHERE id = ANY(%(ids)s)"
        found = {row[0]: row[1:] for row in self._all(query, ids=[item.id for item in items])}
        contents = {item.id: (item.title, item.url, format_attributes(item.attributes)) for item in items}
        self._rename_attributes([(item, found[item.id][3] if item.id in found else "{}") for item in items])
        keys: dict[str, int] = {item_id: row[0] for item_id, row in found.items()}
        changed = [item_id for item_id, row in found.items() if row[1:] != contents[item_id]]
        if changed:
            query = (
                "UPDATE items SET title = new.title, url = new.url, attributes = new.attributes, "
                "revision = %(revision)s FROM unnest(%(keys)s::bigint[], %(titles)s::text[], %(urls)s::text[], "
                "%(attributes)s::text[]) AS new (key, title, url, attributes) WHERE items.key = new.key"
            )
            values = _columns([contents[item_id] for item_id in changed], "titles", "urls", "attributes")
            self.change(query, revision=self.revision, keys=[keys[item_id] for item_id in changed], **values)
        new = [item_id for item_id in contents if item_id not in found]
        if new:
            # Ordered, so that keys grow in the order of the entries.
            query = (
                "INSERT INTO items (id, title, url, attributes, revision) "
                "SELECT id, title, url, attributes, %(revision)s FROM unnest(%(ids)s::text[], %(titles)s::text[], "
                "%(urls)s::text[], %(attributes)s::text[]) WITH ORDINALITY AS new (id, title, url, attributes, number) "
                "ORDER BY number RETURNING id, key"
            )
            values = _columns([contents[item_id] for item_id in new], "titles", "urls", "attributes")
            inserted = self._all(query, revision=self.revision, ids=new, **values)
            self.changes += len(inserted)
            keys.update(inserted)
        return keys

    def _rename_attributes(self, items: Sequence[tuple[Item, str]]) -> None:
        """Counts the names that items gain and lose; refuses a new one beyond the limit."""
        gained: Counter[str] = Counter()
        steps: list[tuple[Item, set[str], set[str]]] = []
        for item, stored in items:
            old = json.loads(stored).keys()
            lost, new = old - item.attributes.keys(), item.attributes.keys() - old
            if lost or new:
                steps.append((item, lost, new))
        names = sorted({name for _, lost, new in steps for name in lost | new})
        if not names:
            return
        query = "SELECT name, items FROM attribute_names WHERE name = ANY(%(names)s)"
        counts: Counter[str] = Counter(dict(self._all(query, names=names)))
        ((total,),) = self._all("SELECT count(*) FROM attribute_names")
        for item, lost, new in steps:
            for name in lost:
                counts[name] -= 1
                total -= counts[name] == 0
            first = [name for name in new if counts[name] == 0]
            counts.update(new)
            gained.update(new)
            gained.subtract(lost)
            total += len(first)
            if first and total > MAX_ATTRIBUTE_NAMES:
                raise TooManyAttributes(item.id, min(first))
        self._count_names(gained)

    def _count_names(self, gained: Mapping[str, int]) -> None:
        """Adds to the number of items that have each name, and forgets those that none has."""
        moved = {name: count for name, count in gained.items() if count}
        if not moved:
            return
        self.change(
            "INSERT INTO attribute_names (name, items) SELECT * FROM unnest(%(names)s::text[], %(counts)s::bigint[]) "
            "ON CONFLICT (name) DO UPDATE SET items = attribute_names.items + excluded.items",
            names=list(moved),
            counts=list(moved.values()),
        )
        lost = [name for name, count in moved.items() if count < 0]
        if lost:
            self.change("DELETE FROM attribute_names WHERE name = ANY(%(names)s) AND items = 0", names=lost)

    def _store_images(self, block: Sequence[Entry], keys: Mapping[str, int], bundle_id: str) -> bool:
        # The last one of several with the same id counts.
        wanted = {(keys[item.id], image.id): image for item, images in block for image in images}
        if not wanted:
            return False
        bundle = self._bundle([image for _, images in block for image in images], bundle_id)
        query = "SELECT item, id, key, digest FROM images WHERE item = ANY(%(items)s)"
        found = {row[:2]: row[2:] for row in self._all(query, items=list({item for item, _ in wanted}))}
        self._check_counts(block, keys, Counter(item for item, _ in found), found)
        # Another photo with the same id: the old vectors, of every bundle, are removed with the old key.
        replaced = [
            found[name][0] for name, image in wanted.items() if name in found and found[name][1] != image.digest
        ]
        self.remove_images(replaced)
        image_keys: dict[tuple[int, str], int] = {
            name: key for name, (key, _) in found.items() if key not in set(replaced)
        }
        new = {name: image for name, image in wanted.items() if name not in image_keys}
        if new:
            image_keys.update(self._insert_images(new))
        vectors = [(image_keys[name], pack_vector(image)) for name, image in wanted.items()]
        self.change(
            "INSERT INTO vectors SELECT %(bundle)s, image, %(revision)s, vector "
            "FROM unnest(%(images)s::bigint[], %(vectors)s::bytea[]) AS new (image, vector) "
            "ON CONFLICT (bundle, image) DO UPDATE SET revision = excluded.revision, vector = excluded.vector "
            "WHERE vectors.vector <> excluded.vector",
            bundle=bundle,
            revision=self.revision,
            **_columns(vectors, "images", "vectors"),
        )
        return True

    def _insert_images(self, new: Mapping[tuple[int, str], NewImage]) -> dict[tuple[int, str], int]:
        query = (
            "INSERT INTO images (item, id, digest) SELECT item, id, digest "
            "FROM unnest(%(items)s::bigint[], %(ids)s::text[], %(digests)s::text[]) "
            "WITH ORDINALITY AS new (item, id, digest, number) ORDER BY number RETURNING item, id, key"
        )
        rows = [(item, name, image.digest) for (item, name), image in new.items()]
        inserted = self._all(query, **_columns(rows, "items", "ids", "digests"))
        self.changes += len(inserted)
        self._touch_items([item for item, _ in new])
        self.change(
            "INSERT INTO thumbnails SELECT * FROM unnest(%(digests)s::text[], %(jpegs)s::bytea[]) "
            "ON CONFLICT DO NOTHING",
            **_columns([(image.digest, image.thumbnail) for image in new.values()], "digests", "jpegs"),
        )
        return {(item, name): key for item, name, key in inserted}

    def _check_counts(
        self,
        block: Sequence[Entry],
        keys: Mapping[str, int],
        counts: Counter[int],
        found: Mapping[tuple[int, str], Any],
    ) -> None:
        for item, images in block:
            key = keys[item.id]
            new = list(dict.fromkeys(image.id for image in images if (key, image.id) not in found))
            count = counts[key] + len(new)
            if new and count > MAX_IMAGES_PER_ITEM:
                raise TooManyImages(item.id, count, new[MAX_IMAGES_PER_ITEM - count :])

    def _bundle(self, images: Sequence[NewImage], bundle_id: str) -> int:
        """Returns the key of the bundle, after checking that the images fit it."""
        rows = self._all("SELECT key, dimension FROM bundles WHERE id = %(id)s", id=bundle_id)
        key, dimension = rows[0] if rows else (None, None)
        for image in images:
            dimension = check_vector(image, bundle_id, dimension)
            check_digest(image)
        if key is None:
            # The key of a dropped bundle is never used again: followers would mix its vectors with those of the next.
            key = self.revision
            query = "INSERT INTO bundles (key, id, dimension) VALUES (%(key)s, %(id)s, %(dimension)s)"
            self.change(query, key=key, id=bundle_id, dimension=dimension)
        return int(key)

    def _touch_items(self, keys: Sequence[int]) -> None:
        query = "UPDATE items SET revision = %(revision)s WHERE key = ANY(%(keys)s) AND revision < %(revision)s"
        self.change(query, revision=self.revision, keys=list(set(keys)))

    # Removals

    def remove_named(self, images: Iterable[tuple[str, str]]) -> None:
        """Removes images by item id and image id."""
        query = (
            "SELECT images.key FROM unnest(%(items)s::text[], %(ids)s::text[]) AS gone (item, id) "
            "JOIN items ON items.id = gone.item JOIN images ON images.item = items.key AND images.id = gone.id"
        )
        pairs = list(dict.fromkeys(images))
        if pairs:
            self.remove_images([key for (key,) in self._all(query, **_columns(pairs, "items", "ids"))])

    def remove_items(self, item_ids: Iterable[str]) -> None:
        found = self._all("SELECT key, attributes FROM items WHERE id = ANY(%(ids)s)", ids=list(item_ids))
        if not found:
            return
        keys = [key for key, _ in found]
        images = self._all("SELECT key FROM images WHERE item = ANY(%(keys)s)", keys=keys)
        self.remove_images([key for (key,) in images])
        self.change("DELETE FROM items WHERE key = ANY(%(keys)s)", keys=keys)
        lost = Counter(name for _, attributes in found for name in json.loads(attributes))
        self._count_names({name: -count for name, count in lost.items()})

    def remove_expired(self, instant: int, limit: int) -> int:
        query = (
            f'SELECT id, attributes FROM items WHERE {HAS_EXPIRY} AND ({EXPIRY}) COLLATE "C" <= %(until)s '
            f'ORDER BY ({EXPIRY}) COLLATE "C" LIMIT %(limit)s'
        )
        expired = find_expired(lambda until, count: self._all(query, until=until, limit=count), instant, limit)
        self.remove_items(expired)
        return len(expired)

    def remove_images(self, keys: Sequence[int]) -> None:
        if not keys:
            return
        self.has_removed = True
        query = "INSERT INTO removed SELECT %(revision)s, image FROM unnest(%(keys)s::bigint[]) AS gone (image)"
        self.change(query, revision=self.revision, keys=list(keys))
        rows = self._all("DELETE FROM images WHERE key = ANY(%(keys)s) RETURNING item, digest", keys=list(keys))
        self.changes += len(rows)
        self._touch_items([item for item, _ in rows])
        self.change(
            "DELETE FROM thumbnails WHERE digest = ANY(%(digests)s) "
            "AND NOT EXISTS (SELECT 1 FROM images WHERE digest = thumbnails.digest)",
            digests=list({digest for _, digest in rows}),
        )


def _columns(rows: Sequence[tuple[Any, ...]], *names: str) -> dict[str, list[Any]]:
    """Returns rows as one list per column, to be passed as arrays."""
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _blocks(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Divides entries into blocks, none of which has an item twice."""
    block: list[Entry] = []
    seen: set[str] = set()
    count = 0
    for item, images in entries:
        if item.id in seen or count >= _BLOCK_IMAGES or len(block) >= _BLOCK_ITEMS:
            yield block
            block, seen, count = [], set(), 0
        block.append((item, images))
        seen.add(item.id)
        count += len(images)
    if block:
        yield block
