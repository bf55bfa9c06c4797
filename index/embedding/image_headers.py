"""Checks an image before it is decoded: its limits, and the memory that decoding takes, from the header alone."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Literal, NamedTuple

from PIL import Image, UnidentifiedImageError
from pydantic import Field

from index._util.byte_budget import ByteBudget
from index._util.models import Frozen
from index._util.system import memory_limit
from index.embedding.avif import av1_frames
from index.embedding.image_formats import (
    MAX_PARTS,
    JpegStructure,
    count_parts,
    jpeg_structure,
    recognise,
    webp_canvas,
)
from index.embedding.tiff import TiffError, TiffPage, read_tiff
from index.errors import LookalikeError

Reason = Literal[
    "empty", "too_large", "too_many_pixels", "unsupported", "truncated", "unreadable", "unreachable", "forbidden"
]
# Our own, lower limit is checked from the header of every image; Pillow's, which raises at twice its value, is a second
# line of defence.
_MAX_PIXELS = 500_000_000
Image.MAX_IMAGE_PIXELS = _MAX_PIXELS // 2
# Blocks of more than 32 MiB go back to the system when they are freed. Smaller ones, by default of 16 MiB, stay with
# the thread that allocated them, and several threads together then hold more than is counted for one photo.
Image.core.set_block_size(64 * 1024 * 1024)  # type: ignore[attr-defined]

_SUPPORTED = ("JPEG", "PNG", "WebP", "AVIF", "HEIC", "TIFF", "GIF", "BMP")
SEND_FILE = f"Send a complete {', '.join(_SUPPORTED[:-1])} or {_SUPPORTED[-1]} file."
"""Remedy for a file that is not a complete image of a supported format."""
_MAX_SCANS = 100
_MAX_SCANNED_PIXELS = 500_000_000
"""Limits of a progressive JPEG. Encoders write about ten scans; each costs a pass over all pixels for a few bytes of
file."""
_SLOW_PIXELS = 100_000_000
"""Pixels times scans of a JPEG from which other photos do not wait for it, however little memory it needs."""
_MAX_RUN_LENGTH_BYTES = 1_000_000
"""Limit of a BMP with run-length encoding, which Pillow decodes in Python."""

_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
"""Memory of a stored pixel by its mode; others take 4 bytes."""
_DECODER_PIXEL_BYTES = {"WebP": 17, "AVIF": 20, "HEIC": 12}
"""Memory per pixel of the formats whose decoder keeps canvases of its own alongside the result."""
_DEEP_HEIC_PIXEL_BYTES = 20
"""The same for a HEIC with more than 8 bits per colour."""
_LINE_BYTES = 1024
"""Memory per row and column: a pointer, and a row of the resized image."""
STRIP_PIXELS = 250_000
"""Pixels composited on white at a time: a large photo at once would need four more copies in memory."""
_STRIP_BYTES = 24
"""Memory per pixel of a strip."""
OVERSAMPLING = 1.25
"""A large JPEG is decoded at a reduced scale only while its sides stay this many times the length that they are resized
to: the inverse cosine transform then drops only detail that resizing would have averaged away. On sharp photos of 160
to 350 pixels the result differs by 1.6 levels of 255 on average at half scale, less than that of another resize filter
(1.9), while at 1.0 it differs by more (2.3)."""


class ImageError(LookalikeError):
    """An image that cannot be used; `reason` is the machine-readable cause."""

    kind = "image"

    def __init__(self, reason: Reason, problem: str, remedy: str = SEND_FILE) -> None:
        super().__init__(problem, remedy)
        self.reason: Reason = reason


class ImageLimits(Frozen):
    """Limits that are checked before any pixel is decoded."""

    max_bytes: int = Field(default=20 * 1024 * 1024, gt=0)
    max_pixels: int = Field(default=50_000_000, gt=0)
    max_side: int = Field(default=20_000, gt=0, description="longest side in pixels: each row takes memory of its own")


DEFAULT_LIMITS = ImageLimits()


def check_bytes(count: int, limits: ImageLimits) -> None:
    """Refuses an empty file, and one with more bytes than the limit."""
    if not count:
        raise ImageError("empty", "The image is empty (0 bytes).")
    if count > limits.max_bytes:
        raise ImageError(
            "too_large", f"The image has {count:,} bytes; the limit is {limits.max_bytes:,}.", "Send a smaller file."
        )


def _too_many_pixels(size: str) -> ImageError:
    return ImageError("too_many_pixels", f"The image has {size}.", "Send a smaller picture.")


class Header(NamedTuple):
    """What is known of an image before its pixels are decoded."""

    format: str
    size: tuple[int, int]
    mode: str
    jpeg: JpegStructure | None = None
    image: Image.Image | None = None
    """Not for WebP, whose decoder allocates memory for all pixels when it is created, and not for TIFF."""
    page: TiffPage | None = None

    def open(self, data: bytes) -> Image.Image:
        """Returns the image, whose pixels are still to be loaded."""
        if self.image:
            return self.image
        if not self.page:
            return open_image(data, self.format)
        try:
            image = open_image(self.page.extract(data), self.format)
        except ImageError as error:
            problem = "The TIFF cannot be decoded: its values are combined in an unusual way."
            raise ImageError("unsupported", problem, "Convert it to JPEG.") from error
        if image.size != self.size:
            raise ImageError("unreadable", f"The TIFF does not have the {self.size[0]} x {self.size[1]} pixels.")
        return image


def read_header(data: bytes, limits: ImageLimits) -> Header:
    """Reads the header of an image and checks all limits; decodes no pixel."""
    name = recognise(data)
    if name == "WebP":
        canvas = webp_canvas(data)
        if canvas is None:
            raise ImageError("unreadable", "The image's header cannot be read: it has no canvas.")
        _check_size(canvas, limits)
        return Header(name, canvas, "RGBA")
    if name not in _SUPPORTED:
        raise _unsupported(name)
    if name == "TIFF":
        page = _read_page(data)
        _check_size(page.size, limits)
        return Header(name, page.size, page.mode, page=page)
    jpeg = jpeg_structure(data) if name == "JPEG" else None
    if (jpeg.parts if jpeg else count_parts(data, name)) > MAX_PARTS:
        raise ImageError("unreadable", f"The image has more than {MAX_PARTS:,} parts.", "Save it again, as a JPEG.")
    if name == "HEIC":
        _register_heic()
    image = open_image(data, "HEIF" if name == "HEIC" else name)
    _check_size(image.size, limits)
    if jpeg:
        _check_scans(jpeg.scans, image.size)
    if name == "AVIF":
        _check_frames(data, image.size)
    if _is_run_length_encoded(image) and len(data) > _MAX_RUN_LENGTH_BYTES:
        limit = f"the limit with run-length encoding is {_MAX_RUN_LENGTH_BYTES:,}"
        raise ImageError("too_large", f"The BMP has {len(data):,} bytes; {limit}.", "Save it as a JPEG.")
    return Header(name, image.size, image.mode, jpeg, image)


def _read_page(data: bytes) -> TiffPage:
    try:
        return read_tiff(data)
    except TiffError as error:
        remedy = "Convert it to JPEG." if error.reason == "unsupported" else SEND_FILE
        raise ImageError(error.reason, f"The TIFF cannot be decoded: {error}.", remedy) from None


def open_image(data: bytes, kind: str) -> Image.Image:
    """Opens an image of the format that Pillow names `kind`, or raises ImageError."""
    try:
        return Image.open(io.BytesIO(data), formats=(kind,))
    except Image.DecompressionBombError:
        raise _too_many_pixels(f"more than {_MAX_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ImageError("unreadable", f"The image's header is not that of {_a_file(recognise(data))}.") from None
    except Exception as error:  # Pillow's parsers raise many types on hostile headers
        raise ImageError("unreadable", f"The image's header cannot be read: {error}.") from error


def _unsupported(name: str | None) -> ImageError:
    if name is None:
        return ImageError("unsupported", "This file is not a photo of a known format.")
    return ImageError("unsupported", f"This is {_a_file(name)}, which is not supported.", "Convert it to JPEG.")


def _a_file(name: str | None) -> str:
    """Returns the name of a format in a sentence: an AVIF file, a PNG file."""
    article = "an" if name and (name[0] in "AEIOU" or name == "SVG") else "a"
    return f"{article} {name} file"


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
    if "HEIF" not in Image.OPEN:
        pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise _too_many_pixels(f"{width} x {height} pixels; the limit is {limits.max_pixels:,}")
    if max(size) > limits.max_side:
        raise _too_many_pixels(f"{width} x {height} pixels; the limit of a side is {limits.max_side:,}")


def _is_run_length_encoded(image: Image.Image) -> bool:
    return any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ()))


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


def reduced_scale(excess: float) -> int:
    """Returns the scale at which a JPEG with `excess` times the needed pixels per side is decoded."""
    return next((scale for scale in (8, 4, 2) if excess >= scale * OVERSAMPLING), 1)


def decode_cost(data: bytes, limits: ImageLimits = DEFAULT_LIMITS, side: float | None = None) -> int:
    """Returns an upper bound of the bytes of memory that decoding takes, from the header alone, or raises ImageError.

    `side` is the length that the sides of the whole image will be resized to, as in EncodedImage.read.
    """
    check_bytes(len(data), limits)
    return _memory(read_header(data, limits), len(data), side)


def _memory(header: Header, size: int, side: float | None) -> int:
    width, height = header.size
    coefficients, strip = 0.0, _STRIP_BYTES
    if header.jpeg:
        coefficients = 2 * header.jpeg.samples * width * height if header.jpeg.is_buffered else 0
        scale = reduced_scale(min(width, height) / side) if side else 1
        width, height, strip = ceil(width / scale), ceil(height / scale), 0
    # While the pixels are transposed, or converted to RGB, there are two copies of them.
    stored = _PIXEL_BYTES.get(header.mode, 4)
    copies = max(2 * stored, stored if header.mode == "RGB" else stored + 4)
    per_pixel = max(copies, _DECODER_PIXEL_BYTES.get(header.format, 0))
    if header.format == "HEIC" and header.image and header.image.info.get("bit_depth", 16) > 8:
        per_pixel = _DEEP_HEIC_PIXEL_BYTES
    stored_bytes = per_pixel * width * height
    if header.page:  # a copy of the file, and a strip or tile at a time before its pixels are stored
        stored_bytes = max(stored_bytes, stored * width * height + header.page.decoder_bytes) + size
    working = strip * min(width * height, STRIP_PIXELS) + _LINE_BYTES * (width + height)
    return int(coefficients + stored_bytes + working + size)


@contextmanager
def hold_memory(
    budget: ByteBudget, data: bytes, limits: ImageLimits = DEFAULT_LIMITS, side: float | None = None
) -> Iterator[None]:
    """Waits until the budget has the memory that decoding takes, and holds it for as long as the context.

    Raises ImageError for an image that exceeds the limits or the whole budget.
    """
    check_bytes(len(data), limits)
    header = read_header(data, limits)
    cost = _memory(header, len(data), side)
    if cost > budget.total:
        raise ImageError(
            "too_many_pixels",
            f"Decoding the image takes {cost:,} bytes of memory; the limit is {budget.total:,}.",
            "Send a smaller picture, or a JPEG.",
        )
    scanned = header.jpeg.scans * header.size[0] * header.size[1] if header.jpeg else 0
    with budget.hold(cost, slow=scanned > _SLOW_PIXELS):
        yield


def default_decode_bytes() -> int:
    """Returns the memory for decoding photos unless it is configured: half of what the process may use."""
    return memory_limit() // 2
