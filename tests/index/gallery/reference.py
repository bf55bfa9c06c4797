"""The reference that galleries are compared with: an exhaustive search over items in memory."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery import Gallery, IndexStats
from index.gallery.expiry import current_instant, is_expired
from index.gallery.filters import Filter
from index.gallery.types import Hit, Item, NewImage

BUNDLE = "b" * 16
OTHER_BUNDLE = "c" * 16
TOLERANCE = 2e-6
"""Scores are rounded to millionths, and the order of a sum may change the last digit: so close, two may swap."""

Vector = NDArray[np.float32]


def unit(*numbers: float) -> Vector:
    """Returns a vector of length one."""
    vector = np.array(numbers, np.float32)
    return vector / np.linalg.norm(vector)


def photo(name: str, vector: Vector, content: int | None = None) -> NewImage:
    """Returns an image; `content` numbers its bytes and so decides the digest, by default derived from the vector."""
    number = content if content is not None else int.from_bytes(vector.tobytes()[:24], "big")
    return NewImage(name, f"{number:064x}", vector, f"jpeg of {number}".encode())


class Expected(NamedTuple):
    """An item that a search should return, with its score."""

    id: str
    score: float


class ReferenceGallery:
    """Items and the half-precision vectors of their images, for one bundle."""

    def __init__(self, entries: Iterable[tuple[Item, Sequence[NewImage]]] = ()) -> None:
        self.items: dict[str, Item] = {}
        self.images: dict[str, dict[str, NewImage]] = {}
        self.upsert(entries)

    def upsert(self, entries: Iterable[tuple[Item, Sequence[NewImage]]]) -> None:
        for item, images in entries:
            self.items[item.id] = item
            self.images.setdefault(item.id, {}).update({image.id: image for image in images})

    def delete(self, item_ids: Iterable[str]) -> None:
        for item_id in item_ids:
            self.items.pop(item_id, None)
            self.images.pop(item_id, None)

    def delete_images(self, item_id: str, image_ids: Iterable[str]) -> None:
        for image_id in image_ids:
            self.images.get(item_id, {}).pop(image_id, None)

    def shown(self, item_id: str) -> Item | None:
        """Returns an item that exists and has not expired."""
        item = self.items.get(item_id)
        return None if item is None or is_expired(item.attributes, current_instant()) else item

    def delete_expired(self) -> bool:
        """Removes what has expired; returns whether something has."""
        expired = [item_id for item_id in self.items if not self.shown(item_id)]
        self.delete(expired)
        return bool(expired)

    def scores(self, item_id: str, queries: NDArray[np.float32]) -> dict[str, float]:
        """Returns image id to its cosine with the nearest query."""
        return {
            # Rounded to half precision, a vector may be longer than one; scores are clipped to one.
            name: min(1.0, float((queries.astype(np.float64) @ image.vector.astype(np.float16)).max()))
            for name, image in self.images[item_id].items()
        }

    def search(
        self, queries: NDArray[np.float32], *, filter: Filter | None = None, exclude: Sequence[str] = ()
    ) -> list[Expected]:
        """Returns all items that match and have not expired, best first."""
        found = [
            Expected(item.id, round(max(scores.values()), 6))
            for item in map(self.shown, self.items)
            if item and item.id not in exclude and (filter is None or filter.matches(item.attributes))
            if (scores := self.scores(item.id, queries))
        ]
        return sorted(found, key=lambda expected: -expected.score)

    def queries_of(self, item_id: str) -> NDArray[np.float32]:
        """Returns the query vectors of a search by the item."""
        return np.stack([image.vector.astype(np.float16).astype(np.float32) for image in self.images[item_id].values()])

    def check(
        self,
        hits: list[Hit],
        queries: NDArray[np.float32],
        *,
        top: int,
        filter: Filter | None = None,
        min_score: float | None = None,
        exclude: Sequence[str] = (),
    ) -> None:
        """Asserts that hits are the best items with their best images; items with nearly equal scores may swap."""
        wanted = self.search(queries, filter=filter, exclude=exclude)
        lowest = -np.inf if min_score is None else min_score
        required = [expected for expected in wanted if expected.score >= lowest + TOLERANCE]
        possible = [expected for expected in wanted if expected.score >= lowest - TOLERANCE]
        details = f"\nreturned: {hits}\nexpected: {wanted[: top + 3]}"
        assert min(top, len(required)) <= len(hits) <= min(top, len(possible)), details
        scores = dict(wanted)
        assert len({hit.item.id for hit in hits}) == len(hits), f"an item was returned twice{details}"
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True), details
        for hit, expected in zip(hits, wanted, strict=False):
            assert hit.item.id in scores, f"{hit.item.id} was deleted or does not match{details}"
            assert abs(hit.score - scores[hit.item.id]) <= TOLERANCE, details
            assert abs(hit.score - expected.score) <= TOLERANCE, details
            assert hit.item == self.items[hit.item.id], details
            best = self.scores(hit.item.id, queries)[hit.image.id]
            assert abs(hit.score - best) <= TOLERANCE, f"{hit.image.id} is not the best image{details}"
            assert hit.image.digest == self.images[hit.item.id][hit.image.id].digest, details


@cache
def make_entries(
    count: int, *, dimension: int = 8, images: int = 3, seed: int = 0
) -> list[tuple[Item, list[NewImage]]]:
    """Returns items in clusters, with one to `images` images each, and attributes of every type."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(12, dimension))
    colours = ("red", "green", "blue")
    entries = []
    for number in range(count):
        centre = centres[random.integers(len(centres))] + random.normal(size=dimension) * 0.4
        item = Item(
            id=f"item-{number:05d}",
            title=f"Product {number}",
            url=f"https://shop.example/{number}",
            attributes={
                "colour": colours[number % 3],
                "price": number % 50 + 0.5,
                "stock": number % 7,
                "sale": number % 4 == 0,
                **({"brand": "Acme"} if number % 5 == 0 else {}),
            },
        )
        views = [centre + random.normal(size=dimension) * 0.1 for _ in range(random.integers(1, images + 1))]
        entries.append((item, [photo(f"view-{view}", unit(*vector)) for view, vector in enumerate(views)]))
    return entries


MUG = Item(id="mug", title="A mug", url="https://shop.example/mug", attributes={"price": 5.5})
SHOE, BAG = Item(id="shoe"), Item(id="bag")
TRIO: list[tuple[Item, Sequence[NewImage]]] = [
    (MUG, [photo("front", unit(1, 0, 0), 1)]),
    (SHOE, [photo("left", unit(0, 1, 0), 2), photo("right", unit(0, 1, 0.2), 3)]),
    (BAG, [photo("open", unit(0.6, 0.6, 0.5), 4)]),
]


@dataclass
class Shop:
    """A gallery with many items, and the reference with the same items."""

    gallery: Gallery
    reference: ReferenceGallery
    query: Vector

    def check(
        self,
        *,
        top: int = 10,
        filter: Filter | None = None,
        min_score: float | None = None,
        exclude: Sequence[str] = (),
    ) -> list[Hit]:
        """Searches both, compares the results and returns the hits."""
        found = self.gallery.search(
            self.query[None], bundle_id=BUNDLE, top=top, filter=filter, min_score=min_score, exclude=exclude
        )
        self.reference.check(
            found.hits[0], self.query[None], top=top, filter=filter, min_score=min_score, exclude=exclude
        )
        return found.hits[0]


def search_ids(gallery: Gallery, *numbers: float, top: int = 10) -> list[str]:
    """Returns the ids of the items that a search with a vector finds."""
    found = gallery.search(unit(*numbers)[None], bundle_id=BUNDLE, top=top)
    return [hit.item.id for hit in found.hits[0]]


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for a condition that a background thread fulfils; a minute is far more than it takes."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.02)


def index_stats(gallery: Gallery) -> IndexStats:
    """Returns the index of the gallery's statistics, which must have one."""
    index = gallery.stats().index
    assert index
    return index
