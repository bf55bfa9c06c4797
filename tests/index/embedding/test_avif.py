"""Tests of reading the frames of AVIF files: sizes of honest files, errors for all others."""

import io
import random
import struct

import pytest
from PIL import Image, features

from index.embedding.avif import av1_frames
from index.embedding.images import ImageError, decode

pytestmark = pytest.mark.skipif(not features.check("avif"), reason="Pillow was built without AVIF")


def avif(size: tuple[int, int], mode: str = "RGB", **options: object) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, "AVIF", speed=10, **options)
    return out.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (64, 48), (333, 257), (3000, 20)])
def test_frame_has_the_size_of_the_image(size: tuple[int, int]) -> None:
    assert av1_frames(avif(size)) == [size]


def test_opacity_is_a_second_frame() -> None:
    assert av1_frames(avif((40, 30), "RGBA")) == [(40, 30), (40, 30)]


def test_animation_is_refused() -> None:
    data = avif((40, 30), save_all=True, append_images=[Image.new("RGB", (40, 30), "red")])
    with pytest.raises(ValueError, match="it is animated"):
        av1_frames(data)
    with pytest.raises(ImageError, match=r"The AVIF cannot be decoded: it is animated. Convert it to JPEG."):
        decode(data)


def test_frame_larger_than_the_declared_size_is_refused() -> None:
    data = bytearray(avif((2000, 2000)))
    place = data.index(b"ispe") + 8
    data[place : place + 8] = struct.pack(">II", 100, 100)
    with pytest.raises(ImageError, match="The AVIF contains more pixels than 100 x 100") as caught:
        decode(bytes(data))
    assert caught.value.reason == "unreadable"


def test_damaged_file_has_frames_or_is_a_value_error() -> None:
    rng, valid, refused = random.Random(0), avif((64, 48), "RGBA"), 0
    for _ in range(5000):
        data = bytearray(valid)
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 0xFF, rng.randrange(256)))
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            assert all(width > 0 and height > 0 for width, height in av1_frames(bytes(data)))
        except ValueError:
            refused += 1
    assert 0 < refused < 5000
