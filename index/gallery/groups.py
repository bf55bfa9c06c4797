"""Keys of groups: what the items with the same value of an attribute have in common."""

from functools import lru_cache
from hashlib import blake2b
from typing import cast

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import plain_number
from index.gallery.vectors.base import Positions, Segment
from index.items import Attribute, Value

_GROUP_BIT = 1 << 62
"""Distinguishes keys of groups from those of items, which are far smaller."""


def owner_keys(segment: Segment, positions: Positions, items: NDArray[np.int64], attribute: str) -> list[int]:
    """Returns for each position the key of its group: that of its item, if the item does not have the attribute."""
    values = segment.values(attribute, positions)
    if not {*map(type, values)} & {type(None), tuple}:  # the usual case, without a step per value
        return list(map(_hash_value, cast(list[Value], values)))
    # The key of a single value is cached; that of a list for each object.
    lists = {id(value): value for value in values if isinstance(value, tuple)}
    known = {number: group_key(value) for number, value in lists.items()}
    return [
        item if value is None else known[id(value)] if isinstance(value, tuple) else _hash_value(value)
        for item, value in zip(items.tolist(), values, strict=True)
    ]


def group_key(value: Attribute) -> int:
    """Returns a key of 62 bits; equal values, and lists with the same values in any order, have the same key."""
    if not isinstance(value, tuple):
        return _hash_value(value)
    return _hash_value(value[0]) if len(value) == 1 else _hash_text(repr(sorted(map(_format, value))))


@lru_cache(1 << 14, typed=True)  # True == 1
def _hash_value(value: Value) -> int:
    return _hash_text(_format(value))


def _format(value: Value) -> str:
    """Returns a text that is the same for equal values of one type, and begins with the type."""
    if isinstance(value, str):
        return f"t{value}"
    return f"b{value}" if isinstance(value, bool) else f"n{plain_number(value)}"


def _hash_text(text: str) -> int:
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _GROUP_BIT | _GROUP_BIT
