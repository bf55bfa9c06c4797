"""The sizes of the AV1 frames inside an AVIF file.

The decoder allocates memory by the size in the frames, whatever size the container declares for them, and Pillow checks
only the latter.
"""

from collections.abc import Iterator
from typing import NamedTuple

_MAX_EXTENTS = 20_000
_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6

Size = tuple[int, int]


class _Box(NamedTuple):
    kind: bytes
    start: int
    end: int


class _Reader:
    """Reads big-endian numbers one after the other."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self.place = place

    def number(self, count: int) -> int:
        if self.place + count > len(self._data):
            raise ValueError("a box is cut off")
        self.place += count
        return int.from_bytes(self._data[self.place - count : self.place], "big")


def av1_frames(data: bytes) -> list[Size]:
    """Returns the size of each AV1 frame in an AVIF file; raises ValueError for damaged and animated files."""
    boxes = list(_boxes(data, 0, len(data)))
    if any(box.kind == b"moov" for box in boxes):
        raise ValueError("it is animated")
    metas = [box for box in boxes if box.kind == b"meta"]
    if len(metas) != 1:
        raise ValueError(f"it has {len(metas)} meta boxes")
    parts = list(_boxes(data, metas[0].start + 4, metas[0].end))
    kinds = {kind: [box for box in parts if box.kind == kind] for kind in (b"iinf", b"iloc", b"idat")}
    if len(kinds[b"iinf"]) != 1 or len(kinds[b"iloc"]) != 1 or len(kinds[b"idat"]) > 1:
        raise ValueError("its items are not listed once")
    images = _av1_items(data, kinds[b"iinf"][0])
    inline = kinds[b"idat"][0].start if kinds[b"idat"] else 0
    return [_frame_size(item) for item in _read_items(data, kinds[b"iloc"][0], inline, images)]


def _boxes(data: bytes, start: int, end: int) -> Iterator[_Box]:
    for _ in range(_MAX_EXTENTS):
        if start + 8 > end:
            return
        size, body = int.from_bytes(data[start : start + 4], "big"), start + 8
        if size == 1:
            size, body = int.from_bytes(data[start + 8 : start + 16], "big"), start + 16
        stop = end if size == 0 else start + size
        if stop < body or stop > end:
            raise ValueError("a box is cut off")
        yield _Box(data[start + 4 : start + 8], body, stop)
        start = stop
    raise ValueError("it has too many boxes")


def _av1_items(data: bytes, box: _Box) -> set[int]:
    """Returns the ids of the items that are AV1 frames."""
    found = set()
    for entry in _boxes(data, box.start + (6 if data[box.start] == 0 else 8), box.end):
        read = _Reader(data, entry.start)
        version = read.number(4) >> 24
        item = read.number(4 if version == 3 else 2)
        read.number(2)
        if entry.kind == b"infe" and version >= 2 and read.number(4) == int.from_bytes(b"av01", "big"):
            found.add(item)
    return found


def _read_items(data: bytes, box: _Box, inline: int, wanted: set[int]) -> Iterator[bytes]:
    """Yields the bytes of the wanted items."""
    read = _Reader(data, box.start)
    version = read.number(4) >> 24
    sizes = read.number(2)
    offset_size, length_size, base_size, index_size = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    total = extents = 0
    for _ in range(read.number(4 if version == 2 else 2)):
        item = read.number(4 if version == 2 else 2)
        method = read.number(2) & 15 if version else 0
        read.number(2)
        base = read.number(base_size) + (inline if method == 1 else 0)
        pieces = []
        for _ in range(read.number(2)):
            read.number(index_size if version else 0)
            start = base + read.number(offset_size)
            length = read.number(length_size) or len(data) - start
            extents, total = extents + 1, total + (length if item in wanted else 0)
            if extents > _MAX_EXTENTS or total > 2 * len(data):
                raise ValueError("its items overlap")
            if item in wanted:
                pieces.append(data[start : start + length])
        if item in wanted:
            yield b"".join(pieces)


def _frame_size(item: bytes) -> Size:
    """Returns the size of the one frame of an item."""
    size, frames, place = None, 0, 0
    while place < len(item):
        head = item[place]
        place += 2 if head & 4 else 1
        length = len(item) - place
        if head & 2:
            length, place = _leb128(item, place)
        kind = head >> 3 & 15
        if kind == _SEQUENCE_HEADER:
            if size is not None:
                raise ValueError("a frame has two sequence headers")
            size = _sequence_size(item[place : place + length])
        frames += kind in (_FRAME_HEADER, _FRAME)
        place += length
    if size is None or frames != 1:
        raise ValueError(f"an item has {frames} AV1 frames instead of one")
    return size


def _leb128(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[place : place + 8]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, place + index + 1
    raise ValueError("an AV1 unit is cut off")


def _sequence_size(header: bytes) -> Size:
    """Returns the size of a still picture's frames: with the reduced header no frame can have another one."""
    bits = int.from_bytes(header[:8].ljust(8, b"\0"), "big")
    is_reduced = bits >> 59 & 1
    if not is_reduced:
        raise ValueError("it is not coded as a still picture")
    width_bits, height_bits = (bits >> 50 & 15) + 1, (bits >> 46 & 15) + 1
    width = bits >> 46 - width_bits & (1 << width_bits) - 1
    height = bits >> 46 - width_bits - height_bits & (1 << height_bits) - 1
    return width + 1, height + 1
