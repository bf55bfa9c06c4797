"""Reads the structure of image files without a decoder: format, canvas, scans and parts."""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

_SIGNATURES = (
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (8, b"WEBP", "WebP"),
    (0, b"GIF8", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),
    (0, b"MM\0+", "TIFF"),
    (0, b"%PDF", "PDF"),
    (0, b"8BPS", "Photoshop"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"JXL \r\n\x87\n", "JPEG XL"),
    (4, b"jP  \r\n\x87\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (4, b"ftypcrx ", "Canon raw"),
)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
_PROLOGUE = ((b"<!--", b"-->"), (b"<?xml", b">"), (b"<!DOCTYPE", b">"))
"""How the parts start and end that may precede the first element of an SVG."""

# Fill bytes before a marker are not matched: a long run of them would be searched again from each of its bytes.
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_SCAN_END = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_SOS, _EOI, _FRAMES = 0xDA, 0xD9, {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_MARKERS_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}

MAX_PARTS = 20_000
"""Limit of segments, chunks or blocks of a file. Pillow reads each in Python, and one may have as few as three bytes;
an encoder writes a few thousand at most."""


def recognise(data: bytes) -> str | None:
    """Returns the name of the format that the first bytes belong to, or None."""
    if data[4:8] == b"ftyp":
        brands = {data[8:12], *_compatible_brands(data)}
        if brands & _AVIF_BRANDS:
            return "AVIF"
        if brands & _HEIC_BRANDS:
            return "HEIC"
    for offset, magic, name in _SIGNATURES:
        if data.startswith(magic, offset):
            return name
    return "SVG" if _is_svg(data[:4096]) else None


def _is_svg(text: bytes) -> bool:
    """Returns whether the first element is an SVG's. A pattern would backtrack for hours over repeated comments."""
    text = text.removeprefix(b"\xef\xbb\xbf").lstrip()
    while end := next((end for start, end in _PROLOGUE if text.startswith(start)), None):
        text = text.partition(end)[2].lstrip()
    return text.startswith(b"<svg") and (text[4:5].isspace() or text[4:5] == b">")


def _compatible_brands(data: bytes) -> list[bytes]:
    end = min(int.from_bytes(data[:4], "big"), 256)
    return [data[place : place + 4] for place in range(16, end, 4)]


def webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Returns the size of a WebP's canvas, or None. The decoder allocates three canvases when it is created."""
    kind = data[12:16]
    if len(data) < 30:
        return None
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    return None


class JpegStructure(NamedTuple):
    """What the markers of a JPEG reveal. Each scan is a pass over all pixels, for as little as a few bytes of file."""

    scans: int
    is_buffered: bool
    """Whether the decoder keeps the coefficients of all pixels in memory, until it has read the last scan."""
    parts: int
    """Segments; at most one more than the limit is counted."""
    samples: float
    """Stored values per pixel, below 3 where colour has a lower resolution."""
    size: tuple[int, int] = (0, 0)


def jpeg_structure(data: bytes) -> JpegStructure:
    """Counts the scans of the first image in a JPEG file; previews inside its metadata are skipped."""
    scans, parts, samples, components, place = 0, 0, 4.0, b"", 2
    is_buffered, size = False, (0, 0)
    pattern = _MARKER
    while parts <= MAX_PARTS and (found := pattern.search(data, place)):
        marker, place, pattern = found[1][0], found.end(), _MARKER
        parts += 1
        if marker == _EOI:
            break
        if marker in _MARKERS_WITHOUT_LENGTH:
            continue
        if marker in _FRAMES:
            frame = data[place : place + 24]
            samples, components = _samples_per_pixel(frame), frame[7:8]
            size = int.from_bytes(frame[5:7], "big"), int.from_bytes(frame[3:5], "big")
            is_buffered = is_buffered or marker in _PROGRESSIVE
        if marker == _SOS:
            is_buffered = is_buffered or data[place + 2 : place + 3] != components
        place += int.from_bytes(data[place : place + 2], "big")
        if marker == _SOS:
            scans, pattern = scans + 1, _SCAN_END
            if data.find(b"\xff\xda", place) < 0:
                break  # the last scan; the pattern would take a tenth of the time of decoding to find its end
    return JpegStructure(scans, is_buffered or scans > 1, parts, samples, size)


def _samples_per_pixel(frame: bytes) -> float:
    """Returns the values per pixel of a frame header: 3 for full colour, 1.5 where colour has half the resolution."""
    count = frame[7] if len(frame) > 7 else 0
    factors = [(byte >> 4) * (byte & 15) for byte in frame[9 : 9 + 3 * count : 3]]
    return sum(factors) / max(factors) if count and len(factors) == count and max(factors) else 4.0


def count_parts(data: bytes, kind: str) -> int:
    """Counts the chunks of a PNG, or the blocks before the first picture of a GIF; at most one more than the limit."""
    walk = {"PNG": _png_chunks, "GIF": _gif_blocks}.get(kind)
    count = 0
    for count, _ in enumerate(walk(data) if walk else (), start=1):
        if count > MAX_PARTS:
            break
    return count


def _png_chunks(data: bytes) -> Iterator[int]:
    place = 8
    while place + 8 <= len(data):
        yield place
        place += 12 + int.from_bytes(data[place : place + 4], "big")


def _gif_blocks(data: bytes) -> Iterator[int]:
    flags = data[10] if len(data) > 10 else 0
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while place < len(data) and data[place] != 0x2C:
        yield place
        if data[place] != 0x21:
            place += 1
            continue
        place += 2
        while place < len(data) and (size := data[place]):
            place += size + 1
            yield place
        place += 1
