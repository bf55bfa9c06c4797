"""The first page of a TIFF file, checked before a decoder sees it.

Decoders follow every page and load every tag of a file, at whatever sizes it declares. So the first page is read here,
and its checked tags are all that the decoder gets: a file of one page.
"""

import struct
from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

from index.embedding.image_formats import MAX_PARTS, jpeg_structure

TiffReason = Literal["unsupported", "truncated", "unreadable"]

_MAX_TAGS = 1000
"""Limit of the tags of a page; programs write fewer than a hundred."""
_MAX_TABLE_BYTES = 65_536
_MAX_FILE_BYTES = 2**31
_MAX_TILE_PIXELS = 16_000_000
"""Pixels of all tiles, which may extend beyond the image, that are accepted whatever the size of the image."""

_SUBFILE, _WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 254, 256, 257, 258, 259, 262, 266
_STRIP_OFFSETS, _ORIENTATION, _SAMPLES, _ROWS, _STRIP_COUNTS, _PLANAR = 273, 274, 277, 278, 279, 284
_PREDICTOR, _COLOURS, _TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS, _TILE_COUNTS = 317, 320, 322, 323, 324, 325
_EXTRA, _FORMAT, _JPEG_TABLES, _SUBSAMPLING, _DNG_VERSION = 338, 339, 347, 530, 50706

_BYTE, _SHORT, _LONG, _UNDEFINED, _LONG8 = 1, 3, 4, 7, 16
_CODES = {_BYTE: "B", _SHORT: "H", _LONG: "I", _UNDEFINED: "B", _LONG8: "Q"}
_WRITTEN_AS = dict.fromkeys((_BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _PLANAR, _PREDICTOR, _COLOURS), _SHORT)
_WRITTEN_AS |= {_EXTRA: _SHORT, _SUBSAMPLING: _SHORT, _JPEG_TABLES: _UNDEFINED}
"""Types of the tags in the file of one page; all others are written as LONG."""

_RAW, _JPEG = 1, 7
_COMPRESSIONS = {_RAW, 5, _JPEG, 8, 32946, 32773}
"""None, LZW, JPEG, deflate (two numbers) and PackBits: what a strip decodes to is bounded by its declared size."""
_COMPRESSION_NAMES = {2: "CCITT fax", 3: "CCITT fax", 4: "CCITT fax", 6: "old-style JPEG", 34712: "JPEG 2000"}
_COMPRESSION_NAMES |= {34887: "LERC", 34925: "LZMA", 50000: "Zstandard", 50001: "WebP", 50002: "JPEG XL"}

_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_COLOURS_OF = {_WHITE_IS_ZERO: 1, _BLACK_IS_ZERO: 1, _RGB: 3, _PALETTE: 1, _CMYK: 4, _YCBCR: 3}
"""Values per pixel by the photometric interpretation, without opacity and other extra values."""
_DEPTHS = {
    _WHITE_IS_ZERO: (1, 2, 4, 8),
    _BLACK_IS_ZERO: (1, 2, 4, 8, 16),
    _RGB: (8, 16),
    _PALETTE: (1, 2, 4, 8),
    _CMYK: (8, 16),
    _YCBCR: (8,),
}
_MODES = {_WHITE_IS_ZERO: "L", _BLACK_IS_ZERO: "L", _RGB: "RGB", _PALETTE: "P", _CMYK: "CMYK", _YCBCR: "RGB"}


class TiffError(ValueError):
    """A TIFF file that is not decoded; `reason` is the machine-readable cause."""

    def __init__(self, reason: TiffReason, problem: str) -> None:
        super().__init__(problem)
        self.reason: TiffReason = reason


class TiffPage(NamedTuple):
    """The first page of a TIFF file."""

    size: tuple[int, int]
    mode: str
    orientation: int
    decoder_bytes: int
    """Memory of the largest strip or tile, compressed and decoded, which the decoder keeps besides the pixels."""
    order: str
    tags: dict[int, Sequence[int]]

    def extract(self, data: bytes) -> bytes:
        """Returns a TIFF file that has this page only, with no tags but the checked ones."""
        end = len(data) + len(data) % 2
        directory, values, place = [], [], end + 2 + 12 * len(self.tags) + 4
        for tag, numbers in sorted(self.tags.items()):
            kind = _WRITTEN_AS.get(tag, _LONG)
            body = struct.pack(f"{self.order}{len(numbers)}{_CODES[kind]}", *numbers)
            entry = struct.pack(f"{self.order}HHI", tag, kind, len(numbers))
            if len(body) <= 4:
                directory.append(entry + body.ljust(4, b"\0"))
                continue
            body += bytes(len(body) % 2)
            directory.append(entry + struct.pack(f"{self.order}I", place))
            values.append(body)
            place += len(body)
        head = (b"II" if self.order == "<" else b"MM") + struct.pack(f"{self.order}HI", 42, end)
        count = struct.pack(f"{self.order}H", len(directory))
        return b"".join((head, memoryview(data)[8:], bytes(end - len(data)), count, *directory, bytes(4), *values))


def read_tiff(data: bytes) -> TiffPage:
    """Reads the first page of a TIFF file without decoding it; raises TiffError for what is not decoded."""
    page = _Directory(data)
    if page.one(_SUBFILE, 0) & ~2 or page.has(_DNG_VERSION):
        raise TiffError("unsupported", "its first page is a preview or a mask, as in raw photos of cameras")
    width, height = size = page.one(_WIDTH), page.one(_LENGTH)
    if not (width and height):
        raise TiffError("unreadable", "it has no pixels")
    tags = _read_layout(page)
    mode, samples, bits = _mode(tags), tags[_SAMPLES][0], tags[_BITS][0]
    planes = samples if tags[_PLANAR][0] == 2 else 1
    blocks = _Blocks(page, size, samples // planes * bits, planes, is_raw=tags[_COMPRESSION][0] == _RAW)
    if tags[_COMPRESSION][0] == _JPEG:
        _check_jpeg(page, blocks)
    tags |= {_WIDTH: [width], _LENGTH: [height], **blocks.tags}
    orientation = page.one(_ORIENTATION, 1)
    return TiffPage(size, mode, orientation, blocks.decoder_bytes, page.order, tags)


class _Directory:
    """The tags of the first page. Their values are read one by one, and none longer than is asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = "<" if data.startswith(b"II") else ">"
        self._is_big = data[2:4] in (b"+\0", b"\0+")
        if len(data) > _MAX_FILE_BYTES:
            raise TiffError("unsupported", f"it has more than {_MAX_FILE_BYTES:,} bytes")
        if self._is_big and self._number("H", 4) != 8:
            raise TiffError("unreadable", "its numbers do not have 8 bytes")
        start = self._number("Q", 8) if self._is_big else self._number("I", 4)
        count = self._number("Q" if self._is_big else "H", start)
        if not 0 < count <= _MAX_TAGS:
            raise TiffError("unreadable", f"its first page has {count:,} tags; the limit is {_MAX_TAGS:,}")
        start, step = (start + 8, 20) if self._is_big else (start + 2, 12)
        self._entries = {self._number("H", start + step * index): start + step * index for index in range(count)}
        if len(self._entries) < count:
            raise TiffError("unreadable", "it has the same tag twice")

    def has(self, tag: int) -> bool:
        """Returns whether the page has this tag."""
        return tag in self._entries

    def one(self, tag: int, default: int | None = None) -> int:
        """Returns the first number of a tag."""
        if not self.has(tag) and default is not None:
            return default
        return self.numbers(tag, 1)[0]

    def count(self, tag: int) -> int:
        """Returns how many numbers a tag has, or 0 where the page has no such tag."""
        if not self.has(tag):
            return 0
        return self._number("Q" if self._is_big else "I", self._entries[tag] + 4)

    def numbers(self, tag: int, count: int) -> Sequence[int]:
        """Returns the first numbers of a tag that has at least `count`."""
        if self.count(tag) < count:
            raise TiffError("unreadable", f"its tag {tag} has {self.count(tag):,} values instead of {count:,}")
        entry = self._entries[tag]
        code = _CODES.get(self._number("H", entry + 2))
        if code is None:
            raise TiffError("unreadable", f"its tag {tag} is not a whole number")
        inline, place = (8, entry + 12) if self._is_big else (4, entry + 8)
        if struct.calcsize(code) * self.count(tag) > inline:
            place = self._number("Q" if self._is_big else "I", place)
        return self._unpack(f"{count}{code}", place)

    def _number(self, code: str, place: int) -> int:
        return self._unpack(code, place)[0]

    def _unpack(self, layout: str, place: int) -> tuple[int, ...]:
        if place + struct.calcsize("=" + layout) > len(self.data):
            raise TiffError("truncated", "a part that it refers to is cut off")
        return struct.unpack_from(self.order + layout, self.data, place)


def _read_layout(page: _Directory) -> dict[int, Sequence[int]]:
    """Returns the tags of how a pixel is stored, apart from strips and tiles; refuses what is not decoded rightly."""
    compression, photometric = page.one(_COMPRESSION, 1), page.one(_PHOTOMETRIC, _WHITE_IS_ZERO)
    if compression not in _COMPRESSIONS:
        name = _COMPRESSION_NAMES.get(compression, f"number {compression}")
        raise TiffError("unsupported", f"its compression is {name}")
    if photometric not in _COLOURS_OF:
        raise TiffError("unsupported", f"its colour space has the number {photometric}")
    samples, planar = page.one(_SAMPLES, 1), page.one(_PLANAR, 1)
    extras = _read_extras(page, samples - _COLOURS_OF[photometric], photometric)
    bits = _same(page, _BITS, samples, 1)
    predictor = page.one(_PREDICTOR, 1)
    if bits not in _DEPTHS[photometric] or _same(page, _FORMAT, samples, 1) != 1:
        raise TiffError("unsupported", f"its values of {bits} bits are not read")
    if page.one(_FILL_ORDER, 1) != 1 or predictor not in (1, 2) or planar not in (1, 2):
        raise TiffError("unsupported", "its values are stored in an unusual order")
    if (compression == _JPEG and bits != 8) or (photometric == _YCBCR and compression != _JPEG):
        raise TiffError("unsupported", "its colours are stored in an unusual way")
    if samples == 1:
        planar = 1
    is_plain = bits == 8 and photometric in (_RGB, _CMYK) and extras in ((), (2,)) and compression != _JPEG
    if planar == 2 and not is_plain:
        raise TiffError("unsupported", "its colours are stored one after the other")
    tags: dict[int, Sequence[int]] = {_COMPRESSION: [compression], _PHOTOMETRIC: [photometric]}
    tags |= {_SAMPLES: [samples], _BITS: [bits] * samples, _PLANAR: [planar]}
    if extras:
        tags[_EXTRA] = extras
    if predictor == 2 and compression not in (_RAW, _JPEG):
        tags[_PREDICTOR] = [predictor]
    if photometric == _PALETTE:
        tags[_COLOURS] = [value & 0xFFFF for value in page.numbers(_COLOURS, 3 << bits)]
    if photometric == _YCBCR and page.has(_SUBSAMPLING):
        tags[_SUBSAMPLING] = page.numbers(_SUBSAMPLING, 2)
        if not set(tags[_SUBSAMPLING]) <= {1, 2, 4}:
            raise TiffError("unreadable", "its colour resolution is not valid")
    return tags


def _read_extras(page: _Directory, count: int, photometric: int) -> tuple[int, ...]:
    """Returns what the values of a pixel beyond its colours are: 1 and 2 are opacity, 0 is anything."""
    if not 0 <= count <= 3:
        raise TiffError("unsupported", f"it has {page.one(_SAMPLES, 1):,} values per pixel")
    if not page.has(_EXTRA):
        if count > 1 or (count and photometric != _RGB):
            raise TiffError("unsupported", "what the values of a pixel mean is not stored")
        return ()
    extras = tuple(page.numbers(_EXTRA, count)) if count else ()
    opacity = {_RGB: (0, 1, 2), _BLACK_IS_ZERO: (0, 2), _PALETTE: (0, 2), _CMYK: (0,)}.get(photometric, ())
    if any(extra not in (opacity if place == 0 else (0,)) for place, extra in enumerate(extras)):
        raise TiffError("unsupported", f"its extra values {extras} are not read")
    return extras


def _same(page: _Directory, tag: int, samples: int, default: int) -> int:
    """Returns the value of a tag that has one number for each value of a pixel, or one for all."""
    numbers = page.numbers(tag, samples if page.count(tag) > 1 else 1) if page.has(tag) else [default]
    if len(set(numbers)) > 1:
        raise TiffError("unsupported", "the values of a pixel have different types")
    return numbers[0]


def _mode(tags: dict[int, Sequence[int]]) -> str:
    """Returns the mode, as Pillow names it, of the decoded pixels, which the memory is estimated by."""
    photometric, extras = tags[_PHOTOMETRIC][0], tags.get(_EXTRA, ())
    mode = _MODES[photometric]
    if mode == "L" and tags[_BITS][0] == 16:
        return "I;16"
    has_opacity = any(extras) or (mode == "RGB" and tags[_SAMPLES][0] == 4 and not extras)
    return mode + "A" if has_opacity else mode


class _Blocks:
    """The strips or tiles of a page."""

    def __init__(self, page: _Directory, size: tuple[int, int], bits: int, planes: int, *, is_raw: bool) -> None:
        width, height = size
        is_tiled = page.has(_TILE_OFFSETS)
        across, rows = (
            (page.one(_TILE_WIDTH), page.one(_TILE_LENGTH))
            if is_tiled
            else (width, min(page.one(_ROWS, height), height))
        )
        if not (across and rows):
            raise TiffError("unreadable", "its strips or tiles have no pixels")
        down = ceil(height / rows)
        count = ceil(width / across) * down * planes
        if count > MAX_PARTS:
            raise TiffError("unreadable", f"it has {count:,} strips or tiles; the limit is {MAX_PARTS:,}")
        if is_tiled and count * across * rows > max(4 * width * height * planes, _MAX_TILE_PIXELS):
            raise TiffError("unreadable", f"its tiles contain more pixels than {width} x {height}")
        offsets_tag, counts_tag = (_TILE_OFFSETS, _TILE_COUNTS) if is_tiled else (_STRIP_OFFSETS, _STRIP_COUNTS)
        self.offsets = page.numbers(offsets_tag, count)
        self.width, self.rows, self.last_rows = across, rows, rows if is_tiled else height - rows * (down - 1)
        row_bytes, per_plane = ceil(across * bits / 8), count // planes
        if is_raw:  # decoders go by the pixels, and some programs write wrong counts
            heights = ([rows] * (per_plane - 1) + [self.last_rows]) * planes
            self.counts: Sequence[int] = [row_bytes * height for height in heights]
        else:
            self.counts = page.numbers(counts_tag, count)
        self._check(len(page.data))
        self.decoder_bytes = 0 if is_raw else max(self.counts) + row_bytes * rows
        self.tags: dict[int, Sequence[int]] = {offsets_tag: self.offsets, counts_tag: self.counts}
        self.tags |= {_TILE_WIDTH: [across], _TILE_LENGTH: [rows]} if is_tiled else {_ROWS: [rows]}

    def _check(self, length: int) -> None:
        """Refuses strips that lie outside the file, or that overlap, so that a small file would be much to decode."""
        if min(self.offsets) < 8:
            raise TiffError("unreadable", "a strip or tile lies in its header")
        if any(offset + count > length for offset, count in zip(self.offsets, self.counts, strict=True)):
            raise TiffError("truncated", "a strip or tile is cut off")
        if sum(self.counts) > length:
            raise TiffError("unreadable", "its strips or tiles overlap")


def _check_jpeg(page: _Directory, blocks: _Blocks) -> None:
    """Adds the shared tables; refuses JPEG data in several scans, each of which is a pass over all pixels."""
    if size := page.count(_JPEG_TABLES):
        if size > _MAX_TABLE_BYTES:
            raise TiffError("unreadable", f"its JPEG tables have {size:,} bytes")
        tables = page.numbers(_JPEG_TABLES, size)
        blocks.tags[_JPEG_TABLES] = [value & 0xFF for value in tables]
        if jpeg_structure(bytes(blocks.tags[_JPEG_TABLES])).scans:
            raise TiffError("unreadable", "its JPEG tables contain pixels")
    parts, last = 0, len(blocks.offsets) - 1
    for index, (offset, count) in enumerate(zip(blocks.offsets, blocks.counts, strict=True)):
        found = jpeg_structure(page.data[offset : offset + count])
        # Memory of the decoder would remain as it is where the JPEG data have fewer pixels.
        rows = blocks.last_rows if index == last else blocks.rows
        if found.size[0] != blocks.width or not rows <= found.size[1] <= blocks.rows:
            raise TiffError("unreadable", f"its JPEG data have {found.size[0]} x {found.size[1]} pixels")
        parts += found.parts
        if found.is_buffered or found.scans > 1:
            raise TiffError("unsupported", "its JPEG data are progressive")
        if parts > 4 * MAX_PARTS:
            raise TiffError("unreadable", f"its JPEG data have more than {4 * MAX_PARTS:,} parts")
