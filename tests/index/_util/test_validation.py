"""Messages about invalid values: in plain words, with the place, the value and a similar name."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from index._util.validation import explain_errors, format_value, suggest


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    weight: float = Field(default=1, gt=0)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=5)]
    count: int = Field(default=1, le=1000)
    kind: Literal["exact", "fast"] = "fast"
    on: bool = False
    parts: list[Inner] = Field(default=[], max_length=2)
    inner: Inner | None = None
    even: int = 2

    @field_validator("even")
    @classmethod
    def _check_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("odd numbers are not allowed")
        return value


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        ({"nane": 1}, "nane is unknown (did you mean name?)"),
        ({"entirely": 1}, "entirely is unknown"),
        ({"inner": {"wieght": 1}}, "inner.wieght is unknown (did you mean weight?)"),
        ({"parts": [{}, {"wieght": 1}]}, "parts[1].wieght is unknown (did you mean weight?)"),
        ({"name": "longer"}, "name must have at most 5 characters (got 6)"),
        ({"count": 5000}, "count must be at most 1,000 (got 5000)"),
        ({"count": "many"}, "count must be a whole number (got 'many')"),
        ({"count": 1.5}, "count must be a whole number (got 1.5)"),
        ({"kind": "slow"}, "kind must be 'exact' or 'fast' (got 'slow')"),
        ({"on": "perhaps"}, "on must be true or false (got 'perhaps')"),
        ({"parts": [{}] * 3}, "parts must have at most 2 entries (got 3)"),
        ({"parts": 5}, "parts must be a list (got 5)"),
        ({"inner": [1]}, "inner must be an object (got a list)"),
        ({"inner": {"weight": 0}}, "inner.weight must be greater than 0 (got 0)"),
        ({"even": 3}, "even: odd numbers are not allowed (got 3)"),
    ],
)
def test_a_mistake_is_explained_in_plain_words(change: dict[str, Any], clause: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"name": "a", **change})
    assert explain_errors(caught.value.errors(), Outer) == [clause]


def test_a_missing_value_is_named_with_its_prefix() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({})
    assert explain_errors(caught.value.errors(), Outer, prefix="settings.") == ["settings.name is missing"]


def test_what_is_not_json_is_reported_as_such() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json("{")
    (clause,) = explain_errors(caught.value.errors())
    assert clause.startswith("The document is not JSON: ")


def test_a_close_name_is_suggested() -> None:
    assert suggest("limt", ["limit", "filter"]) == " (did you mean limit?)"
    assert suggest("colour", ["limit", "filter"]) == ""


@pytest.mark.parametrize(
    ("value", "text"), [({"a": 1}, "an object"), ("x" * 81, f"'{'x' * 80}'..."), (10**300, f"1{'0' * 79}...")]
)
def test_a_large_value_is_shortened(value: object, text: str) -> None:
    assert format_value(value) == text
