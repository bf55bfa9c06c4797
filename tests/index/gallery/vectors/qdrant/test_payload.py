"""What points hold of attributes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.gallery.types import Attribute
from index.gallery.vectors.qdrant.payload import attribute_fields, field, parse_token, text_order, token

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(texts, texts)
def test_numbers_of_texts_are_in_the_order_of_the_texts(one: str, other: str) -> None:
    if one <= other:
        assert text_order(one) <= text_order(other) < 2**48
    assert (text_order(one) == text_order(other)) == (
        one.encode()[:6].ljust(6, b"\0") == other.encode()[:6].ljust(6, b"\0")
    )


@pytest.mark.parametrize("value", ["", "true", "5", "n5", 5, 0, -7.25, 1e300, 2**53, True, False])
def test_a_token_is_read_back_with_its_type(value: Attribute) -> None:
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
