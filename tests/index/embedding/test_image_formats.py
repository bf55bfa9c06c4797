"""Tests of reading the structure of image files without a decoder."""

import io
import struct
import time
from typing import Any

import pytest
from PIL import Image

from index.embedding.image_formats import MAX_PARTS, count_parts, jpeg_structure, recognise, webp_canvas


def encode(kind: str, size: tuple[int, int] = (40, 20), mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 50).convert(mode).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (encode("JPEG"), "JPEG"),
        (encode("PNG"), "PNG"),
        (encode("WEBP"), "WebP"),
        (encode("GIF"), "GIF"),
        (encode("BMP"), "BMP"),
        (encode("TIFF"), "TIFF"),
        (encode("PDF"), "PDF"),
        (encode("ICO"), "ICO"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif", "AVIF"),
        (b"\0\0\0\x1cftypavif\0\0\0\0mif1avifmiaf", "AVIF"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", None),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<!-- a -->\n<svg xmlns='x'/>", "SVG"),
        (b"  <!DOCTYPE svg><!-- <svg> --><!----> <svg>", "SVG"),
        (b"<svg/>", None),
        (b"<!-- <svg> ", None),
        # Each would occupy a process for minutes, or for years, if it were matched by backtracking.
        pytest.param(b" " * 4096, None, id="spaces"),
        pytest.param(b"<!---->" * 500, None, id="comments"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"hello", None),
        (b"", None),
    ],
)
def test_format_is_recognised_by_its_first_bytes(data: bytes, name: str | None) -> None:
    assert recognise(data) == name


@pytest.mark.parametrize("size", [(1, 1), (40, 20), (16_383, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"lossless": True}, {"exif": b"Exif\0\0"}, {"save_all": True, "append_images": "another"}]
)
def test_canvas_of_a_webp_is_its_size(size: tuple[int, int], options: dict[str, Any]) -> None:
    if "append_images" in options:
        options = {**options, "append_images": [Image.new("RGB", size, "red")]}
    assert webp_canvas(encode("WEBP", size, **options)) == size


@pytest.mark.parametrize(
    ("mode", "options", "scans", "is_buffered", "samples"),
    [
        ("RGB", {"subsampling": 2}, 1, False, 1.5),
        ("RGB", {"subsampling": 0}, 1, False, 3),
        ("L", {}, 1, False, 1),
        ("CMYK", {}, 1, False, 4),
        ("RGB", {"progressive": True}, 10, True, 1.5),
        ("L", {"progressive": True}, 6, True, 1),
        ("RGB", {"restart_marker_blocks": 1}, 1, False, 1.5),
    ],
)
def test_structure_of_a_jpeg(mode: str, options: dict[str, Any], scans: int, is_buffered: bool, samples: float) -> None:
    found = jpeg_structure(encode("JPEG", (100, 80), mode, **options))
    assert (found.scans, found.is_buffered, found.samples) == (scans, is_buffered, samples)


def test_scans_of_previews_and_of_later_images_are_not_counted() -> None:
    preview = encode("JPEG", progressive=True)
    assert jpeg_structure(encode("JPEG", exif=b"Exif\0\0" + preview)).scans == 1
    assert jpeg_structure(encode("JPEG") + preview).scans == 1


@pytest.mark.parametrize("cut", [2, 3, 4, 30, 160, 165, 170, 300])
def test_structure_of_a_cut_jpeg_is_read_without_error(cut: int) -> None:
    assert jpeg_structure(encode("JPEG", progressive=True)[:cut]).scans <= 10


def test_parts_are_counted_up_to_the_limit_in_little_time() -> None:
    started = time.perf_counter()
    png = encode("PNG")
    assert count_parts(png, "PNG") == 3
    assert count_parts(png[:33] + (struct.pack(">I", 0) + b"teXt" + bytes(4)) * 1_000_000, "PNG") == MAX_PARTS + 1
    gif = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0)
    assert count_parts(gif + b"\x21\xfe\0" * 3_000_000, "GIF") == MAX_PARTS + 1
    assert count_parts(gif + b"\x21\xfe" + b"\1a" * 3_000_000, "GIF") == MAX_PARTS + 1
    assert count_parts(encode("GIF", mode="L"), "GIF") < 5
    assert jpeg_structure(b"\xff\xd8" + b"\xff\xe1\0\2" * 3_000_000).parts == MAX_PARTS + 1
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("start", [b"\xff\xd8", b"\xff\xd8\xff\xda\0\2"])
def test_fill_bytes_of_a_jpeg_are_read_once(start: bytes) -> None:
    assert jpeg_structure(start + b"\xff" * 5_000_000 + b"\0\xff\xda").scans == start.count(b"\xda") + 1
