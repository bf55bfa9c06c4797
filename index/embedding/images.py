"""Bytes to pixels: the one image path of evaluation, ingestion and serving.

What was measured is what is served only if every caller decodes, rotates, resizes and crops with the same code, so
nothing else in the project opens an image for the embedder.
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, floor
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from pydantic import Field

from index._util.models import Frozen
from index.embedding.image_headers import (
    DEFAULT_LIMITS,
    SEND_FILE,
    STRIP_PIXELS,
    ImageError,
    ImageLimits,
    Reason,
    check_bytes,
    decode_cost,
    default_decode_bytes,
    hold_memory,
    read_header,
    reduced_scale,
)

__all__ = [
    "DEFAULT_LIMITS",
    "SEND_FILE",
    "Box",
    "EncodedImage",
    "Fit",
    "ImageError",
    "ImageLimits",
    "Preprocessing",
    "Reason",
    "Region",
    "decode",
    "decode_cost",
    "decode_for_model",
    "default_decode_bytes",
    "digest",
    "hold_memory",
    "load_part",
    "load_pixels",
    "model_side",
    "read_file",
    "thumbnail",
]

_MIN_SIDE = 256
"""Minimum side that photos are decoded for: thumbnails of 320 pixels are made from the same decoded image."""


_MAX_EXIF_BYTES = 1_000_000
"""EXIF data beyond which the orientation is not read. Pillow makes a Python object of every number that a tag has, and
a file of 20 MB may be a single tag: it took 5 seconds and 440 MiB. Cameras write up to 64 kB."""


class _Orientation(NamedTuple):
    """How the stored pixels are transposed to the upright image, and where the upright sides are in the file."""

    method: Image.Transpose | None = None
    left_from_end: bool = False
    """The left side of the upright image is the right side or the bottom of the stored one."""
    top_from_end: bool = False
    swaps_axes: bool = False
    """The rows of the upright image are the columns of the stored one."""


_UPRIGHT = _Orientation()
_ORIENTATIONS = {
    2: _Orientation(Image.Transpose.FLIP_LEFT_RIGHT, True, False),
    3: _Orientation(Image.Transpose.ROTATE_180, True, True),
    4: _Orientation(Image.Transpose.FLIP_TOP_BOTTOM, False, True),
    5: _Orientation(Image.Transpose.TRANSPOSE, False, False, True),
    6: _Orientation(Image.Transpose.ROTATE_270, True, False, True),
    7: _Orientation(Image.Transpose.TRANSVERSE, True, True, True),
    8: _Orientation(Image.Transpose.ROTATE_90, False, True, True),
}
"""By the value of the EXIF tag."""

Box = tuple[float, float, float, float]
Fit = Literal["crop", "pad"]


class Region(NamedTuple):
    """A part of an upright photo, in shares of its sides or in pixels."""

    left: float
    top: float
    right: float
    bottom: float
    in_pixels: bool = False

    def box(self, size: tuple[int, int]) -> Box:
        """Returns the part of a photo of this size, in pixels; raises ImageError if none of it is in the photo."""
        scale = (1, 1) if self.in_pixels else size
        left, top, right, bottom = (
            min(round(edge * factor), side) for edge, factor, side in zip(self[:4], scale * 2, size * 2, strict=True)
        )
        if left >= right or top >= bottom:
            raise ImageError("empty", f"The box {self[:4]} contains no pixel of the photo.", "Send a larger box.")
        return left, top, right, bottom


class Preprocessing(Frozen):
    """A bundle's rule from an upright RGB image to the model's square input."""

    resize: int = Field(gt=0, description="with crop: length of the short side after resizing")
    input_size: int = Field(gt=0, description="side of the model's input")
    fit: Fit = Field(
        default="crop",
        description="crop: resize the short side and cut out the centre; pad: resize the long side to input_size and "
        "fill up with white, so that nothing of a tall or wide photo is lost",
    )
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"

    @property
    def decoded_side(self) -> int:
        """The length that the short side of a photo needs at least before it is resized."""
        return self.resize if self.fit == "crop" else self.input_size

    @property
    def filter(self) -> Image.Resampling:
        return Image.Resampling.BICUBIC if self.interpolation == "bicubic" else Image.Resampling.BILINEAR

    def apply(self, image: Image.Image, part: Box | None = None) -> NDArray[np.uint8]:
        """Returns pixels of shape (input_size, input_size, 3), of a part of the image if one is given."""
        part = part or (0, 0, *image.size)
        return self._crop(image, part) if self.fit == "crop" else self._pad(image, part)

    def _pad(self, image: Image.Image, part: Box) -> NDArray[np.uint8]:
        across, down = part[2] - part[0], part[3] - part[1]
        scale = self.input_size / max(across, down)
        width, height = (max(1, round(length * scale)) for length in (across, down))
        square = Image.new("RGB", (self.input_size, self.input_size), "white")
        place = (self.input_size - width) // 2, (self.input_size - height) // 2
        square.paste(image.resize((width, height), self.filter, box=part), place)
        return np.asarray(square, dtype=np.uint8)

    def _crop(self, image: Image.Image, part: Box) -> NDArray[np.uint8]:
        west, north, east, south = part
        across, down = east - west, south - north
        scale = self.resize / min(across, down)
        width = max(self.input_size, round(across * scale))
        height = max(self.input_size, round(down * scale))
        left, top = (width - self.input_size) // 2, (height - self.input_size) // 2
        if image.size == (width, height) == (across, down):
            return np.asarray(image.crop((left, top, left + self.input_size, top + self.input_size)), dtype=np.uint8)
        # Only the crop is resampled: the same pixels as resizing the whole image, and an image of 1 x 60,000 pixels
        # does not grow to gigabytes on the way.
        x, y, side = across / width, down / height, self.input_size
        box = (west + left * x, north + top * y, west + (left + side) * x, north + (top + side) * y)
        return np.asarray(image.resize((side, side), self.filter, box=box), dtype=np.uint8)


def digest(data: bytes) -> str:
    """Returns the SHA-256 digest of an image's bytes, by which images are deduplicated."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: Path, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Returns a photo's bytes or raises ImageError; a file over the limit is not read."""
    try:
        check_bytes(path.stat().st_size, limits)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        cause = getattr(error, "strerror", None) or error
        raise ImageError("unreadable", f"{path} cannot be read: {cause}.", "Check the path.") from error


def load_pixels(data: bytes, rule: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS) -> NDArray[np.uint8]:
    """Decodes an image into the model's input."""
    return rule.apply(*decode_for_model(rule, data, limits))


def load_part(data: bytes, rule: Preprocessing, box: Box, limits: ImageLimits = DEFAULT_LIMITS) -> NDArray[np.uint8]:
    """Decodes the part of an image within a box, whose sides are shares from 0 to 1, into the model's input."""
    image = EncodedImage(data, limits)
    return rule.apply(*image.read(Region(*box).box(image.size), rule.decoded_side))


def decode(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decodes an image into upright RGB, or raises ImageError."""
    return EncodedImage(data, limits).read()[0]


def decode_for_model(
    rule: Preprocessing, data: bytes, limits: ImageLimits = DEFAULT_LIMITS, region: Region | None = None
) -> tuple[Image.Image, Box]:
    """Decodes an image, or a region of it, for `rule`; returns it and the box of the photo or region in it.

    A large JPEG is decoded at a reduced scale: the box is smaller than the image where a side is not a multiple of it.
    """
    image = EncodedImage(data, limits)
    return image.read(region and region.box(image.size), model_side(rule))


def model_side(rule: Preprocessing) -> int:
    """Returns the length that decode_for_model decodes the short side for."""
    return max(_MIN_SIDE, rule.decoded_side)


class EncodedImage:
    """An image whose header has been read and checked, and whose pixels are decoded by one call of `read`.

    `size` is that of the upright image. Only a JPEG is decoded lazily: the other formats have a single scale, and a PNG
    may store its orientation after the pixels.
    """

    def __init__(self, data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        check_bytes(len(data), limits)
        header = read_header(data, limits)
        self._image = image = header.open(data)
        width, height = image.size
        if not header.jpeg:
            with _image_errors():
                image.load()
        # Pillow would rotate a TIFF while loading it, so that the tag is not passed on to it.
        self._orientation = (
            _ORIENTATIONS.get(header.page.orientation, _UPRIGHT) if header.page else _read_orientation(image)
        )
        self.size = (height, width) if self._orientation.swaps_axes else (width, height)

    def read(self, part: Box | None = None, side: float | None = None) -> tuple[Image.Image, Box]:
        """Returns the upright RGB pixels of a part, or of the whole image, and the box of the part in them.

        `side` is the length that the sides of the part will be resized to: a JPEG is decoded at the smallest scale
        that has enough pixels for it. The outermost pixels may then lie partly outside the part.
        """
        part = part or (0, 0, *self.size)
        with _image_errors():
            scale = self._reduce(min(part[2] - part[0], part[3] - part[1]) / side if side else 1)
            # Without a reference of its own, so that each step frees the pixels of the one before.
            image = self.__dict__.pop("_image")
            image.load()
            box = [edge / scale for edge in self._stored_box(part)]
            outer = (floor(box[0]), floor(box[1]), ceil(box[2]), ceil(box[3]))
            # Crop before transposing and converting, which both take longer.
            if outer != (0, 0, *image.size):
                image = image.crop(outer)
            if self._orientation.method is not None:
                image = image.transpose(self._orientation.method)
            upright = _to_rgb(image)
        left, top, right, bottom = (box[i] - outer[i % 2] for i in range(4))
        if self._orientation.swaps_axes:
            left, top, right, bottom = top, left, bottom, right
        if self._orientation.left_from_end:
            left, right = upright.width - right, upright.width - left
        if self._orientation.top_from_end:
            top, bottom = upright.height - bottom, upright.height - top
        return upright, (left, top, right, bottom)

    def _reduce(self, excess: float) -> int:
        """Selects and returns the scale of a part that has `excess` times the pixels per side that it is resized to."""
        scale = reduced_scale(excess)
        width, height = self._image.size
        reduced = scale > 1 and self._image.draft(None, (width // scale, height // scale))
        return scale if reduced else 1

    def _stored_box(self, part: Box) -> Box:
        """Returns the box of an upright part in the stored image at full scale."""
        left, top, right, bottom = part
        if self._orientation.left_from_end:
            left, right = self.size[0] - right, self.size[0] - left
        if self._orientation.top_from_end:
            top, bottom = self.size[1] - bottom, self.size[1] - top
        return (top, left, bottom, right) if self._orientation.swaps_axes else (left, top, right, bottom)


@contextmanager
def _image_errors() -> Iterator[None]:
    """Converts whatever a decoder raises to ImageError."""
    try:
        yield
    except Exception as error:  # as in _open: SyntaxError, OSError, struct.error, ValueError...
        reason: Reason = "truncated" if "truncated" in str(error).lower() else "unreadable"
        raise ImageError(reason, f"The image is {reason}: {error}.") from error


def _read_orientation(image: Image.Image) -> _Orientation:
    """Returns the orientation of the EXIF data; a photo with damaged or enormous EXIF data is taken as upright."""
    if len(image.info.get("exif") or b"") > _MAX_EXIF_BYTES:
        return _UPRIGHT
    try:
        return _ORIENTATIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1), _UPRIGHT)
    except Exception:  # the parser raises many types on hostile data
        return _UPRIGHT


def _to_rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB on white: shops photograph on white, and a transparent background must not turn black."""
    is_deep = image.mode.startswith("I")  # 16-bit grey, which Pillow would clip rather than scale
    if is_deep or image.has_transparency_data:
        opaque = Image.new("RGB", image.size)
        rows = max(1, STRIP_PIXELS // image.width)
        for top in range(0, image.height, rows):
            strip = image.crop((0, top, image.width, min(top + rows, image.height)))
            opaque.paste(_scale_to_bytes(strip) if is_deep else _composite_on_white(strip), (0, top))
        return opaque
    return image if image.mode == "RGB" else image.convert("RGB")


def _scale_to_bytes(strip: Image.Image) -> Image.Image:
    values = np.asarray(strip).astype(np.uint32)
    grey = (values >> 8).astype(np.uint8)
    grey[values == strip.info.get("transparency")] = 255
    return Image.fromarray(grey)


def _composite_on_white(strip: Image.Image) -> Image.Image:
    strip = strip.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB")


def thumbnail(image: Image.Image, side: int = 320) -> bytes:
    """Returns a small JPEG for display; it is never embedded."""
    scale = min(1.0, side / max(image.size))
    size = (max(1, round(scale * image.width)), max(1, round(scale * image.height)))
    small = image if size == image.size else image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()
