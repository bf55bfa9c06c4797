"""Re-indexing beyond the limits of a gallery: what exceeds one is rejected, and everything else is indexed."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from index.embedding.bundle import Bundle
from index.gallery import open_gallery
from index.gallery.types import Item, NewImage
from index.items import MAX_ATTRIBUTE_NAMES, MAX_IMAGES_PER_ITEM, Attribute
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, index_source, tiny_photo


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_tiny_bundle(tmp_path / "bundle")


def write_rows(tmp_path: Path, **attributes: object) -> Path:
    """Writes a table with an item of each colour, of which the red one has these attributes."""
    for number, colour in enumerate(COLOURS):
        (tmp_path / f"{colour}.jpg").write_bytes(tiny_photo(number, 0))
    rows = [{"item_id": colour, "image": f"{colour}.jpg"} for colour in COLOURS]
    table = tmp_path / "catalogue.jsonl"
    table.write_text("\n".join(json.dumps(row | (attributes if row["item_id"] == "red" else {})) for row in rows))
    return table


def read_rejects(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "rejects.csv").open() as file:
        return list(csv.DictReader(file))


def fill(gallery: Path, bundle: Path, item: Item, images: int = 0) -> None:
    """Stores an item over the API, so to speak: it is not in the source."""
    card = Bundle.load(bundle).card
    vectors = np.eye(max(images, card.dimension), card.dimension, dtype=np.float32)
    new = [NewImage(f"api-{n}", f"{n:064x}", vectors[n % card.dimension], b"") for n in range(images)]
    with open_gallery(gallery, create=True) as opened:
        opened.upsert([(item, new)], card.id)


def test_images_that_exceed_the_limit_with_those_of_the_gallery_are_rejected(tmp_path: Path, bundle: Path) -> None:
    gallery = tmp_path / "gallery"
    fill(gallery, bundle, Item(id="red"), MAX_IMAGES_PER_ITEM - 1)
    source = write_rows(tmp_path, image=["red.jpg", "blue.jpg", "green.jpg"])
    record = index_source(source, gallery=gallery, bundle=bundle)
    assert (record.state, record.embedded, record.rejected) == ("partial", len(COLOURS), 2)
    assert [(row["item_id"], row["image_id"], row["reason"]) for row in read_rejects(tmp_path)] == [
        ("red", "blue.jpg", "limit"),
        ("red", "green.jpg", "limit"),
    ]
    with open_gallery(gallery) as opened:
        stored = opened.get_item("red")
        assert stored and len(stored.images) == MAX_IMAGES_PER_ITEM
        assert opened.stats().items == len(COLOURS)


def test_an_item_with_an_attribute_beyond_the_limit_is_rejected(tmp_path: Path, bundle: Path) -> None:
    gallery = tmp_path / "gallery"
    for start in range(0, MAX_ATTRIBUTE_NAMES, 250):
        names: dict[str, Attribute] = {f"name-{number}": 1 for number in range(start, start + 250)}
        fill(gallery, bundle, Item(id=f"api-{start}", attributes=names))
    record = index_source(write_rows(tmp_path, size="large"), gallery=gallery, bundle=bundle)
    assert (record.state, record.embedded, record.rejected) == ("partial", len(COLOURS) - 1, 1)
    (reject,) = read_rejects(tmp_path)
    assert (reject["item_id"], reject["reason"]) == ("red", "limit") and "'size'" in reject["problem"]
    with open_gallery(gallery) as opened:
        assert opened.get_item("red") is None and opened.get_item("blue")
