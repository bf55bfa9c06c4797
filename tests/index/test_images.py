"""Bytes to pixels: every kind of picture becomes upright RGB, every bad one a named error."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from index.images import ImageError, ImageLimits, Preprocessing, decode, digest, thumbnail


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def halves(mode: str = "RGB") -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    return image.convert(mode)


def close_to(image: Image.Image, place: tuple[int, int], colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.asarray(image)[place[1], place[0]].astype(int) - colour).max() < 40)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_every_format_decodes_to_rgb(kind: str) -> None:
    image = decode(encoded(halves(), kind))
    assert image.mode == "RGB" and image.size == (40, 20)
    assert close_to(image, (3, 10), (255, 0, 0)) and close_to(image, (36, 10), (0, 0, 255))


@pytest.mark.parametrize(("mode", "kind"), [("P", "PNG"), ("CMYK", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("LA", "PNG")])
def test_every_mode_decodes_to_rgb(mode: str, kind: str) -> None:
    assert decode(encoded(halves(mode), kind)).mode == "RGB"


def test_transparent_pixels_become_white() -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert decode(encoded(image, "PNG")).getpixel((4, 4)) == (255, 255, 255)


def test_sixteen_bit_grey_keeps_its_brightness() -> None:
    image = Image.fromarray(np.full((8, 8), 0x8040, np.uint16))
    assert decode(encoded(image, "PNG")).getpixel((4, 4)) == (0x80, 0x80, 0x80)


def test_a_phone_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held turned: rotate by 90 degrees to see it
    image = decode(encoded(halves(), "JPEG", exif=exif))
    assert image.size == (20, 40)
    assert close_to(image, (10, 3), (255, 0, 0)) and close_to(image, (10, 36), (0, 0, 255))


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = struct.pack(">I", 1000) + b"IDAT"
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + pixels


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello, this is text", "unsupported"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported"),
        (encoded(halves().resize((200, 100)), "JPEG")[:-200], "truncated"),
        (encoded(halves(), "TIFF"), "unsupported"),
        (png_header(1_001, 1_000), "too_many_pixels"),
        (png_header(60_000, 60_000), "too_many_pixels"),
        (encoded(halves(), "JPEG") + b"\0" * 4000, "too_large"),
    ],
)
def test_a_bad_image_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode(data, ImageLimits(max_bytes=4000, max_pixels=1_000_000))
    assert caught.value.reason == reason
    assert caught.value.remedy


def test_preprocessing_scales_the_short_side_and_crops_the_centre() -> None:
    rule = Preprocessing(resize=20, input_size=10)
    pixels = rule.apply(halves().resize((80, 40)))
    assert pixels.shape == (10, 10, 3) and pixels.dtype == np.uint8
    assert pixels[:, 0, 0].min() > 200 and pixels[:, -1, 2].min() > 200, "the border of the halves is in the middle"


def test_a_sliver_of_an_image_still_fills_the_input() -> None:
    assert Preprocessing(resize=16, input_size=16).apply(Image.new("RGB", (1, 500))).shape == (16, 16, 3)


def test_a_thumbnail_is_small_and_keeps_the_proportions() -> None:
    small = Image.open(io.BytesIO(thumbnail(Image.new("RGB", (800, 400)), side=100)))
    assert small.format == "JPEG" and small.size == (100, 50)


def test_equal_bytes_have_equal_digests() -> None:
    assert digest(b"a") == digest(b"a") != digest(b"b")
