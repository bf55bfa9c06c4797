"""Tests of the base class of immutable values."""

import pytest
from pydantic import ValidationError

from index._util.models import Frozen


class Point(Frozen):
    x: int
    y: int = 0


def test_values_are_compared_by_content_and_hashable() -> None:
    assert Point(x=1) == Point(x=1, y=0) != Point(x=2)
    assert len({Point(x=1), Point(x=1), Point(x=2)}) == 2


def test_values_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Point(x=1).x = 2


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Point(x=1, z=3)  # type: ignore[call-arg]
