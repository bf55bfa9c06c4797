"""Cursors: where the next page of a search begins, as a text that is bound to the search."""

import base64
import json
import struct
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.errors import SearchError
from index.gallery.filters import Filter
from index.items import MAX_CURSOR_LENGTH, MAX_TOP

_HEADER = struct.Struct("<9s?qqB")
"""The hash of the query, whether there is a last image, its rank and key, and the bytes per step between seen keys."""
_STEP_BYTES = (1, 2, 4, 8)
_MAX_KEY = 2**63 - 1


class PageStart(NamedTuple):
    """Where a page begins."""

    seen: frozenset[int] = frozenset()
    """Keys of items that earlier pages returned; with `after`, of those that rank after it."""
    after: tuple[int, int] | None = None
    """Rank and key of the last image of an exhaustive page: all items up to it were returned."""


def encode_cursor(start: PageStart, query_hash: bytes) -> str:
    """Returns the cursor of a page, bound to the query that it continues."""
    steps = np.diff(np.sort(np.fromiter(start.seen, np.int64, len(start.seen))), prepend=0)
    packed = steps.astype(np.min_scalar_type(steps.max(initial=0)).newbyteorder("<"))
    rank, key = start.after or (0, 0)
    header = _HEADER.pack(query_hash, start.after is not None, rank, key, packed.itemsize)
    return base64.urlsafe_b64encode(header + packed.tobytes()).decode().rstrip("=")


def decode_cursor(cursor: str, query_hash: bytes) -> PageStart:
    """Returns the page of a cursor; refuses an invalid one, and one of another query."""
    try:
        if len(cursor) > MAX_CURSOR_LENGTH:
            raise ValueError(len(cursor))
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        cursor_hash, has_last, rank, key, step_bytes = _HEADER.unpack_from(data)
        if step_bytes not in _STEP_BYTES:
            raise ValueError(step_bytes)
        keys = list(accumulate(np.frombuffer(data[_HEADER.size :], f"<u{step_bytes}").tolist()))
        if len(keys) > MAX_TOP or (keys and keys[-1] > _MAX_KEY):
            raise ValueError(len(keys))
        start = PageStart(frozenset(keys), (rank, key) if has_last else None)
        if encode_cursor(start, cursor_hash) != cursor:
            raise ValueError("not as it was encoded")
    except (ValueError, struct.error):
        raise SearchError(
            f"The cursor {cursor[:60]!r} is not valid.", "Pass the cursor of the last result unchanged, or none."
        ) from None
    if cursor_hash != query_hash:
        raise SearchError(
            "The cursor belongs to another search.", "Repeat the query, filter and bounds of the first page."
        )
    return start


def hash_query(
    vectors: NDArray[np.float32], filter: Filter | None, min_score: float | None, exclude: Sequence[str]
) -> bytes:
    """Returns a short hash of a search without its page."""
    document = json.dumps(filter.document, sort_keys=True) if filter else ""
    bounds = f"{document} {min_score} {sorted(set(exclude))}"
    return blake2b(vectors.tobytes() + bounds.encode(), digest_size=9).digest()
