"""Hints about a filter that matches nothing, on every engine."""

from typing import Any

import pytest

from index.gallery import Gallery
from index.gallery.filters import Filter
from index.items import Attribute, Item
from tests.index.gallery.reference import BUNDLE, photo, unit

MISSING = "No searchable item has the attribute {!r}; the facets list those that exist."


@pytest.fixture
def shop(gallery: Gallery) -> Gallery:
    """One item in the index, one in the delta, and one that lost its attribute since the index was built."""
    front, back = [photo("front", unit(1, 0, 0))], [photo("back", unit(0, 1, 0))]
    gallery.upsert([(Item(id="cup", attributes={"price": 5, "colour": "red", "old": 1}), front)], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert([(Item(id="mug", attributes={"sale": True, "size": "L", "tags": ("new", 5)}), back)], BUNDLE)
    colour: dict[str, Attribute] = {"price": 5, "colour": "red", "since": "2026-11-19"}
    gallery.upsert([(Item(id="cup", attributes=colour), front)], BUNDLE)
    return gallery


@pytest.mark.parametrize(
    ("document", "hints"),
    [
        ({}, []),
        ({"price": 7, "colour": "blue", "size": "S", "sale": False}, []),
        ({"color": "red"}, [MISSING.format("color")]),
        ({"old": 1}, [MISSING.format("old")]),
        ({"old": {"exists": True}}, [MISSING.format("old")]),
        ({"old": {"exists": False}}, []),
        ({"size": 5}, ["The filter compares 'size' with numbers, but its values are texts."]),
        ({"sale": "true"}, ["The filter compares 'sale' with texts, but its values are true or false."]),
        ({"price": {"lt": "9"}}, ["The filter compares 'price' with texts, but its values are numbers."]),
        ({"price": ["5", 7]}, []),
        ({"a": 1, "b": 2}, [MISSING.format("a"), MISSING.format("b")]),
        ({"tags": ["new", 7], "price": {"all": [5, 6]}, "since": {"gt": "2026-01-01"}}, []),
        (
            {"tags": {"all": [True, False]}},
            ["The filter compares 'tags' with true or false, but its values are numbers and texts."],
        ),
        ({"size": {"gte": "2026-11-19"}}, ["The filter compares 'size' with dates, but its values are texts."]),
        ({"any": [{"price": 7}, {"color": "red"}]}, []),
        ({"any": [{"a": 1, "b": 2}, {"a": 2}]}, [MISSING.format("a"), MISSING.format("b")]),
    ],
)
def test_a_condition_that_no_item_can_meet_is_named(shop: Gallery, document: dict[str, Any], hints: list[str]) -> None:
    assert shop.filter_hints(Filter.parse(document)) == hints


def test_an_empty_gallery_has_no_hints(gallery: Gallery) -> None:
    assert gallery.filter_hints(Filter.parse({"colour": "red"})) == []
