"""Photos of honest clients, and images that attack a decoder."""

import base64
import hashlib
import io
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

MAX_PIXELS = 20_000_000
"""The pixel limit of the service under test; the largest canvases are just within or beyond it."""


class Photo(NamedTuple):
    """An encoded image and its digest."""

    data: bytes
    digest: str

    @classmethod
    def of(cls, data: bytes) -> "Photo":
        return cls(data, hashlib.sha256(data).hexdigest())

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()


def make_photo(number: int, *, side: int = 96) -> Photo:
    """Returns a JPEG of some shapes on grey, the same for a number in every call."""
    random = Random(number)
    image = Image.new("RGB", (side, side), (128, 128, 128))
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y, size = random.randrange(side // 2), random.randrange(side // 2), random.randrange(side // 4, side // 2)
        colour = (random.randrange(256), random.randrange(256), random.randrange(256))
        draw.ellipse((x, y, x + size, y + size), fill=colour)
    return Photo.of(_encode(image, "JPEG", quality=90))


def make_grained_photo(number: int, *, side: int = 640) -> Photo:
    """Returns a JPEG of about 100 KB, as a phone sends it."""
    smooth = np.asarray(Image.open(io.BytesIO(make_photo(number).data)).resize((side, side)), np.float32)
    grain = np.random.default_rng(number).normal(0, 6, (side, side, 1))
    pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
    return Photo.of(_encode(Image.fromarray(pixels), "JPEG", quality=85))


def _encode(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def _png(width: int, height: int, *, depth: int, rows: int, extra: bytes = b"") -> bytes:
    """Returns a grey PNG of black rows; with fewer rows than its height it is truncated."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    row = bytes(1 + (width * depth + 7) // 8)
    pixels = zlib.compress(row * rows, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def _png_text_bomb() -> bytes:
    text = b"comment\0\0" + zlib.compress(bytes(50_000_000), 9)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    return _png(64, 64, depth=8, rows=64, extra=chunk)


def _many_scans(side: int, repeats: int) -> bytes:
    """Returns a progressive JPEG whose last scan is repeated: each costs a pass over all pixels."""
    data = _encode(Image.new("RGB", (side, side), "red"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * repeats + data[-2:]


def _animated(format: str) -> bytes:
    frames = [Image.new("RGB", (64, 64), (n, 0, 0)) for n in range(60)]
    return _encode(frames[0], format, save_all=True, append_images=frames[1:])


def _canvas(format: str, side: int, **options: Any) -> bytes:
    return _encode(Image.new("RGBA" if format == "WEBP" else "RGB", (side, side), "white"), format, **options)


_SIDE = 4400
"""Side of a square canvas just within the pixel limit."""
_MAKERS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"<svg xmlns='http://www.w3.org/2000/svg' width='9e9' height='9e9'/>",
    "PNG bomb": lambda: _png(60_000, 60_000, depth=1, rows=60_000),
    "PNG of one column": lambda: _png(1, 19_999, depth=16, rows=19_999),
    "PNG canvas": lambda: _png(_SIDE, _SIDE, depth=8, rows=_SIDE),
    "PNG canvas of 16 bits": lambda: _png(_SIDE, _SIDE, depth=16, rows=_SIDE),
    "PNG without its rows": lambda: _png(_SIDE, _SIDE, depth=8, rows=10),
    "PNG text bomb": _png_text_bomb,
    "WebP canvas": lambda: _canvas("WEBP", _SIDE, lossless=True),
    "WebP beyond the limit": lambda: _canvas("WEBP", 5_000, lossless=True),
    "JPEG canvas": lambda: _canvas("JPEG", _SIDE),
    "JPEG of 90 scans": lambda: _many_scans(1000, 80),
    "JPEG of 900 scans": lambda: _many_scans(1000, 900),
    "long GIF": lambda: _animated("GIF"),
    "long WebP": lambda: _animated("WEBP"),
    "BMP": lambda: _canvas("BMP", 200),
}


class HostileImages:
    """Makes images that attack a decoder: fixed ones, truncated ones and random mutations of good ones."""

    def __init__(self) -> None:
        self._fixed = {name: make() for name, make in _MAKERS.items()}
        picture = Image.open(io.BytesIO(make_photo(0).data))
        self._good = [_encode(picture, format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP")]
        self._good.append(_encode(picture, "JPEG", progressive=True))

    def choose(self, random: Random) -> tuple[str, bytes]:
        """Returns an image and the name of its kind."""
        kind = random.choice(["fixed", "truncated", "mutated", "random"])
        if kind == "fixed":
            return random.choice(sorted(self._fixed.items()))
        if kind == "random":
            return kind, random.randbytes(random.randrange(1, 5000))
        data = random.choice(self._good)
        if kind == "truncated":
            return kind, data[: random.randrange(1, len(data))]
        changed = bytearray(data)
        for _ in range(random.choice((1, 3, 30))):
            changed[random.randrange(len(changed))] = random.randrange(256)
        return kind, bytes(changed)
