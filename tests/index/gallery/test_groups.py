"""Keys of groups: the same for equal values, and never the same for different ones of any type."""

import pytest

from index.gallery.groups import group_key
from index.items import Attribute

SAME: list[tuple[Attribute, Attribute]] = [
    (5, 5.0),
    (0.0, -0.0),
    (("S", "M"), ("M", "S")),
    (("S",), "S"),
    ((1, "1"), ("1", 1.0)),
    ("\ud800", "\ud800"),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=str)
def test_equal_values_have_the_same_key(one: Attribute, other: Attribute) -> None:
    assert group_key(one) == group_key(other)


def test_different_values_have_different_keys() -> None:
    values: list[Attribute] = [
        *(True, False, 1, 0, "1", "0", "True", "true", "", 0.5, "0.5", "n1", "t1", "bTrue", 2**53, -1),
        *(("1", "2"), (1, 2), ("1, 2", "3"), ("1", "2, 3"), (True, 2), (1, "2"), "['t1', 't2']"),
    ]
    keys = [group_key(value) for value in values]
    assert len(set(keys)) == len(values)
    assert all(2**62 <= key < 2**63 for key in keys), "keys of items are smaller"
