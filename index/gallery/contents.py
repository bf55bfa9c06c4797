"""What a gallery holds, as two galleries of any engines are compared by it: item by item, and in one digest."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from pydantic import Field

from index._util.models import Frozen
from index.gallery.store.base import Head, ImageContent, StoreReader
from index.gallery.types import Item
from index.rankings import StoredRanking

_BLOCK_ITEMS = 512


class ItemOutline(NamedTuple):
    """An item with its images in their order; of vectors and thumbnails only the SHA-256."""

    item: Item
    images: list[ImageContent]

    @property
    def text(self) -> str:
        """The item as canonical JSON, where 1, 1.0 and true differ."""
        item = self.item
        return json.dumps([item.id, item.title, item.url, item.attributes], sort_keys=True, ensure_ascii=False)


class Contents(Frozen):
    """What a gallery holds at a revision."""

    revision: int
    items: int
    images: int
    vectors: dict[str, int] = Field(description="bundle id to its number of vectors")
    rankings: int = Field(default=0, description="versions of stored rankings")
    digest: str = Field(description="SHA-256 of items, images, vectors, thumbnails and rankings")
    active: str | None
    previous: str | None

    def has_content_of(self, other: "Contents") -> bool:
        """Whether both hold the same items, images, vectors, thumbnails and rankings."""
        return (self.digest, self.vectors) == (other.digest, other.vectors)

    def is_equal_to(self, other: "Contents") -> bool:
        """Whether the same bundles are active and previous, too; revisions may differ."""
        bundles = (self.active, self.previous) == (other.active, other.previous)
        return bundles and self.has_content_of(other)


def describe_version(stored: StoredRanking) -> str:
    """Returns a version of a ranking as text, without its number."""
    return json.dumps([stored.name, stored.stored, stored.ranking.model_dump_json(exclude_defaults=True)])


def read_outlines(reader: StoreReader) -> Iterator[ItemOutline]:
    """Yields all items in the order of their ids; reads some at a time."""
    after = ""
    while block := reader.items_after(after, _BLOCK_ITEMS):
        images = reader.image_contents([item.id for item in block], hashed=True)
        yield from (ItemOutline(item, images.get(item.id, [])) for item in block)
        after = block[-1].id


class Summary:
    """Counts and digests items that are added in the order of their ids."""

    def __init__(self, bundles: Collection[str]) -> None:
        """Of vectors only those of `bundles` count."""
        self._digest = hashlib.sha256()
        self._items = self._images = self._rankings = 0
        self._vectors = dict.fromkeys(bundles, 0)

    def add(self, outline: ItemOutline) -> None:
        self._items += 1
        self._images += len(outline.images)
        lines = [outline.text]
        for image in outline.images:
            lines.append(json.dumps([image.id, image.digest, image.thumbnail.hex()]))
            for name in sorted(image.vectors.keys() & self._vectors.keys()):
                self._vectors[name] += 1
                lines.append(f"{name} {image.vectors[name].hex()}")
        self._digest.update("\n".join([*lines, ""]).encode())

    def add_rankings(self, versions: Iterable[StoredRanking]) -> None:
        """Adds all versions of all rankings, after the items; their numbers are a gallery's own."""
        for one in versions:
            self._rankings += 1
            self._digest.update(f"{describe_version(one)}\n".encode())

    def contents(self, head: Head) -> Contents:
        """Returns what was added, of a gallery with this head."""
        return Contents(
            revision=head.revision,
            items=self._items,
            images=self._images,
            vectors=self._vectors,
            rankings=self._rankings,
            digest=self._digest.hexdigest(),
            active=head.bundle.id if head.bundle else None,
            previous=head.previous.id if head.previous else None,
        )


def summarize(
    reader: StoreReader, on_progress: Callable[[int], None], *, bundles: Collection[str] | None = None
) -> Contents:
    """Reads everything that a gallery holds, of all or some bundles, and returns counts and a digest."""
    summary = Summary([row.id for row in reader.bundles()] if bundles is None else bundles)
    images = 0
    for number, outline in enumerate(read_outlines(reader)):
        summary.add(outline)
        images += len(outline.images)
        if number % _BLOCK_ITEMS == 0:
            on_progress(images)
    summary.add_rankings(reader.ranking_versions())
    return summary.contents(reader.head())
