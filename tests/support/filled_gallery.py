"""A gallery of synthetic vectors, filled without a model, for tests of operations on entire galleries."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from index.gallery import Gallery, open_gallery
from index.gallery.types import Item, NewImage

BUNDLE = "b" * 16
DIMENSION = 8


def vector(number: int) -> NDArray[np.float32]:
    """Returns the vector of image `number`, the same in every call."""
    numbers = np.random.default_rng(number).normal(size=DIMENSION).astype(np.float32)
    return numbers / np.linalg.norm(numbers)


def entry(number: int) -> tuple[Item, list[NewImage]]:
    """Returns item `number` with its two images."""
    item = Item(
        id=f"item-{number:05}",
        title=f"Möbel {number}",
        url=f"https://shop.example/{number}",
        attributes={"price": number / 4, "colour": ("red", "blue")[number % 2], "new": number % 3 == 0},
    )
    names = {"front": 2 * number, "back": 2 * number + 1}
    return item, [NewImage(name, f"{one:064x}", vector(one), b"jpeg %d" % one) for name, one in names.items()]


def fill(directory: Path, *, items: int = 20, later: int = 0) -> Path:
    """Creates a gallery with a generation of the first items; `later` more items and a deletion are its delta."""
    gallery: Gallery = open_gallery(directory, create=True)
    gallery.upsert([entry(number) for number in range(items)], BUNDLE)
    gallery.activate(BUNDLE)
    if later:
        gallery.upsert([entry(number) for number in range(items, items + later)], BUNDLE)
        gallery.delete_images("item-00003", ["back"])
        item, _ = entry(5)
        gallery.upsert([(item.model_copy(update={"title": "Renamed"}), [])], BUNDLE)
    gallery.close()
    return directory
