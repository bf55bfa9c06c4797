"""What points hold of attributes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.gallery.store.base import ImageRow
from index.gallery.vectors.qdrant.payload import (
    attribute_fields,
    field,
    make_point,
    parse_token,
    read_record,
    text_order,
    token,
)
from index.items import Item, Value

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(texts, texts)
def test_numbers_of_texts_are_in_the_order_of_the_texts(one: str, other: str) -> None:
    if one <= other:
        assert text_order(one) <= text_order(other) < 2**48
    assert (text_order(one) == text_order(other)) == (
        one.encode()[:6].ljust(6, b"\0") == other.encode()[:6].ljust(6, b"\0")
    )


@pytest.mark.parametrize("value", ["", "true", "5", "n5", 5, 0, -7.25, 1e300, 2**53, True, False])
def test_a_token_is_read_back_with_its_type(value: Value) -> None:
    found = parse_token(token(value))
    assert (found == value and type(found) is type(value)) or (isinstance(value, float) and found == value)


def test_equal_numbers_have_one_token_and_other_types_have_others() -> None:
    assert token(5) == token(5.0) and token(0) == token(-0.0)
    assert len({token(1), token(True), token("1"), token("true")}) == 4


def test_fields_of_odd_names_are_distinct() -> None:
    names = ["colour", "a.b", "a b", 'quote"', "a[0]", "x-612e62", "ä", "x_612e62"]
    assert len({field("v", name) for name in names}) == len(names)
    assert all(set(field("v", name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for name in names)


def test_fields_depend_on_the_types_of_values() -> None:
    found = set(attribute_fields({"price": 5, "name": "mug", "sale": True}))
    assert found == {("v", "price"), ("n", "price"), ("v", "name"), ("t", "name"), ("v", "sale")}
    found = set(attribute_fields({"sizes": ("S", 38, True), "since": "2026-11-19"}))
    assert found == {
        ("v", "sizes"), ("n", "sizes"), ("t", "sizes"), ("v", "since"), ("t", "since"), ("d", "since")
    }  # fmt: skip


def test_a_point_has_lists_of_the_values_of_lists() -> None:
    item = Item(id="mug", attributes={"sizes": ("S", 38, True), "since": ("2026-11-19", "soon"), "one": ("S",)})
    point = make_point(ImageRow(7, 3, "front", "0" * 64, b""), item, [1.0], is_first=True)
    payload = point.payload
    assert [value.string_value for value in payload["l"].list_value.values] == ["sizes", "since"]
    fields = {kind: payload[kind].struct_value.fields for kind in "vntd"}
    assert [value.string_value for value in fields["v"]["sizes"].list_value.values] == ["tS", "n38", "btrue"]
    assert fields["v"]["one"].string_value == "tS"
    assert {name: value.double_value for name, value in fields["n"].items()} == {"sizes": 38.0}
    assert {name: value.double_value for name, value in fields["d"].items()} == {"since": 1795046400.0}
    assert read_record(point.payload).parse()[0] == item
