"""Tests of reading the first page of TIFF files: photos decode rightly, all others are refused with their reason."""

import io
import random
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from index.embedding.image_headers import ImageError, ImageLimits, decode_cost
from index.embedding.images import EncodedImage, decode
from index.embedding.tiff import TiffError, read_tiff
from tests.support.tiff import grey_tags, rgb_tags, write_tiff

RED, WHITE = (255, 0, 0), (255, 255, 255)
GREY = bytes(range(24))
"""Pixels of 6 x 4."""


def encode(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "TIFF", **options)
    return out.getvalue()


def photo(width: int = 70, height: int = 50) -> Image.Image:
    gradient = np.linspace(0, 255, width * height).reshape(height, width)
    return Image.fromarray(np.stack([gradient, gradient.T.reshape(height, width), 255 - gradient], 2).astype(np.uint8))


def pixels(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(decode(data))


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits"])
@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "LA", "RGB", "RGBX", "RGBA", "CMYK"])
def test_photo_has_the_pixels_that_were_saved(mode: str, compression: str | None) -> None:
    image = photo().convert("P" if mode == "PA" else mode).convert(mode)
    assert np.array_equal(pixels(encode(image, compression=compression)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "YCbCr"])
def test_jpeg_in_a_tiff_is_decoded(mode: str) -> None:
    data = encode(photo().convert(mode), compression="jpeg", quality=95)
    expected = np.asarray(photo().convert(mode).convert("RGB")).astype(int)
    assert np.abs(pixels(data) - expected).mean() < 6


@pytest.mark.parametrize("compress", [None, zlib.compress])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize(
    ("photometric", "values", "expected"),
    [
        (1, [0x8040], (0x80, 0x80, 0x80)),
        (2, [0x8040, 0x10FF, 0xFF00], (0x80, 0x10, 0xFF)),
        (2, [0x8040, 0x10FF, 0xFF00, 0xFFFF], (0x80, 0x10, 0xFF)),
        (2, [0x8040, 0x10FF, 0xFF00, 0x0000], WHITE),
        (5, [0x0000, 0xFFFF, 0xFFFF, 0x0000], RED),
    ],
    ids=["grey", "colour", "opaque", "transparent", "CMYK"],
)
def test_sixteen_bits_keep_their_brightness(
    photometric: int,
    values: list[int],
    expected: tuple[int, int, int],
    order: str,
    big: bool,
    compress: Callable[[bytes], bytes] | None,
) -> None:
    body = struct.pack(f"{order}{len(values)}H", *values) * 24
    tags = grey_tags(6, 4, t258=[16] * len(values), t262=[photometric], t277=[len(values)])
    if photometric == 2 and len(values) == 4:
        tags[338] = [2]
    if compress:
        tags[259] = [8]
    data = write_tiff(tags, compress(body) if compress else body, order=order, big=big)
    assert decode(data).getcolors() == [(24, expected)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("mode", ["RGB", "I;16", "I;16B"])
def test_orientation_is_applied(orientation: int, compression: str | None, mode: str) -> None:
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    upright = photo()
    if mode != "RGB":
        upright = Image.fromarray(np.asarray(upright.convert("L")).astype("<u2" if mode == "I;16" else ">u2") * 256)
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    data = encode(stored, tiffinfo={274: orientation}, compression=compression)
    image = EncodedImage(data)
    assert image.size == (70, 50)
    whole = np.asarray(image.read()[0])
    assert np.array_equal(whole, pixels(encode(upright)))
    part, place = EncodedImage(data).read((7, 5, 60, 41))
    assert place == (0, 0, 53, 36)
    assert np.array_equal(np.asarray(part), whole[5:41, 7:60])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 2**32 - 1])
def test_strips_of_any_height_join(order: str, big: bool, rows: int) -> None:
    strips = [GREY[start : start + 6 * rows] for start in range(0, 24, 6 * rows)]
    data = write_tiff(grey_tags(6, 4, t278=[rows]), strips, order=order, big=big)
    assert pixels(data)[:, :, 0].tobytes() == GREY


@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("size", [(16, 16), (32, 16), (20, 40), (5, 3)])
def test_tiles_are_cut_to_the_image(size: tuple[int, int], compression: int) -> None:
    width, height = size
    across, down = -(-width // 16), -(-height // 16)
    whole = np.random.default_rng(0).integers(256, size=(16 * down, 16 * across, 3), dtype=np.uint8)
    tiles = [
        whole[y : y + 16, x : x + 16].tobytes() for y in range(0, 16 * down, 16) for x in range(0, 16 * across, 16)
    ]
    tags = rgb_tags(width, height, t322=[16], t323=[16], t259=[compression])
    data = write_tiff(tags, [zlib.compress(tile) for tile in tiles] if compression == 8 else tiles)
    assert np.array_equal(pixels(data), whole[:height, :width])


@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("rows", [2, 4])
def test_colours_in_planes_of_their_own_are_joined(compression: int, rows: int) -> None:
    values = np.random.default_rng(0).integers(256, size=(3, 4, 6), dtype=np.uint8)
    strips = [plane[y : y + rows].tobytes() for plane in values for y in range(0, 4, rows)]
    strips = [zlib.compress(strip) for strip in strips] if compression == 8 else strips
    data = write_tiff(rgb_tags(6, 4, t278=[rows], t259=[compression], t284=[2]), strips)
    assert np.array_equal(pixels(data), values.transpose(1, 2, 0))


def test_white_is_zero_and_few_bits_are_read() -> None:
    assert pixels(write_tiff(grey_tags(6, 4, t262=[0]), GREY))[0, :, 0].tolist() == [255, 254, 253, 252, 251, 250]
    nibbles = write_tiff(grey_tags(6, 1, t258=[4]), bytes([0x0F, 0x80, 0xF0]))
    assert pixels(nibbles)[0, :, 0].tolist() == [0, 255, 136, 0, 255, 0]


def test_predictor_is_undone() -> None:
    rows = np.frombuffer(GREY, np.uint8).reshape(4, 6)
    differences = np.diff(rows, axis=1, prepend=0).astype(np.uint8).tobytes()
    data = write_tiff(grey_tags(6, 4, t259=[8], t317=[2]), zlib.compress(differences))
    assert pixels(data)[:, :, 0].tobytes() == GREY


def test_only_the_first_of_many_pages_is_read() -> None:
    pages = [Image.new("RGB", (9, 9), "blue")] * 300
    data = encode(Image.new("RGB", (8, 8), "red"), save_all=True, append_images=pages)
    assert decode(data).getcolors() == [(64, RED)]


def test_page_that_refers_to_itself_is_read_once() -> None:
    data = bytearray(write_tiff(grey_tags(6, 4), GREY))
    (start,) = struct.unpack_from("<I", data, 4)
    count = struct.unpack_from("<H", data, start)[0]
    struct.pack_into("<I", data, start + 2 + 12 * count, start)
    assert decode(bytes(data)).size == (6, 4)


def test_tags_that_are_not_needed_are_not_passed_on() -> None:
    data = write_tiff(grey_tags(6, 4, t700=[1] * 1000, t34665=[8], t34675=[2] * 500, t274=[6]), GREY)
    alone = Image.open(io.BytesIO(read_tiff(data).extract(data)))
    assert not {700, 34665, 34675, 274} & set(alone.tag_v2)  # type: ignore[attr-defined]
    assert decode(data).size == (4, 6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"t259": [4]}, "its compression is CCITT fax"),
        ({"t259": [6]}, "its compression is old-style JPEG"),
        ({"t259": [34925]}, "its compression is LZMA"),
        ({"t259": [50000]}, "its compression is Zstandard"),
        ({"t259": [777]}, "its compression is number 777"),
        ({"t262": [8]}, "its colour space has the number 8"),
        ({"t258": [12]}, "its values of 12 bits are not read"),
        ({"t258": [32], "t339": [3]}, "its values of 32 bits are not read"),
        ({"t339": [2]}, "its values of 8 bits are not read"),
        ({"t258": [16], "t262": [0]}, "its values of 16 bits are not read"),
        ({"t277": [60_000]}, "it has 60,000 values per pixel"),
        ({"t277": [2], "t258": [8, 16], "t338": [2]}, "the values of a pixel have different types"),
        ({"t277": [2]}, "what the values of a pixel mean is not stored"),
        ({"t266": [2]}, "its values are stored in an unusual order"),
        ({"t317": [3]}, "its values are stored in an unusual order"),
        ({"t254": [1]}, "its first page is a preview or a mask, as in raw photos of cameras"),
        ({"t50706": [1]}, "its first page is a preview or a mask, as in raw photos of cameras"),
    ],
)
def test_what_is_not_read_is_unsupported_and_named(changed: dict[str, Sequence[int]], message: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode(write_tiff(grey_tags(6, 4, **changed), GREY * 8))
    assert caught.value.problem == f"The TIFF cannot be decoded: {message}."
    assert (caught.value.reason, caught.value.remedy) == ("unsupported", "Convert it to JPEG.")


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (write_tiff(grey_tags(0, 4), GREY), "unreadable", "it has no pixels"),
        (write_tiff(grey_tags(6, 4, t278=[0]), GREY), "unreadable", "its strips or tiles have no pixels"),
        (write_tiff(grey_tags(6, 4, t322=[0], t323=[16]), GREY), "unreadable", "have no pixels"),
        (write_tiff(grey_tags(6, 4, t273=[4]), GREY), "unreadable", "lies in its header"),
        (write_tiff(grey_tags(6, 4, t273=[9000]), GREY), "truncated", "a strip or tile is cut off"),
        (write_tiff(grey_tags(6, 400), GREY), "truncated", "a strip or tile is cut off"),
        (write_tiff(grey_tags(6, 4, t278=[1]), GREY), "unreadable", "its tag 273 has 1 values instead of 4"),
        (write_tiff(grey_tags(6, 20_001, t278=[1]), GREY), "unreadable", "20,001 strips or tiles; the limit is"),
        (write_tiff(rgb_tags(9, 9, t284=[2], t278=[1]), GREY * 100), "unreadable", "values instead of 27"),
        (
            write_tiff(grey_tags(100, 100, t278=[1], t273=[8] * 100, t279=[90] * 100, t259=[8]), bytes(100)),
            "unreadable",
            "its strips or tiles overlap",
        ),
        (
            write_tiff(grey_tags(9, 9, t322=[8192], t323=[8192], t259=[8]), bytes(100)),
            "unreadable",
            "its tiles contain more pixels than 9 x 9",
        ),
        (write_tiff(grey_tags(6, 4, t259=[7], t347=[0] * 65_537), GREY), "unreadable", "its JPEG tables have 65,537"),
        (b"II*\0\x08\0\0\0\0\0", "unreadable", "its first page has 0 tags"),
        (b"II*\0\x08\0\0\0\xff\xff" + bytes(900_000), "unreadable", "its first page has 65,535 tags"),
        (b"MM\0+\0\x08\0\0" + struct.pack(">QQ", 16, 2**60) + bytes(99), "unreadable", "its first page has 1,152,"),
        (b"MM\0+\0\x04\0\0" + bytes(99), "unreadable", "its numbers do not have 8 bytes"),
        (b"II*\0\xff\xff\xff\xff", "truncated", "a part that it refers to is cut off"),
        (b"II*\0", "truncated", "a part that it refers to is cut off"),
        (b"II*\0\x08\0\0\0\2\0" + bytes(40), "unreadable", "it has the same tag twice"),
    ],
)
def test_damaged_file_is_refused_with_its_reason(data: bytes, reason: str, message: str) -> None:
    with pytest.raises(TiffError) as caught:
        read_tiff(data)
    assert caught.value.reason == reason and message in str(caught.value)
    with pytest.raises(ImageError) as refused:
        decode(data)
    assert refused.value.reason == reason


def test_progressive_jpeg_in_a_tiff_is_refused() -> None:
    out = io.BytesIO()
    photo().save(out, "JPEG", progressive=True)
    data = write_tiff(rgb_tags(70, 50, t259=[7], t262=[6]), out.getvalue())
    with pytest.raises(ImageError, match="its JPEG data are progressive") as caught:
        decode(data)
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("size", [(10, 10), (70, 49), (69, 50), (500, 500)])
def test_jpeg_of_another_size_than_its_strip_is_refused(size: tuple[int, int]) -> None:
    """Of a smaller one the rest of the photo would be what was in memory."""
    out = io.BytesIO()
    photo(*size).save(out, "JPEG")
    data = write_tiff(rgb_tags(70, 50, t259=[7], t262=[6]), out.getvalue())
    with pytest.raises(ImageError, match=f"its JPEG data have {size[0]} x {size[1]} pixels"):
        decode(data)


@pytest.mark.parametrize("rows", [16, 24])
def test_jpeg_in_strips_is_decoded(rows: int) -> None:
    strips = []
    for top in range(0, 50, rows):
        out = io.BytesIO()
        photo().crop((0, top, 70, min(50, top + rows))).save(out, "JPEG", quality=95, subsampling=0)
        strips.append(out.getvalue())
    data = write_tiff(rgb_tags(70, 50, t259=[7], t262=[6], t278=[rows], t530=[1, 1]), strips)
    assert np.abs(pixels(data).astype(int) - np.asarray(photo())).mean() < 6


@pytest.mark.parametrize("compression", [5, 8, 32773])
def test_strip_that_ends_early_is_refused(compression: int) -> None:
    tags = grey_tags(600, 400, t259=[compression])
    with pytest.raises(ImageError):
        decode(write_tiff(tags, zlib.compress(GREY) if compression == 8 else b"\x80\0" + GREY))


def test_sides_and_pixels_are_limited_by_the_header_alone() -> None:
    data = write_tiff(grey_tags(1001, 999, t259=[8]), zlib.compress(bytes(1001 * 999)))
    for limits, message in ((ImageLimits(max_side=1000), "of a side is 1,000"), (ImageLimits(max_pixels=999), "999")):
        with pytest.raises(ImageError, match=message) as caught:
            decode_cost(data, limits)
        assert caught.value.reason == "too_many_pixels"
    assert decode(data).size == (1001, 999)


def test_refusals_take_little_time() -> None:
    started = time.perf_counter()
    for data in (
        b"II*\0\x08\0\0\0\xff\xff" + bytes(20_000_000),
        write_tiff(grey_tags(20_000, 20_000, t278=[1], t273=[8] * 20_000, t279=[999] * 20_000, t259=[8]), bytes(9999)),
        write_tiff(grey_tags(6, 4, t259=[7]), b"\xff\xd8" + b"\xff\xe1\0\2" * 4_000_000),
    ):
        with pytest.raises(ImageError):
            decode(data)
    assert time.perf_counter() - started < 2


SEEDS: dict[str, Callable[[], bytes]] = {
    "raw": lambda: encode(photo()),
    "LZW": lambda: encode(photo(), compression="tiff_lzw", tiffinfo={274: 6}),
    "deflate": lambda: encode(photo().convert("RGBA"), compression="tiff_adobe_deflate"),
    "PackBits": lambda: encode(photo().convert("P"), compression="packbits"),
    "JPEG": lambda: encode(photo(), compression="jpeg"),
    "BigTIFF": lambda: write_tiff(
        rgb_tags(16, 16, t322=[16], t323=[16], t259=[8]), zlib.compress(bytes(768)), big=True
    ),
    "planes": lambda: write_tiff(rgb_tags(6, 4, t284=[2]), [GREY] * 3, order=">"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SEEDS)
def test_fuzzed_file_is_decoded_within_its_size_or_raises_an_image_error(kind: str) -> None:
    rng, valid, refused = random.Random(kind), SEEDS[kind](), 0
    layout, place = {"BigTIFF": ("<Q", 8), "planes": (">I", 4)}.get(kind, ("<I", 4))
    (start,) = struct.unpack_from(layout, valid, place)
    for _ in range(2000):
        data = bytearray(valid)
        for _ in range(rng.choice((0, 1, 1, 2, 8))):
            # Half of the damage is in the tags.
            first, last = rng.choice(((0, len(data)), (start, min(len(data), start + 300))))
            data[rng.randrange(first, last)] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            image = EncodedImage(bytes(data), ImageLimits(max_pixels=1_000_000))
            assert image.read()[0].size == image.size
        except ImageError:
            refused += 1
    assert 0 < refused < 2000, "the damage must lead to both outcomes"
