"""Keys of groups: what the items with the same value of an attribute have in common."""

from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import plain_number, value_type
from index.gallery.vectors.base import Positions, Segment
from index.items import Attribute, Value

_GROUP_BIT = 1 << 62
"""Distinguishes keys of groups from those of items, which are far smaller."""


def owner_keys(segment: Segment, positions: Positions, items: NDArray[np.int64], attribute: str) -> list[int]:
    """Returns for each position the key of its group: that of its item, if the item does not have the attribute."""
    values = segment.values(attribute, positions)
    # The key of a single value, which is the usual case, is cached.
    return [
        item if value is None else group_key(value) if isinstance(value, tuple) else _hash_value(value)
        for item, value in zip(items.tolist(), values, strict=True)
    ]


def group_key(value: Attribute) -> int:
    """Returns a key of 62 bits; equal values, and lists with the same values in any order, have the same key."""
    return _hash_values(value) if isinstance(value, tuple) else _hash_value(value)


@lru_cache(1 << 14, typed=True)  # True == 1
def _hash_value(value: Value) -> int:
    return _hash_values((value,))


def _hash_values(values: tuple[Value, ...]) -> int:
    kinds = map(value_type, values)
    typed = [
        (kind, plain_number(cast(float, one)) if kind == "number" else one)
        for kind, one in zip(kinds, values, strict=True)
    ]
    typed.sort(key=itemgetter(0, 1))
    digest = blake2b(repr(typed).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _GROUP_BIT | _GROUP_BIT
