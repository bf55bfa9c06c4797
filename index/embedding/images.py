"""Bytes to pixels: the one image path of evaluation, ingestion and serving.

What was measured is what is served only if every caller decodes, rotates, resizes and crops with the same code, so
nothing else in the project opens an image for the embedder.
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import ceil, floor
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from pydantic import Field

from index._util.byte_budget import ByteBudget
from index._util.models import Frozen
from index._util.system import memory_limit
from index.embedding.avif import av1_frames
from index.embedding.image_headers import MAX_PARTS, JpegScans, count_parts, jpeg_scans, recognise, webp_canvas
from index.errors import LookalikeError

Reason = Literal["empty", "too_large", "too_many_pixels", "unsupported", "truncated", "unreadable", "unreachable"]
# Our own, lower limit is checked from the header of every image; Pillow's, which raises at twice its value, is a second
# line of defence.
_MAX_PIXELS = 500_000_000
Image.MAX_IMAGE_PIXELS = _MAX_PIXELS // 2

_REMEDY = "Send a whole JPEG, PNG, WebP, AVIF, HEIC, GIF or BMP file."
_SUPPORTED = ("JPEG", "PNG", "WebP", "AVIF", "HEIC", "GIF", "BMP")
_OVERSAMPLING = 1.25
"""A large JPEG is decoded at a reduced scale only while its sides stay this many times the length that they are resized
to: the inverse cosine transform then drops only detail that resizing would have averaged away. On sharp photos of 160
to 350 pixels the result differs by 1.6 levels of 255 on average at half scale, less than that of another resize filter
(1.9), while at 1.0 it differs by more (2.3)."""
_MIN_SIDE = 256
"""Minimum side that photos are decoded for: thumbnails of 320 pixels are made from the same decoded image."""
_MAX_SCANS = 100
_MAX_SCANNED_PIXELS = 500_000_000
"""Limits of a progressive JPEG. Encoders write about ten scans; each costs a pass over all pixels for a few bytes of
file."""
_MAX_RUN_LENGTH_BYTES = 1_000_000
"""Limit of a BMP with run-length encoding, which Pillow decodes in Python."""


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


class ImageError(LookalikeError):
    """An image that cannot be used; `reason` is the machine-readable cause."""

    kind = "image"

    def __init__(self, reason: Reason, problem: str, remedy: str = _REMEDY) -> None:
        super().__init__(problem, remedy)
        self.reason: Reason = reason


class ImageLimits(Frozen):
    """Limits that are checked before any pixel is decoded."""

    max_bytes: int = Field(default=20 * 1024 * 1024, gt=0)
    max_pixels: int = Field(default=50_000_000, gt=0)
    max_side: int = Field(default=20_000, gt=0, description="longest side in pixels: each row takes memory of its own")


class Preprocessing(Frozen):
    """A bundle's rule from an upright RGB image to the model's input: resize the short side, then crop the centre."""

    resize: int = Field(gt=0, description="length of the short side after resizing")
    input_size: int = Field(gt=0, description="side of the square centre crop")
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"

    def apply(self, image: Image.Image, part: Box | None = None) -> NDArray[np.uint8]:
        """Returns pixels of shape (input_size, input_size, 3), of a part of the image if one is given."""
        west, north, east, south = part or (0, 0, *image.size)
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
        filter_ = Image.Resampling.BICUBIC if self.interpolation == "bicubic" else Image.Resampling.BILINEAR
        return np.asarray(image.resize((side, side), filter_, box=box), dtype=np.uint8)


DEFAULT_LIMITS = ImageLimits()


def digest(data: bytes) -> str:
    """Returns the SHA-256 digest of an image's bytes, by which images are deduplicated."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: Path, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Returns a photo's bytes or raises ImageError; a file over the limit is not read."""
    try:
        _check_bytes(path.stat().st_size, limits)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        cause = getattr(error, "strerror", None) or error
        raise ImageError("unreadable", f"{path} cannot be read: {cause}.", "Check the path.") from error


def load_pixels(data: bytes, rule: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS) -> NDArray[np.uint8]:
    """Decodes an image into the model's input."""
    return rule.apply(*decode_for_model(rule, data, limits))


def decode(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decodes an image into upright RGB, or raises ImageError."""
    return EncodedImage(data, limits).read()[0]


def decode_for_model(rule: Preprocessing, data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[Image.Image, Box]:
    """Decodes an image for `rule`, a large JPEG at a reduced scale; returns it and the box of the photo in it.

    The box is smaller than the image where a side is not a multiple of the scale.
    """
    return EncodedImage(data, limits).read(side=model_side(rule))


def model_side(rule: Preprocessing) -> int:
    """Returns the length that decode_for_model decodes the short side for."""
    return max(_MIN_SIDE, rule.resize)


def decode_cost(data: bytes, limits: ImageLimits = DEFAULT_LIMITS, side: float | None = None) -> int:
    """Returns an upper bound of the bytes of memory that decoding takes, from the header alone, or raises ImageError.

    `side` is the length that the sides of the whole image will be resized to, as in EncodedImage.read.
    """
    _check_bytes(len(data), limits)
    header = _read_header(data, limits)
    width, height = header.size
    coefficients, strip = 0.0, _STRIP_BYTES
    if header.scans:
        coefficients = 2 * header.scans.samples * width * height if header.scans.is_buffered else 0
        scale = _scale(min(width, height) / side) if side else 1
        width, height, strip = ceil(width / scale), ceil(height / scale), 0
    # While the pixels are transposed, or converted to RGB, there are two copies of them.
    stored = _PIXEL_BYTES.get(header.mode, 4)
    copies = max(2 * stored, stored if header.mode == "RGB" else stored + 4)
    per_pixel = max(copies, _DECODER_PIXEL_BYTES.get(header.format, 0))
    if header.format == "HEIC" and header.image and header.image.info.get("bit_depth", 16) > 8:
        per_pixel = _DEEP_HEIC_PIXEL_BYTES
    working = strip * min(width * height, _STRIP_PIXELS) + _LINE_BYTES * (width + height)
    return int(coefficients + per_pixel * width * height + working + len(data))


@contextmanager
def hold_memory(
    budget: ByteBudget, data: bytes, limits: ImageLimits = DEFAULT_LIMITS, side: float | None = None
) -> Iterator[None]:
    """Waits until the budget has the memory that decoding takes, and holds it for as long as the context.

    Raises ImageError for an image that exceeds the limits or the whole budget.
    """
    cost = decode_cost(data, limits, side)
    if cost > budget.total:
        raise ImageError(
            "too_many_pixels",
            f"Decoding the image takes {cost:,} bytes of memory; the limit is {budget.total:,}.",
            "Send a smaller picture, or a JPEG.",
        )
    with budget.hold(cost):
        yield


def default_decode_bytes() -> int:
    """Returns the memory for decoding photos unless it is configured: half of what the process may use."""
    return memory_limit() // 2


class EncodedImage:
    """An image whose header has been read and checked, and whose pixels are decoded by one call of `read`.

    `size` is that of the upright image. Only a JPEG is decoded lazily: the other formats have a single scale, and a PNG
    may store its orientation after the pixels.
    """

    def __init__(self, data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> None:
        _check_bytes(len(data), limits)
        header = _read_header(data, limits)
        self._image = image = header.image or _open(data, "WEBP")
        width, height = image.size
        if not header.scans:
            with _image_errors():
                image.load()
        self._orientation = _read_orientation(image)
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
        scale = _scale(excess)
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


def _check_bytes(count: int, limits: ImageLimits) -> None:
    if not count:
        raise ImageError("empty", "The image is empty (0 bytes).")
    if count > limits.max_bytes:
        raise ImageError(
            "too_large", f"The image has {count:,} bytes; the limit is {limits.max_bytes:,}.", "Send a smaller file."
        )


def _too_many_pixels(size: str) -> ImageError:
    return ImageError("too_many_pixels", f"The image has {size}.", "Send a smaller picture.")


class _Header(NamedTuple):
    """What is known of an image before its pixels are decoded."""

    format: str
    size: tuple[int, int]
    mode: str
    scans: JpegScans | None = None
    image: Image.Image | None = None
    """Not for WebP, whose decoder allocates memory for all pixels when it is created."""


def _read_header(data: bytes, limits: ImageLimits) -> _Header:
    """Reads the header of an image and checks all limits; decodes no pixel."""
    name = recognise(data)
    if name == "WebP":
        canvas = webp_canvas(data)
        if canvas is None:
            raise ImageError("unreadable", "The image's header cannot be read: it has no canvas.")
        _check_size(canvas, limits)
        return _Header(name, canvas, "RGBA")
    if name not in _SUPPORTED:
        raise _unsupported(name)
    scans = jpeg_scans(data) if name == "JPEG" else None
    if (scans.parts if scans else count_parts(data, name)) > MAX_PARTS:
        raise ImageError("unreadable", f"The image has more than {MAX_PARTS:,} parts.", "Save it again, as a JPEG.")
    if name == "HEIC":
        _register_heic()
    image = _open(data, "HEIF" if name == "HEIC" else "JPEG" if scans else name)
    _check_size(image.size, limits)
    if scans:
        _check_scans(scans.count, image.size)
    if name == "AVIF":
        _check_frames(data, image.size)
    if image.tile and image.tile[0][0] == "bmp_rle" and len(data) > _MAX_RUN_LENGTH_BYTES:
        limit = f"the limit with run-length encoding is {_MAX_RUN_LENGTH_BYTES:,}"
        raise ImageError("too_large", f"The BMP has {len(data):,} bytes; {limit}.", "Save it as a JPEG.")
    return _Header(name, image.size, image.mode, scans, image)


def _open(data: bytes, kind: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=(kind,))
    except Image.DecompressionBombError:
        raise _too_many_pixels(f"more than {_MAX_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ImageError("unreadable", f"The image's header is not that of a {recognise(data)} file.") from None
    except Exception as error:  # Pillow's parsers raise many types on hostile headers
        raise ImageError("unreadable", f"The image's header cannot be read: {error}.") from error


def _unsupported(name: str | None) -> ImageError:
    if name is None:
        return ImageError("unsupported", "The bytes are not an image of a known format.")
    article = "an" if name[0] in "AEIOU" or name == "SVG" else "a"
    return ImageError("unsupported", f"This is {article} {name} file, which is not supported.", "Convert it to JPEG.")


@cache
def _register_heic() -> None:
    """Registers the decoder of HEIC with Pillow, which an extra installs."""
    try:
        import pillow_heif
    except ImportError:
        raise ImageError(
            "unsupported",
            "This is a HEIC photo, and HEIC support is not installed.",
            "Convert it to JPEG, or install lookalike[heic].",
        ) from None
    pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise _too_many_pixels(f"{width} x {height} pixels; the limit is {limits.max_pixels:,}")
    if max(size) > limits.max_side:
        raise _too_many_pixels(f"{width} x {height} pixels; the limit of a side is {limits.max_side:,}")


def _check_scans(count: int, size: tuple[int, int]) -> None:
    limit = min(_MAX_SCANS, max(1, _MAX_SCANNED_PIXELS // max(1, size[0] * size[1])))
    if count > limit:
        raise ImageError(
            "unreadable",
            f"The image has {count} scans; the limit at {size[0]} x {size[1]} pixels is {limit}.",
            "Save it again, as a JPEG that is not progressive.",
        )


def _check_frames(data: bytes, size: tuple[int, int]) -> None:
    """Refuses an AVIF whose frames are larger, or more, than the declared size explains: a photo and its opacity."""
    try:
        frames = av1_frames(data)
    except ValueError as error:
        raise ImageError("unreadable", f"The AVIF cannot be decoded: {error}.", "Convert it to JPEG.") from None
    pixels = sum(width * height for width, height in frames)
    if any(width > size[0] or height > size[1] for width, height in frames) or pixels > 4 * size[0] * size[1]:
        raise ImageError("unreadable", f"The AVIF contains more pixels than {size[0]} x {size[1]}.")


def _scale(excess: float) -> int:
    return next((scale for scale in (8, 4, 2) if excess >= scale * _OVERSAMPLING), 1)


def _read_orientation(image: Image.Image) -> _Orientation:
    """Returns the orientation of the EXIF data; a photo with damaged EXIF data is taken as upright."""
    try:
        return _ORIENTATIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1), _UPRIGHT)
    except Exception:  # the parser raises many types on hostile data
        return _UPRIGHT


_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
"""Memory of a stored pixel by its mode; others take 4 bytes."""
_DECODER_PIXEL_BYTES = {"WebP": 17, "AVIF": 20, "HEIC": 12}
"""Memory per pixel of the formats whose decoder keeps canvases of its own alongside the result."""
_DEEP_HEIC_PIXEL_BYTES = 20
"""The same for a HEIC with more than 8 bits per colour."""
_LINE_BYTES = 1024
"""Memory per row and column: a pointer, and a row of the resized image."""
_STRIP_PIXELS = 1_000_000
"""Pixels composited on white at a time: a large photo at once would need four more copies in memory."""
_STRIP_BYTES = 24
"""Memory per pixel of a strip."""


def _to_rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB on white: shops photograph on white, and a transparent background must not turn black."""
    is_deep = image.mode.startswith("I")  # 16-bit grey, which Pillow would clip rather than scale
    if is_deep or image.has_transparency_data:
        opaque = Image.new("RGB", image.size)
        rows = max(1, _STRIP_PIXELS // image.width)
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
