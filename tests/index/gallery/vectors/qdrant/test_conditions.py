"""Filters on a real cluster return exactly what `Filter.matches` accepts."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from index.gallery import Gallery
from index.gallery.filters import Filter, value_type
from index.gallery.types import Item
from index.items import Attribute, Value, values_of
from tests.index.gallery.reference import BUNDLE, photo, unit
from tests.support.qdrant import open_gallery_on

pytestmark = pytest.mark.slow

LONG = "z" * 4096
VALUES: list[Value] = [
    0, 1, -1, 5, 5.5, 20, 19.999999999999996, 20.000000000000004, 0.1 + 0.2, 1e300, -1e-300, 3.141592653589793e-20,
    2**53, 1 / 3, True, False, "", "1", "true", "red", "redder", "reddish", "reddish brown", "reddish blue", "Red",
    "r\0d", "äpfel", "\N{SNOWMAN}", "\U0001f600", LONG, "2026-11-19", "2026-11-19T01:00+01:00",
    "2026-11-19T00:00:00.000001Z", "2026-11-18T23:59:59.999999Z", "0001-01-01", "9999-12-31T23:59:59.999999Z",
]  # fmt: skip
DATES = VALUES[-6:]
NAMES = ["plain", "a.b", 'odd "name"', "a[0]", "\N{SNOWMAN}"]
BOUNDS = [value for value in VALUES if not isinstance(value, bool)]
NUMBERS = [value for value in BOUNDS if not isinstance(value, str)]
TEXTS = [value for value in BOUNDS if isinstance(value, str) and value not in DATES]


def draw_attribute(random: np.random.Generator) -> Attribute:
    """Returns a value or, as often, a list of up to five."""
    if random.random() < 0.5:
        return VALUES[random.integers(len(VALUES))]
    values = (VALUES[at] for at in random.integers(len(VALUES), size=random.integers(1, 6)))
    return tuple(value for value in values if value != LONG)  # too long for a list


@pytest.fixture(scope="module")
def items() -> list[Item]:
    random = np.random.default_rng(3)
    found = []
    for number in range(400):
        attributes = {name: draw_attribute(random) for name in NAMES if random.random() < 0.7}
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
        match random.integers(6):
            case 0:
                return {name: VALUES[random.integers(len(VALUES))]}
            case 1:
                return {name: [VALUES[at] for at in random.integers(len(VALUES), size=3)]}
            case 2:
                return {name: {"exists": bool(random.integers(2))}}
            case 3:
                return {name: {"all": [VALUES[at] for at in random.integers(len(VALUES), size=2)]}}
            case 4:
                comparison = ("gte", "gt", "lte", "lt")[random.integers(4)]
                return {name: {comparison: BOUNDS[random.integers(len(BOUNDS))]}}
            case _:
                low = BOUNDS[random.integers(len(BOUNDS))]
                same = next(kind for kind in (NUMBERS, TEXTS, DATES) if low in kind)
                lower, upper = ("gt", "gte")[random.integers(2)], ("lt", "lte")[random.integers(2)]
                return {name: {lower: low, upper: same[random.integers(len(same))]}}

    for _ in range(120):
        yield condition()
        yield {"not": condition()}
        yield {**condition(), "not": [condition(), {**condition(), "not": condition()}]}
        yield {"any": [condition(), {**condition(), "not": condition()}, {"not": {"any": [condition(), condition()]}}]}


def test_filters_return_what_matches(gallery: Gallery, items: list[Item]) -> None:
    documents = list(make_documents())
    for document in documents:
        wanted = Filter.parse(document)
        hits = gallery.search(unit(1, 0, 0, 0)[None], bundle_id=BUNDLE, top=1000, filter=wanted).hits[0]
        expected = sorted(item.id for item in items if wanted.matches(item.attributes))
        assert sorted(hit.item.id for hit in hits) == expected, document
    assert len(documents) == 480


def test_facets_count_the_items_that_have_a_value(gallery: Gallery, items: list[Item]) -> None:
    documents: list[dict[str, object]] = [
        {},
        {"plain": {"gt": 5, "lte": 20}},
        {"a.b": {"gt": "2026-11-19", "lt": "2026-11-20"}},
        {"any": [{"plain": {"all": [1, "red"]}}, {"not": {"a[0]": {"gte": 5}}}]},
    ]
    for document in documents:
        wanted = Filter.parse(document)
        expected = Counter(
            (value_type(value), value)
            for item in items
            if wanted.matches(item.attributes)
            for value in values_of(item.attributes.get("plain"))
        )
        (facet,) = gallery.facets(1000, ["plain"], filter=wanted)
        assert {(value_type(value), value): count for value, count in facet.values} == expected, document


def test_hints_see_names_and_types(gallery: Gallery) -> None:
    assert gallery.filter_hints(Filter.parse({"a.b": "mauve", "plain": 17})) == []
    (hint,) = gallery.filter_hints(Filter.parse({"colour": "red"}))
    assert hint.startswith("No searchable item has the attribute 'colour'")
