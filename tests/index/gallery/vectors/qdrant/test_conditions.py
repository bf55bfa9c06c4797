"""Filters on a real cluster return exactly what `Filter.matches` accepts."""

from collections.abc import Iterator

import numpy as np
import pytest

from index.gallery import Gallery
from index.gallery.filters import Filter
from index.gallery.types import Attribute, Item
from tests.index.gallery.reference import BUNDLE, photo, unit
from tests.support.qdrant import open_gallery_on

pytestmark = pytest.mark.slow

VALUES: list[Attribute] = [
    0, 1, -1, 5, 5.5, 20, 19.999999999999996, 20.000000000000004, 0.1 + 0.2, 1e300, -1e-300, 3.141592653589793e-20,
    2**53, 1 / 3, True, False, "", "1", "true", "red", "redder", "reddish", "reddish brown", "reddish blue", "Red",
    "r\0d", "äpfel", "\N{SNOWMAN}", "\U0001f600", "z" * 4096,
]  # fmt: skip
NAMES = ["plain", "a.b", 'odd "name"', "a[0]", "\N{SNOWMAN}"]
BOUNDS = [value for value in VALUES if not isinstance(value, bool)]


@pytest.fixture(scope="module")
def items() -> list[Item]:
    random = np.random.default_rng(3)
    found = []
    for number in range(400):
        chosen = random.integers(len(VALUES), size=len(NAMES))
        attributes = {name: VALUES[at] for name, at in zip(NAMES, chosen, strict=True) if random.random() < 0.7}
        found.append(Item(id=f"{number}", attributes=attributes))
    return found


@pytest.fixture(scope="module")
def gallery(address: str, items: list[Item], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    with open_gallery_on(address, tmp_path_factory.mktemp("filters") / "gallery") as gallery:
        vectors = np.random.default_rng(4).normal(size=(len(items), 4))
        gallery.upsert([(item, [photo("one", unit(*it))]) for item, it in zip(items, vectors, strict=True)], BUNDLE)
        gallery.activate(BUNDLE)
        yield gallery


def make_documents() -> Iterator[dict[str, object]]:
    """Yields filters of every kind, some of them nested."""
    random = np.random.default_rng(5)

    def condition() -> dict[str, object]:
        name = NAMES[random.integers(len(NAMES))]
        match random.integers(5):
            case 0:
                return {name: VALUES[random.integers(len(VALUES))]}
            case 1:
                return {name: [VALUES[at] for at in random.integers(len(VALUES), size=3)]}
            case 2:
                return {name: {"exists": bool(random.integers(2))}}
            case 3:
                comparison = ("gte", "gt", "lte", "lt")[random.integers(4)]
                return {name: {comparison: BOUNDS[random.integers(len(BOUNDS))]}}
            case _:
                low = BOUNDS[random.integers(len(BOUNDS))]
                same = [value for value in BOUNDS if isinstance(value, str) == isinstance(low, str)]
                return {name: {"gt": low, "lte": same[random.integers(len(same))]}}

    for _ in range(120):
        yield condition()
        yield {"not": condition()}
        yield {**condition(), "not": [condition(), {**condition(), "not": condition()}]}


def test_filters_return_what_matches(gallery: Gallery, items: list[Item]) -> None:
    documents = list(make_documents())
    for document in documents:
        wanted = Filter.parse(document)
        hits = gallery.search(unit(1, 0, 0, 0)[None], bundle_id=BUNDLE, top=1000, filter=wanted).hits[0]
        expected = sorted(item.id for item in items if wanted.matches(item.attributes))
        assert sorted(hit.item.id for hit in hits) == expected, document
    assert len(documents) == 360


def test_hints_see_names_and_types(gallery: Gallery) -> None:
    assert gallery.filter_hints(Filter.parse({"a.b": "mauve", "plain": 17})) == []
    (hint,) = gallery.filter_hints(Filter.parse({"colour": "red"}))
    assert hint.startswith("No searchable item has the attribute 'colour'")
