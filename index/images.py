"""Bytes to pixels: the one image path of evaluation, re-indexing and serving.

What was measured is what is served only if every caller decodes, turns, resizes and crops with the same
code, so nothing else in the project opens an image for the embedder.
"""

import hashlib
import io
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field

from index.errors import LookalikeError
from index.items import Frozen

Reason = Literal["empty", "too_large", "too_many_pixels", "unsupported", "truncated", "unreadable"]
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# Our own limit is checked from the header on every image; Pillow's would only warn, or stop short of it.
Image.MAX_IMAGE_PIXELS = None

_REMEDY = "Send a whole JPEG, PNG, WebP, GIF or BMP file."


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

    def apply(self, image: Image.Image) -> NDArray[np.uint8]:
        """Pixels of shape (input_size, input_size, 3)."""
        scale = self.resize / min(image.size)
        size = (
            max(self.input_size, round(image.width * scale)),
            max(self.input_size, round(image.height * scale)),
        )
        filter_ = Image.Resampling.BICUBIC if self.interpolation == "bicubic" else Image.Resampling.BILINEAR
        resized = image if image.size == size else image.resize(size, filter_)
        left, top = (size[0] - self.input_size) // 2, (size[1] - self.input_size) // 2
        cropped = resized.crop((left, top, left + self.input_size, top + self.input_size))
        return np.asarray(cropped, dtype=np.uint8)


DEFAULT_LIMITS = ImageLimits()


def digest(data: bytes) -> str:
    """The name of an image's content: equal bytes are embedded once."""
    return hashlib.sha256(data).hexdigest()


def decode(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """An upright RGB image, or an ImageError that names the reason."""
    if not data:
        raise ImageError("empty", "The image is empty (0 bytes).")
    if len(data) > limits.max_bytes:
        raise ImageError(
            "too_large",
            f"The image has {len(data):,} bytes; the limit is {limits.max_bytes:,}.",
            "Send a smaller file.",
        )
    image = _opened(data)
    if image.width * image.height > limits.max_pixels:
        raise ImageError(
            "too_many_pixels",
            f"The image has {image.width} x {image.height} pixels; the limit is {limits.max_pixels:,}.",
            "Send a smaller picture.",
        )
    try:
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # as above: SyntaxError, OSError, struct.error, ValueError...
        reason: Reason = "truncated" if "truncated" in str(error) else "unreadable"
        raise ImageError(reason, f"The image is {reason}: {error}.") from error


def _opened(data: bytes) -> Image.Image:
    """The image with its header read and no pixel decoded."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError("unsupported", "The bytes are not an image of a known format.") from None
    except Exception as error:  # Pillow's parsers raise many types on hostile headers
        raise ImageError("unreadable", f"The image's header cannot be read: {error}.") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB on white: shops photograph on white, and a transparent product must not turn black."""
    if image.mode.startswith("I;16") or image.mode == "I":
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def thumbnail(image: Image.Image, side: int = 320) -> bytes:
    """A small JPEG for people to look at; never used for embedding."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85, optimize=True)
    return out.getvalue()
