"""Bytes to pixels: the one image path of evaluation, re-indexing and serving.

What was measured is what is served only if every caller decodes, turns, resizes and crops with the same
code, so nothing else in the project opens an image for the embedder.
"""

import hashlib
import io
from math import ceil
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from pydantic import Field

from index.errors import LookalikeError
from index.items import Frozen

Reason = Literal["empty", "too_large", "too_many_pixels", "unsupported", "truncated", "unreadable", "unreachable"]
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# Our own, lower limit is checked from the header of every image. Pillow's refuses twice its figure, and is kept for
# the formats whose decoder takes memory for all pixels as soon as the header is read.
_MOST_PIXELS = 500_000_000
Image.MAX_IMAGE_PIXELS = _MOST_PIXELS // 2

_REMEDY = "Send a whole JPEG, PNG, WebP, GIF or BMP file."
_SPARE = 1.25
_LEAST_SIDE = 320
"""A large JPEG is decoded at a reduced scale only while its short side stays this many times the resized one: the
inverse cosine transform then drops only detail that resizing would have averaged away. And it stays this many pixels,
of which thumbnails are made."""
_MOST_SCANS = 100
"""Of a progressive JPEG. Encoders write about ten; each costs a pass over all pixels for a few bytes of file."""
_TURNS = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT, True, False),
    3: (Image.Transpose.ROTATE_180, True, True),
    4: (Image.Transpose.FLIP_TOP_BOTTOM, False, True),
    5: (Image.Transpose.TRANSPOSE, False, False),
    6: (Image.Transpose.ROTATE_270, True, False),
    7: (Image.Transpose.TRANSVERSE, True, True),
    8: (Image.Transpose.ROTATE_90, False, True),
}
"""What sets a photo upright, by its EXIF orientation; and whether its left and its top were an end of the file's
picture, that is its right or its bottom."""
_LYING = 5
"""The first of the orientations whose rows are the file's columns."""

Box = tuple[float, float, float, float]


class ImageError(LookalikeError):
    """An image that cannot be used, with the reason as a word for machines."""

    kind = "image"

    def __init__(self, reason: Reason, problem: str, remedy: str = _REMEDY) -> None:
        super().__init__(problem, remedy)
        self.reason: Reason = reason


class ImageLimits(Frozen):
    """What is refused before a single pixel is decoded."""

    max_bytes: int = Field(default=20 * 1024 * 1024, gt=0)
    max_pixels: int = Field(default=50_000_000, gt=0)


class Preprocessing(Frozen):
    """The bundle's rule from an upright RGB image to the model's input: short side, then centre crop."""

    resize: int = Field(gt=0, description="length of the short side after resizing")
    input_size: int = Field(gt=0, description="side of the square centre crop")
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"

    def apply(self, image: Image.Image, part: Box | None = None) -> NDArray[np.uint8]:
        """Pixels of shape (input_size, input_size, 3), of a part of the image if one is given."""
        west, north, east, south = part or (0, 0, *image.size)
        across, down = east - west, south - north
        scale = self.resize / min(across, down)
        width = max(self.input_size, round(across * scale))
        height = max(self.input_size, round(down * scale))
        left, top = (width - self.input_size) // 2, (height - self.input_size) // 2
        if image.size == (width, height) == (across, down):
            return np.asarray(image.crop((left, top, left + self.input_size, top + self.input_size)), dtype=np.uint8)
        # Only the crop is resampled, out of the whole image: the same pixels as resizing all of it, and a sliver of
        # 1 x 60,000 pixels does not become a picture of gigabytes on the way.
        x, y, side = across / width, down / height, self.input_size
        box = (west + left * x, north + top * y, west + (left + side) * x, north + (top + side) * y)
        filter_ = Image.Resampling.BICUBIC if self.interpolation == "bicubic" else Image.Resampling.BILINEAR
        return np.asarray(image.resize((side, side), filter_, box=box), dtype=np.uint8)


DEFAULT_LIMITS = ImageLimits()


def digest(data: bytes) -> str:
    """The name of an image's content: equal bytes are embedded once."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: Path, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """A photo's bytes, or an ImageError; one beyond the limit is not read at all."""
    try:
        _check_bytes(path.stat().st_size, limits)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        told = getattr(error, "strerror", None) or error
        raise ImageError("unreadable", f"{path} cannot be read: {told}.", "Check the path.") from error


def load_pixels(data: bytes, rule: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS) -> NDArray[np.uint8]:
    """An image's bytes as the model's input."""
    return rule.apply(*decode_for(rule, data, limits))


def decode(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """An upright RGB image, or an ImageError that names the reason."""
    return _decoded(data, limits, 0)[0]


def decode_for(rule: Preprocessing, data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[Image.Image, Box]:
    """The same as `rule` needs it, a large JPEG at a reduced scale; and the part of it that is the photo: its last
    pixels lie partly beyond it where a side is no multiple of the scale.
    """
    return _decoded(data, limits, max(_LEAST_SIDE, ceil(_SPARE * rule.resize)))


def _decoded(data: bytes, limits: ImageLimits, least_side: int) -> tuple[Image.Image, Box]:
    _check_bytes(len(data), limits)
    image = _opened(data)
    if image.width * image.height > limits.max_pixels:
        raise _too_many_pixels(f"{image.width} x {image.height} pixels; the limit is {limits.max_pixels:,}")
    try:
        reduced = image.draft(None, (least_side, least_side)) if least_side else None
        image.load()
        upright, part = _upright(image, reduced[1][2:] if reduced else image.size)
        return _to_rgb(upright), part
    except Exception as error:  # as in _opened: SyntaxError, OSError, struct.error, ValueError...
        reason: Reason = "truncated" if "truncated" in str(error).lower() else "unreadable"
        raise ImageError(reason, f"The image is {reason}: {error}.") from error


def _check_bytes(count: int, limits: ImageLimits) -> None:
    if not count:
        raise ImageError("empty", "The image is empty (0 bytes).")
    if count > limits.max_bytes:
        raise ImageError(
            "too_large", f"The image has {count:,} bytes; the limit is {limits.max_bytes:,}.", "Send a smaller file."
        )


def _too_many_pixels(what: str) -> ImageError:
    return ImageError("too_many_pixels", f"The image has {what}.", "Send a smaller picture.")


def _opened(data: bytes) -> Image.Image:
    """The image with its header read and no pixel decoded."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_many_pixels(f"more than {_MOST_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ImageError("unsupported", "The bytes are not an image of a known format.") from None
    except Exception as error:  # Pillow's parsers raise many types on hostile headers
        raise ImageError("unreadable", f"The image's header cannot be read: {error}.") from error
    # Within compressed data FF is never followed by DA, so this counts scans, and those of embedded previews.
    if image.format in ("JPEG", "MPO") and (scans := data.count(b"\xff\xda")) > _MOST_SCANS:
        raise ImageError("unreadable", f"The image has {scans} scans; at most {_MOST_SCANS} are decoded.")
    return image


def _upright(image: Image.Image, size: tuple[float, float]) -> tuple[Image.Image, Box]:
    """Turned as the camera noted, and the part of it that was the first `size` pixels. Damaged notes are no reason to
    refuse a photo that can be seen.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        turn = _TURNS.get(orientation)
    except Exception:  # the parser raises many types on hostile notes
        turn = None
    if turn is None:
        return image, (0, 0, *size)
    method, left_was_end, top_was_end = turn
    turned = image.transpose(method)
    across, down = size[::-1] if orientation >= _LYING else size
    left = turned.width - across if left_was_end else 0
    top = turned.height - down if top_was_end else 0
    return turned, (left, top, left + across, top + down)


_STRIP = 256
"""Rows that are laid on white at a time: of a large photo as a whole it would take four more copies in memory."""


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB on white: shops photograph on white, and a transparent product must not turn black."""
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip rather than scale
        values = np.asarray(image).astype(np.uint32)
        grey = (values >> 8).astype(np.uint8)
        grey[values == image.info.get("transparency")] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        whole = Image.new("RGB", image.size)
        for top in range(0, image.height, _STRIP):
            strip = image.crop((0, top, image.width, min(top + _STRIP, image.height))).convert("RGBA")
            white = Image.new("RGBA", strip.size, "white")
            whole.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
        return whole
    return image if image.mode == "RGB" else image.convert("RGB")


def thumbnail(image: Image.Image, side: int = 320) -> bytes:
    """A small JPEG for people to look at; never used for embedding."""
    scale = min(1.0, side / max(image.size))
    size = (max(1, round(scale * image.width)), max(1, round(scale * image.height)))
    small = image if size == image.size else image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()
