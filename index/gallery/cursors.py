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

_HEADER = struct.Struct("<9sBqqB")
"""The hash of the query, flags, rank and key of the last image, and the bytes per step between seen keys."""
_HAS_LAST, _IS_RANKED = 1, 2
_RANKED = struct.Struct("<qHHB")
"""Of a ranked search: its time, the pins of earlier pages, the number of seen keys, and the bytes per step between the
keys that were returned of the window."""
_STEP_BYTES = (1, 2, 4, 8)
_MAX_KEY = 2**63 - 1


class PageStart(NamedTuple):
    """Where a page begins."""

    seen: frozenset[int] = frozenset()
    """Keys of items that earlier pages returned; with `after`, of those that rank after it."""
    after: tuple[int, int] | None = None
    """Rank and key of the last image of an exhaustive page: all items up to it were returned."""
    returned: frozenset[int] = frozenset()
    """Keys of items that earlier pages returned of the window that begins here."""
    pinned: int = 0
    """The pins that earlier pages are done with."""
    time: int = 0
    """When the first page was asked for, in seconds since 1970, if a ranking compares dates with it."""


def encode_cursor(start: PageStart, query_hash: bytes) -> str:
    """Returns the cursor of a page, bound to the query that it continues."""
    if len(start.seen) + len(start.returned) > MAX_TOP:
        raise SearchError("Too many items changed while this search was paged.", "Start again from the first page.")
    seen_bytes, seen = _pack_keys(start.seen)
    rank, key = start.after or (0, 0)
    is_ranked = bool(start.returned or start.pinned or start.time)
    flags = _HAS_LAST * (start.after is not None) | _IS_RANKED * is_ranked
    parts = [_HEADER.pack(query_hash, flags, rank, key, seen_bytes)]
    if is_ranked:
        returned_bytes, returned = _pack_keys(start.returned)
        parts += [_RANKED.pack(start.time, start.pinned, len(start.seen), returned_bytes), returned]
    return base64.urlsafe_b64encode(b"".join((*parts, seen))).decode().rstrip("=")


def _pack_keys(keys: frozenset[int]) -> tuple[int, bytes]:
    """Returns the steps from each key to the next, and the bytes per step."""
    steps = np.diff(np.sort(np.fromiter(keys, np.int64, len(keys))), prepend=0)
    packed = steps.astype(np.min_scalar_type(steps.max(initial=0)).newbyteorder("<"))
    return packed.itemsize, packed.tobytes()


def _unpack_keys(data: bytes, step_bytes: int) -> frozenset[int]:
    if step_bytes not in _STEP_BYTES:
        raise ValueError(step_bytes)
    keys = list(accumulate(np.frombuffer(data, f"<u{step_bytes}").tolist()))
    if keys and keys[-1] > _MAX_KEY:
        raise ValueError(keys[-1])
    return frozenset(keys)


def decode_cursor(cursor: str, query_hash: bytes) -> PageStart:
    """Returns the page of a cursor; refuses an invalid one, and one of another query."""
    try:
        if len(cursor) > MAX_CURSOR_LENGTH:
            raise ValueError(len(cursor))
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        cursor_hash, flags, rank, key, step_bytes = _HEADER.unpack_from(data)
        rest = data[_HEADER.size :]
        start = PageStart(after=(rank, key) if flags & _HAS_LAST else None)
        if flags & _IS_RANKED:
            moment, pinned, count, returned_bytes = _RANKED.unpack_from(rest)
            rest, split = rest[_RANKED.size :], len(rest) - _RANKED.size - count * step_bytes
            start = start._replace(returned=_unpack_keys(rest[:split], returned_bytes), pinned=pinned, time=moment)
            rest = rest[split:]
        start = start._replace(seen=_unpack_keys(rest, step_bytes))
        if len(start.seen) + len(start.returned) > MAX_TOP or encode_cursor(start, cursor_hash) != cursor:
            raise ValueError("not as it was encoded")
    except (ValueError, struct.error):
        raise SearchError(
            f"The cursor {cursor[:60]!r} is not valid.", "Pass the cursor of the last result unchanged, or none."
        ) from None
    if cursor_hash != query_hash:
        raise SearchError(
            "The cursor belongs to another search, or its ranking has changed.",
            "Repeat the query, filter, bounds and ranking of the first page, or start again from there.",
        )
    return start


def hash_query(
    vectors: NDArray[np.float32],
    filter: Filter | None,
    min_score: float | None,
    exclude: Sequence[str],
    ranking: str = "",
) -> bytes:
    """Returns a short hash of a search without its page; `ranking` is a text with all rules."""
    document = json.dumps(filter.document, sort_keys=True) if filter else ""
    bounds = f"{document} {min_score} {sorted(set(exclude))}{ranking}"
    return blake2b(vectors.tobytes() + bounds.encode(errors="surrogatepass"), digest_size=9).digest()
