"""Cursors: they are read back unchanged, and refused when they are of another search or nobody encoded them."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.gallery.cursors import PageStart, decode_cursor, encode_cursor, hash_query
from index.gallery.errors import SearchError
from index.gallery.filters import Filter
from index.items import MAX_CURSOR_LENGTH, MAX_TOP

HASH = bytes(range(9))
keys = st.integers(0, 2**63 - 1)
ranks = st.integers(-(2**63), 2**63 - 1)


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def header(step_bytes: int = 1, has_last: int = 0, rank: int = 0, key: int = 0) -> bytes:
    numbers = b"".join(number.to_bytes(8, "little", signed=True) for number in (rank, key))
    return HASH + bytes([has_last]) + numbers + bytes([step_bytes])


@given(st.frozensets(keys, max_size=40), st.none() | st.tuples(ranks, keys))
def test_a_cursor_is_read_back(seen: frozenset[int], after: tuple[int, int] | None) -> None:
    start = PageStart(seen, after)
    assert decode_cursor(encode_cursor(start, HASH), HASH) == start


@pytest.mark.parametrize(("last", "length"), [(50_000, 1_400), (10_000_000, 2_800), (2**63 - 1, MAX_CURSOR_LENGTH)])
def test_the_longest_cursor_has_a_few_bytes_per_item(last: int, length: int) -> None:
    seen = frozenset(np.linspace(1, last - 1024, MAX_TOP).astype(np.int64).tolist())
    cursor = encode_cursor(PageStart(seen, (-1, 1)), HASH)
    assert len(cursor) <= length and decode_cursor(cursor, HASH).seen == seen


VALID = encode_cursor(PageStart(frozenset({3, 900}), (-5, 7)), HASH)


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "next",
        "\N{SNOWMAN}",
        "[1, 2]",
        VALID + "=",
        VALID + "\n",
        VALID[:-1],
        VALID + "AA",
        VALID.swapcase(),
        encode(header()[:-1]),
        encode(header(step_bytes=0)),
        encode(header(step_bytes=3) + bytes(3)),
        encode(header(step_bytes=2) + bytes(3)),
        encode(header(step_bytes=4) + (7).to_bytes(4, "little")),
        encode(header(step_bytes=8) + 2 * (2**63 - 1).to_bytes(8, "little")),
        encode(header() + bytes([5, 0])),
        encode(header() + bytes([1] * (MAX_TOP + 1))),
        encode(header(has_last=2)),
        encode(header(rank=4)),
        encode(header(key=4)),
        "A" * (MAX_CURSOR_LENGTH + 1),
        encode(json.dumps([5, -3, 8, HASH.hex()]).encode()),
        encode(b"[" * 5000),
        encode(b'[Infinity, NaN, true, 1e999, "x"]'),
    ],
    ids=repr,
)
def test_a_cursor_that_nobody_encoded_is_refused(cursor: str) -> None:
    with pytest.raises(SearchError, match="is not valid"):
        decode_cursor(cursor, HASH)


@given(st.text() | st.binary(max_size=60).map(lambda tail: encode(header() + tail)))
def test_any_text_is_decoded_or_refused(cursor: str) -> None:
    try:
        start = decode_cursor(cursor, HASH)
    except SearchError:
        return
    assert encode_cursor(start, HASH) == cursor


def test_a_cursor_is_bound_to_vectors_filter_and_bounds() -> None:
    vectors = np.ones((1, 3), np.float32)
    wanted = Filter.parse({"price": 1})
    hashes = {
        hash_query(vectors, None, None, []),
        hash_query(-vectors, None, None, []),
        hash_query(vectors, wanted, None, []),
        hash_query(vectors, None, 0.5, []),
        hash_query(vectors, None, None, ["mug"]),
    }
    assert len(hashes) == 5
    assert hash_query(vectors, wanted, 0.5, ["a", "b"]) == hash_query(vectors, wanted, 0.5, ["b", "a", "a"])
    with pytest.raises(SearchError, match="another search"):
        decode_cursor(VALID, bytes(9))


key_sets = st.frozensets(st.integers(0, 2**63 - 1), max_size=40)


@given(
    seen=key_sets,
    returned=key_sets,
    after=st.none() | st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1)),
    pinned=st.integers(0, 50),
    time=st.integers(0, 2**40),
)
def test_a_cursor_of_a_ranked_search_survives(
    seen: frozenset[int], returned: frozenset[int], after: tuple[int, int] | None, pinned: int, time: int
) -> None:
    start = PageStart(seen, after, returned, pinned, time)
    assert decode_cursor(encode_cursor(start, HASH), HASH) == start


def test_a_cursor_of_a_ranked_search_is_bounded() -> None:
    spread = [number * 2**53 for number in range(1001)]
    largest = PageStart(frozenset(spread[:500]), (-1, 2**60), frozenset(spread[500:1000]), 50, 2**40)
    assert len(encode_cursor(largest, HASH)) <= MAX_CURSOR_LENGTH
    assert decode_cursor(encode_cursor(largest, HASH), HASH) == largest
    with pytest.raises(SearchError, match="Too many items changed"):
        encode_cursor(largest._replace(returned=frozenset(spread[500:])), HASH)


def test_a_cut_cursor_of_a_ranked_search_is_refused() -> None:
    cursor = encode_cursor(PageStart(frozenset([3, 9]), None, frozenset([700, 5]), 1, 99), HASH)
    for end in range(len(cursor)):
        with pytest.raises(SearchError):
            decode_cursor(cursor[:end], HASH)
