"""Tests of decoding: every kind of image becomes upright RGB, every invalid one an error with its reason."""

import io
import random
import struct
import tracemalloc
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageOps, PngImagePlugin

from index.embedding.images import (
    EncodedImage,
    ImageError,
    ImageLimits,
    Preprocessing,
    decode,
    decode_for_model,
    digest,
    load_pixels,
    read_file,
    thumbnail,
)

RULE = Preprocessing(resize=40, input_size=32)
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    if kind == "HEIF" and "exif" in options:
        # As phones do: the orientation is a property of the image in its container too, which decoders apply.
        image = image.copy()
        image.info["exif"] = options.pop("exif").tobytes()
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def halves(mode: str = "RGB") -> Image.Image:
    """Returns an image that is red on the left and blue on the right."""
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    return image.convert(mode)


def close_to(image: Image.Image, place: tuple[int, int], colour: tuple[int, int, int]) -> bool:
    return bool(np.abs(np.asarray(image)[place[1], place[0]].astype(int) - colour).max() < 40)


HEIF = pytest.param("HEIF", marks=pytest.mark.skipif(find_spec("pillow_heif") is None, reason="needs pillow-heif"))


@pytest.fixture(autouse=True, scope="module")
def heif_encoder() -> None:
    """Registers the encoder of HEIC photos, where it is installed."""
    if find_spec("pillow_heif") is not None:
        import pillow_heif

        pillow_heif.register_heif_opener()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", HEIF])
def test_every_format_decodes_to_rgb(kind: str) -> None:
    image = decode(encode(halves(), kind))
    assert image.mode == "RGB" and image.size == (40, 20)
    assert close_to(image, (3, 10), (255, 0, 0)) and close_to(image, (36, 10), (0, 0, 255))


@pytest.mark.parametrize(("mode", "kind"), [("P", "PNG"), ("CMYK", "JPEG"), ("L", "PNG"), ("1", "PNG"), ("LA", "PNG")])
def test_every_mode_decodes_to_rgb(mode: str, kind: str) -> None:
    assert decode(encode(halves(mode), kind)).mode == "RGB"


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "AVIF")])
def test_transparent_pixels_become_white(mode: str, kind: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0)).convert("LA").convert(mode)
    assert decode(encode(image, kind)).getpixel((4, 4)) == WHITE


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_colour_of_a_palette_becomes_white(kind: str) -> None:
    image = halves().quantize(4)
    left = image.getpixel((3, 10))
    decoded = decode(encode(image, kind, transparency=left))
    assert decoded.getpixel((3, 10)) == WHITE and close_to(decoded, (36, 10), BLUE)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_strips_of_a_tall_transparent_photo_join_without_a_seam(mode: str) -> None:
    values = np.random.default_rng(0).integers(256, size=(3 * 256 + 5, 9, len(mode)), dtype=np.uint8)
    image = Image.fromarray(values, mode)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    assert np.array_equal(np.asarray(decode(encode(image, "PNG"))), np.asarray(whole))


def test_half_transparent_pixel_is_blended_with_white() -> None:
    image = decode(encode(Image.new("RGBA", (8, 8), (255, 0, 0, 128)), "PNG"))
    assert close_to(image, (4, 4), (255, 127, 127))


def png(width: int, height: int, *, depth: int, colour: int, row: bytes, extra: bytes = b"") -> bytes:
    """Returns a PNG of equal rows, of the depths and colour types that Pillow reads but does not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    pixels = zlib.compress((b"\0" + row) * height)
    return PNG_MAGIC + chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


@pytest.mark.parametrize(
    ("colour", "values", "expected"),
    [
        (0, [0x8040], (0x80, 0x80, 0x80)),
        (2, [0x8040, 0x10FF, 0xFF00], (0x80, 0x10, 0xFF)),
        (4, [0x8040, 0xFFFF], (0x80, 0x80, 0x80)),
        (4, [0x8040, 0x0000], WHITE),
        (6, [0x8040, 0x10FF, 0xFF00, 0xFFFF], (0x80, 0x10, 0xFF)),
        (6, [0x8040, 0x10FF, 0xFF00, 0x0000], WHITE),
    ],
    ids=["grey", "colour", "grey, opaque", "grey, transparent", "colour, opaque", "colour, transparent"],
)
def test_sixteen_bit_images_keep_their_brightness(
    colour: int, values: list[int], expected: tuple[int, int, int]
) -> None:
    row = struct.pack(f">{len(values)}H", *values) * 8
    assert decode(png(8, 8, depth=16, colour=colour, row=row)).getpixel((4, 4)) == expected


def test_transparent_value_of_sixteen_bit_grey_becomes_white() -> None:
    row = struct.pack(">2H", 0x0140, 0x0150) * 4
    image = decode(png(8, 8, depth=16, colour=0, row=row, extra=chunk(b"tRNS", struct.pack(">H", 0x0140))))
    assert image.getpixel((0, 0)) == WHITE and image.getpixel((1, 0)) == (1, 1, 1)


def test_cmyk_of_adobe_keeps_its_colours() -> None:
    data = encode(halves("CMYK"), "JPEG", quality=95)  # written inverted, with Adobe's marker, as by Photoshop
    assert b"Adobe" in data
    image = decode(data)
    assert close_to(image, (3, 10), RED) and close_to(image, (36, 10), BLUE)


def test_ycck_of_adobe_keeps_its_colours() -> None:
    # The inks as YCbCr plus black, marked by Adobe's transform 2, which Pillow cannot write.
    planes = [*ImageOps.invert(halves()).convert("YCbCr").split(), Image.new("L", (40, 20), 255)]
    stored = Image.merge("CMYK", [plane.point(lambda value: 255 - value) for plane in planes])
    data = bytearray(encode(stored, "JPEG", quality=95, subsampling=0))
    data[data.index(b"Adobe") + 11] = 2
    image = decode(bytes(data))
    assert close_to(image, (3, 10), RED) and close_to(image, (36, 10), BLUE)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation_is_decoded(kind: str) -> None:
    data = encode(halves(), kind, save_all=True, append_images=[Image.new("RGB", (40, 20), "green")], loop=0)
    assert Image.open(io.BytesIO(data)).n_frames == 2  # type: ignore[attr-defined]
    assert close_to(decode(data), (3, 10), RED)


def test_phone_photo_with_a_second_embedded_image_is_decoded() -> None:
    data = encode(halves(), "MPO", save_all=True, append_images=[Image.new("RGB", (20, 10), "green")])
    assert close_to(decode_for_model(RULE, data)[0], (3, 10), RED)


def test_wrong_file_extension_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(encode(halves(), "PNG"))
    assert close_to(decode(read_file(file)), (3, 10), RED)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", HEIF])
def test_rotated_phone_photo_is_decoded_upright(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was rotated by 90 degrees
    image = decode(encode(halves(), kind, exif=exif))
    assert image.size == (20, 40)
    assert close_to(image, (10, 3), RED) and close_to(image, (10, 36), BLUE)


@pytest.mark.parametrize("kind", ["PNG", "AVIF", HEIF])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_decoded_to_the_same_upright_image(orientation: int, kind: str) -> None:
    upright = halves()
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's number of the inverse transposition
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(encode(stored, kind, exif=exif))
    if kind == "PNG":
        assert np.array_equal(np.asarray(decoded), np.asarray(upright))
    assert decoded.size == (40, 20) and close_to(decoded, (3, 10), RED) and close_to(decoded, (36, 10), BLUE)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "exif",
    [b"", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\xff\xff\xff\xff" * 40, b"x" * 900],
)
def test_photo_with_damaged_exif_data_is_decoded_as_stored(exif: bytes) -> None:
    image = decode(encode(halves(), "JPEG", exif=b"Exif\0\0" + exif))
    assert image.size == (40, 20) and close_to(image, (3, 10), RED)


def test_orientation_in_enormous_exif_data_is_not_read() -> None:
    # The orientation is a list of numbers, each of which would become a Python object.
    tag = struct.pack(">HHII", 0x0112, 3, 1_000_000, 26) + bytes(4)
    exif = b"MM\0*\0\0\0\x08\0\1" + tag + struct.pack(">H", 6) * 1_000_000
    tracemalloc.start()
    image = decode(encode(halves(), "PNG", exif=exif))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert image.size == (40, 20)
    assert peak < 5 * len(exif)


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG_MAGIC + chunk(b"IHDR", header) + struct.pack(">I", 1000) + b"IDAT"


def gif_of(screen: tuple[int, int], frame: tuple[int, int]) -> bytes:
    """Returns the first bytes of a GIF; a frame larger than the screen enlarges the image."""
    header = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(6)
    return header + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x4c\x01\0;"


def webp_of(width: int, height: int) -> bytes:
    """Returns an animated WebP with a huge canvas around a frame of a few pixels."""
    data = bytearray(encode(Image.new("RGB", (2, 2)), "WEBP", save_all=True, append_images=[halves().resize((2, 2))]))
    canvas = data.index(b"VP8X") + 12
    data[canvas : canvas + 6] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def png_with(*, text: int = 0, profile: int = 0) -> bytes:
    """Returns a small PNG whose metadata decompresses to this many bytes."""
    info = PngImagePlugin.PngInfo()
    if text:
        info.add_text("comment", "a" * text, zip=True)
    profiles = {"icc_profile": bytes(profile)} if profile else {}
    return encode(halves(), "PNG", pnginfo=info, **profiles)


def jpeg_of_scans(count: int) -> bytes:
    """Returns a progressive JPEG that repeats its last scan."""
    data = encode(halves(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + data[-2:]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello, this is text", "unsupported"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported"),
        (encode(halves().resize((200, 100)), "JPEG")[:-200], "truncated"),
        (encode(halves("1"), "TIFF", compression="group4"), "unsupported"),
        (png_header(1_001, 1_000), "too_many_pixels"),
        (png_header(60_000, 60_000), "too_many_pixels"),
        (png_header(2**31 - 1, 2**31 - 1), "too_many_pixels"),
        (gif_of((65_535, 65_535), (1, 1)), "too_many_pixels"),
        (gif_of((1, 1), (65_535, 65_535)), "too_many_pixels"),
        (webp_of(65_535, 65_535), "too_many_pixels"),
        (
            encode(halves(), "BMP")[:18] + struct.pack("<ii", 60_000, 60_000) + encode(halves(), "BMP")[26:],
            "too_many_pixels",
        ),
        (png_with(text=5_000_000), "unreadable"),
        (png_with(profile=5_000_000), "unreadable"),
        (jpeg_of_scans(120), "unreadable"),
        (b"%PDF-1.7\n" + encode(halves(), "PNG"), "unsupported"),
        (encode(halves(), "JPEG") + b"\0" * 8000, "too_large"),
    ],
)
def test_invalid_image_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode(data, ImageLimits(max_bytes=8000, max_pixels=1_000_000))
    assert caught.value.reason == reason
    assert caught.value.problem and caught.value.remedy


def test_bytes_after_the_image_are_ignored() -> None:
    assert close_to(decode(encode(halves(), "JPEG") + b"PK\x03\x04 an archive, say"), (3, 10), RED)


def test_large_or_unreadable_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.jpg"
    with huge.open("wb") as file:
        file.truncate(2**40)
    for path, reason in ((huge, "too_large"), (tmp_path / "missing.jpg", "unreadable"), (tmp_path, "unreadable")):
        with pytest.raises(ImageError) as caught:
            read_file(path)
        assert caught.value.reason == reason


FUZZED: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 60, "exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"},
    "PNG": {},
    "WEBP": {"quality": 60},
    "GIF": {},
    "BMP": {},
    "AVIF": {},
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", FUZZED)
def test_fuzzed_file_is_decoded_or_raises_an_image_error(kind: str) -> None:
    rng = random.Random(kind)
    valid = encode(halves().resize((64, 48), Image.Resampling.BICUBIC), kind, **FUZZED[kind])
    limits = ImageLimits(max_pixels=1_000_000)
    refused = 0
    for _ in range(3000):
        data = bytearray(valid)
        for _ in range(rng.choice((0, 1, 1, 2, 8))):
            # Parsers fail on headers, so half of the damage is there.
            data[rng.randrange(min(len(data), rng.choice((64, len(data)))))] = rng.choice((0, 0xFF, rng.randrange(256)))
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            assert load_pixels(bytes(data), RULE, limits).shape == (32, 32, 3)
        except ImageError:
            refused += 1
    assert 0 < refused < 3000, "the damage must lead to both outcomes"


def noisy(width: int, height: int, grain: int = 4) -> Image.Image:
    """Returns an image of shapes and noise: detail that a reduced scale would lose, unless the grain is coarser."""
    rng = np.random.default_rng(width)
    shape = (height // grain, width // grain, 3)
    image = Image.fromarray(rng.integers(90, 160, shape, dtype=np.uint8)).resize((width, height))
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        x, y, across, down = (int(rng.integers(20, high)) for high in (width, height, 400, 400))
        draw.ellipse((x, y, x + across, y + down), fill=tuple(rng.integers(256, size=3)))
    return image


def test_large_jpeg_is_decoded_at_a_reduced_scale_with_nearly_equal_pixels() -> None:
    rule = Preprocessing(resize=280, input_size=256)
    data = encode(noisy(1600, 1408), "JPEG", quality=92)
    picture, part = decode_for_model(rule, data)
    assert picture.size == (400, 352), "a quarter: the short side is still 1.25 times the 280 of the rule"
    assert part == (0, 0, 400, 352)
    assert decode(data).size == (1600, 1408)
    difference = load_pixels(data, rule).astype(int) - rule.apply(decode(data))
    assert np.abs(difference).mean() < 1.5


@pytest.mark.parametrize(("resize", "min_side"), [(40, 320), (256, 320), (300, 375)])
@pytest.mark.parametrize("times", [0.9, 1.99, 2, 2.01, 4, 7.9, 8])
def test_reduced_jpeg_keeps_the_pixels_that_model_and_thumbnail_need(resize: int, min_side: int, times: float) -> None:
    side = int(times * min_side)
    picture, _ = decode_for_model(Preprocessing(resize=resize, input_size=32), encode(noisy(side, side + 3), "JPEG"))
    scale = next(scale for scale in (8, 4, 2, 1) if side >= scale * min_side or scale == 1)
    assert picture.size == (-(-side // scale), -(-(side + 3) // scale))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(641, 643), (643, 642), (1287, 1500)])
def test_box_of_a_reduced_jpeg_holds_exactly_the_photo(size: tuple[int, int], orientation: int) -> None:
    """The last column of an image of 641 pixels at half scale is half outside it, on whichever side it ends up."""
    rule = Preprocessing(resize=256, input_size=224)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noisy(*size), "JPEG", quality=95, exif=exif)
    whole = rule.apply(decode(data)).astype(int)
    picture, part = decode_for_model(rule, data)
    assert max(picture.size) <= max(size) / 2 + 1
    boxed = np.abs(rule.apply(picture, part) - whole).mean()
    assert boxed < 1
    assert boxed < 0.9 * np.abs(rule.apply(picture) - whole).mean(), "what lies outside must not be squeezed in"


def test_rotated_large_jpeg_has_the_same_pixels_as_its_upright_copy() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    upright = noisy(1000, 750)
    rotated = encode(upright.transpose(Image.Transpose.ROTATE_180), "JPEG", quality=95, exif=exif)
    difference = load_pixels(rotated, RULE).astype(int) - load_pixels(encode(upright, "JPEG", quality=95), RULE)
    assert np.abs(difference).mean() < 1


def encode_rotated(image: Image.Image, orientation: int, kind: str) -> bytes:
    """Encodes the image, stored in this EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = image.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else image
    return encode(stored, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))


# A grain of 16 pixels survives a scale of 1/8, so that a difference means a wrong place rather than another filter:
# a part that is off by a quarter of a reduced pixel differs by 1.4.
LARGE = noisy(1307, 1291, grain=16)


@settings(max_examples=60, deadline=None)
@given(
    orientation=st.integers(1, 8),
    size=st.tuples(st.integers(500, 1307), st.integers(500, 1291)),
    corner=st.tuples(st.integers(0, 150), st.integers(0, 150)),
    extent=st.tuples(st.integers(280, 1307), st.integers(280, 1291)),
    side=st.integers(30, 150),
)
def test_part_of_a_reduced_jpeg_equals_the_part_of_the_full_image(
    orientation: int, size: tuple[int, int], corner: tuple[int, int], extent: tuple[int, int], side: int
) -> None:
    data = encode_rotated(LARGE.crop((0, 0, *size)), orientation, "JPEG")
    part = (*corner, min(size[0], corner[0] + extent[0]), min(size[1], corner[1] + extent[1]))
    image = EncodedImage(data)
    assert image.size == size, "known without decoding"
    picture, place = image.read(part, side)
    enough = min(part[2] - part[0], part[3] - part[1]) / (1.25 * side)
    scale = next(scale for scale in (8, 4, 2, 1) if enough >= scale or scale == 1)
    assert place[2] - place[0] == (part[2] - part[0]) / scale and place[3] - place[1] == (part[3] - part[1]) / scale
    assert min(place[:2]) >= 0 and max(place[:2]) < 1, "no surplus pixels are decoded"
    assert 0 <= picture.width - place[2] < 1 and 0 <= picture.height - place[3] < 1
    small = picture.resize((side, side), Image.Resampling.BICUBIC, box=place)
    expected = decode(data).crop(part).resize((side, side), Image.Resampling.BICUBIC)
    difference = np.abs(np.asarray(small).astype(int) - np.asarray(expected))
    assert difference.mean() < 1.4 and (scale > 1 or not difference.any())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_part_at_full_scale_has_exactly_the_pixels_of_the_full_image(kind: str, orientation: int) -> None:
    data = encode_rotated(noisy(91, 53), orientation, kind)
    part = (7, 5, 60, 41)
    picture, place = EncodedImage(data).read(part, side=200)
    assert place == (0, 0, 53, 36)
    assert np.array_equal(np.asarray(picture), np.asarray(decode(data).crop(part)))


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_part_of_a_transparent_image_is_composited_on_white(kind: str) -> None:
    image = halves().quantize(4)
    data = encode(image, kind, transparency=image.getpixel((3, 10)))
    assert EncodedImage(data).read((0, 0, 10, 10))[0].getcolors() == [(100, WHITE)]


def test_header_is_checked_on_opening_and_pixels_on_reading() -> None:
    with pytest.raises(ImageError) as caught:
        EncodedImage(png_header(1_001, 1_000), ImageLimits(max_pixels=1_000_000))
    assert caught.value.reason == "too_many_pixels"
    image = EncodedImage(encode(halves().resize((200, 100)), "JPEG")[:-200])
    assert image.size == (200, 100)
    with pytest.raises(ImageError) as caught:
        image.read((0, 0, 10, 10))
    assert caught.value.reason == "truncated"


def test_preprocessing_scales_the_short_side_and_crops_the_centre() -> None:
    rule = Preprocessing(resize=20, input_size=10)
    pixels = rule.apply(halves().resize((80, 40)))
    assert pixels.shape == (10, 10, 3) and pixels.dtype == np.uint8
    assert pixels[:, 0, 0].min() > 200 and pixels[:, -1, 2].min() > 200, "the halves meet in the middle"


@pytest.mark.parametrize("size", [(100, 60), (61, 230), (32, 32), (640, 41)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_resampling_the_crop_equals_resampling_the_whole_image(size: tuple[int, int], interpolation: Any) -> None:
    rule = Preprocessing(resize=40, input_size=32, interpolation=interpolation)
    image = noisy(800, 800).resize(size)
    scale = 40 / min(size)
    whole = image.resize(
        (round(size[0] * scale), round(size[1] * scale)), getattr(Image.Resampling, interpolation.upper())
    )
    left, top = (whole.width - 32) // 2, (whole.height - 32) // 2
    expected = np.asarray(whole.crop((left, top, left + 32, top + 32))).astype(int)
    assert np.abs(rule.apply(image) - expected).max() <= 1


@pytest.mark.parametrize("size", [(1, 500), (1, 4_000_000), (3_000_000, 1)])
def test_extremely_narrow_image_fills_the_input(size: tuple[int, int]) -> None:
    assert Preprocessing(resize=256, input_size=224).apply(Image.new("RGB", size)).shape == (224, 224, 3)


def test_thumbnail_is_small_and_keeps_the_proportions() -> None:
    small = Image.open(io.BytesIO(thumbnail(Image.new("RGB", (800, 400)), side=100)))
    assert small.format == "JPEG" and small.size == (100, 50)


def test_equal_bytes_have_equal_digests() -> None:
    assert digest(b"a") == digest(b"a") != digest(b"b")


def test_a_padded_photo_keeps_its_outermost_pixels_and_is_white_beside_them() -> None:
    tall = Image.new("RGB", (30, 60), "blue")
    tall.paste("red", (0, 0, 30, 6))
    tall.paste("red", (0, 54, 30, 60))
    rule = Preprocessing(resize=24, input_size=20, fit="pad")
    pixels = load_pixels(encode(tall, "PNG"), rule)
    assert pixels.shape == (20, 20, 3)
    assert (pixels[:, :5] == 255).all() and (pixels[:, 15:] == 255).all(), "half as wide as high"
    assert pixels[0, 10].tolist() == [255, 0, 0] == pixels[19, 10].tolist(), "a centre crop would lose both ends"
    assert pixels[10, 10].tolist() == [0, 0, 255]
    cropped = load_pixels(encode(tall, "PNG"), Preprocessing(resize=24, input_size=20))
    assert not (cropped == [255, 0, 0]).all(axis=2).any()


@pytest.mark.parametrize("size", [(1, 500), (500, 1), (7, 7), (640, 480)])
def test_padding_accepts_every_shape(size: tuple[int, int]) -> None:
    pixels = Preprocessing(resize=24, input_size=20, fit="pad").apply(Image.new("RGB", size, "blue"))
    assert pixels.shape == (20, 20, 3)
    assert (pixels == [0, 0, 255]).all(axis=2).sum() == max(1, round(20 * min(size) / max(size))) * 20


def test_a_large_jpeg_is_padded_from_a_reduced_scale() -> None:
    photo = noisy(1600, 900, grain=16)
    rule = Preprocessing(resize=80, input_size=64, fit="pad")
    reduced = load_pixels(encode(photo, "JPEG", quality=95), rule).astype(int)
    assert np.abs(reduced - rule.apply(photo)).mean() < 1.4
