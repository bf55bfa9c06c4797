"""Fixtures: a shop whose items are variants of products, with dates and margins."""

from datetime import UTC, datetime, timedelta

import pytest

from index.gallery import Gallery
from index.gallery.types import Item, NewImage
from tests.index.gallery.reference import BUNDLE, ReferenceGallery, Shop, make_entries

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def make_variants(count: int) -> list[tuple[Item, list[NewImage]]]:
    """Returns items of which up to three, not always similar ones, belong to one product."""
    entries = []
    for number, (item, images) in enumerate(make_entries(count)):
        own = {
            **({"parent": f"product {number % (count // 3)}"} if number % 5 else {}),
            **({"margin": number % 13 / 13} if number % 4 else {}),
            "sizes": ("S", "M", "L")[number % 3 : number % 4] or "one",
            "ratings": (number % 6, number % 7 + 0.5),
            "added": (NOW - timedelta(days=number * 7 % 100)).date().isoformat(),
        }
        entries.append((item.model_copy(update={"attributes": {**item.attributes, **own}}), images))
    return entries


def fill_shop(gallery: Gallery, count: int = 150) -> Shop:
    """Returns a shop with an index of half of its items, of which some were changed since."""
    entries = make_variants(count)
    changed = [
        (item.model_copy(update={"attributes": {**item.attributes, "parent": "changed", "stock": 9}}), ())
        for item, _ in entries[: count // 2 : 17]
    ]
    gallery.upsert(entries[: count // 2], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert(entries[count // 2 :], BUNDLE)
    gallery.upsert(changed, BUNDLE)
    reference = ReferenceGallery(entries)
    reference.upsert(changed)
    return Shop(gallery, reference, entries[7][1][0].vector)


@pytest.fixture
def variants(gallery: Gallery) -> Shop:
    return fill_shop(gallery)
