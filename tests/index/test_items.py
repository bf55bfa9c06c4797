"""Items: typed attributes, and limits that hold for every way in."""

import pytest
from pydantic import ValidationError

from index.items import (
    MAX_ATTRIBUTES,
    MAX_ID_LENGTH,
    MAX_INTEGER,
    MAX_NAME_LENGTH,
    MAX_TEXT_LENGTH,
    MAX_TITLE_LENGTH,
    MAX_URL_LENGTH,
    Attribute,
    Item,
)


def test_attributes_of_an_item_keep_their_types() -> None:
    given: dict[str, Attribute] = {"a": True, "b": 1, "c": 1.0, "d": "5", "e": -MAX_INTEGER}
    item = Item(id="mug", attributes=given)
    again = Item.model_validate_json(item.model_dump_json())
    assert [(type(value), value) for value in again.attributes.values()] == [(type(v), v) for v in given.values()]


@pytest.mark.parametrize(
    "value",
    [None, [[1]], {}, float("nan"), float("inf"), MAX_INTEGER + 1, -MAX_INTEGER - 1, "x" * (MAX_TEXT_LENGTH + 1)],
)
def test_an_invalid_attribute_is_rejected_by_name(value: Attribute) -> None:
    with pytest.raises(ValidationError, match=r"attributes\.price"):
        Item(id="mug", attributes={"price": value})


@pytest.mark.parametrize("names", [[""], ["x" * (MAX_NAME_LENGTH + 1)], [str(n) for n in range(MAX_ATTRIBUTES + 1)]])
def test_names_and_the_number_of_attributes_are_limited(names: list[str]) -> None:
    with pytest.raises(ValidationError, match="attributes"):
        Item(id="mug", attributes=dict.fromkeys(names, 1))


@pytest.mark.parametrize(
    ("field", "limit"), [("id", MAX_ID_LENGTH), ("title", MAX_TITLE_LENGTH), ("url", MAX_URL_LENGTH)]
)
def test_the_length_of_texts_is_limited(field: str, limit: int) -> None:
    assert getattr(Item.model_validate({"id": "mug", field: "x" * limit}), field) == "x" * limit
    with pytest.raises(ValidationError, match=field):
        Item.model_validate({"id": "mug", field: "x" * (limit + 1)})
