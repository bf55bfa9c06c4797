"""Augmentation: crops as torchvision draws them, and the effects of the settings."""

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torchvision.transforms import RandomResizedCrop, functional

from index.embedding.images import EncodedImage
from training.config import AugmentationSettings
from training.data.augmentation import augment, random_part

RATIOS = (3 / 4, 4 / 3)
WHOLE: dict[str, Any] = {"crop_scale": (1.0, 1.0), "flip": False}
SIDE = 64


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> EncodedImage:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return EncodedImage(out.getvalue())


def shapes(side: int = SIDE) -> Image.Image:
    """Soft colours without black or white, so that few changes of them are clipped."""
    rows, columns = np.mgrid[0:side, 0:side] / side
    image = Image.fromarray((90 + 60 * np.stack((rows, columns, 1 - rows), axis=2)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse((side // 8, side // 4, side // 2, 3 * side // 4), fill=(150, 100, 80))
    draw.rectangle((5 * side // 8, side // 8, 7 * side // 8, side // 2), fill=(80, 110, 160))
    return image


def augmented(image: Image.Image, seed: int = 0, side: int = SIDE, **settings: Any) -> Image.Image:
    made = AugmentationSettings(**settings)
    return augment(encoded(image), (0, 0, *image.size), side, made, np.random.default_rng(seed))


def values(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


@pytest.mark.parametrize("size", [(400, 300), (300, 400), (320, 320), (900, 300)])
@pytest.mark.parametrize("area", [(0.08, 1.0), (0.2, 1.0), (0.9, 1.0)])
def test_crops_are_distributed_as_those_of_torchvision(size: tuple[int, int], area: tuple[float, float]) -> None:
    rng, width, height = np.random.default_rng(0), *size
    torch.manual_seed(0)
    ours = np.array([random_part(size, area, RATIOS, rng) for _ in range(4000)], float)
    photo = torch.zeros(3, height, width)
    drawn = [RandomResizedCrop.get_params(photo, list(area), list(RATIOS)) for _ in range(4000)]
    theirs = np.array([(left, top, left + across, top + down) for top, left, down, across in drawn], float)

    def facts(parts: NDArray[np.float64]) -> NDArray[np.float64]:
        left, top, right, bottom = parts.T
        shares = (right - left) * (bottom - top) / (width * height)
        return np.stack((shares, np.log((right - left) / (bottom - top)), left / width, top / height))

    for own, other in zip(facts(ours), facts(theirs), strict=True):
        quantiles = [0.1, 0.25, 0.5, 0.75, 0.9]
        assert np.abs(np.quantile(own, quantiles) - np.quantile(other, quantiles)).max() < 0.04
        assert abs(own.mean() - other.mean()) < 0.02


def test_small_crops_of_a_photo_are_more_frequent_than_those_that_hardly_fit() -> None:
    rng = np.random.default_rng(1)
    parts = np.array([random_part((400, 300), (0.08, 1.0), RATIOS, rng) for _ in range(4000)])
    shares = (parts[:, 2] - parts[:, 0]) * (parts[:, 3] - parts[:, 1]) / (400 * 300)
    assert shares.mean() == pytest.approx(0.43, abs=0.015), "where what does not fit is cut to fit it is 0.52"


@given(
    size=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    area=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted),
    seed=st.integers(0, 99),
)
def test_a_crop_is_within_its_photo(size: tuple[int, int], area: list[float], seed: int) -> None:
    left, top, right, bottom = random_part(size, (area[0], area[1]), RATIOS, np.random.default_rng(seed))
    assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((2000, 100), (933, 0, 1066, 100)),
        ((100, 2000), (0, 933, 100, 1066)),
        ((1, 500), (0, 249, 1, 250)),
        ((500, 1), (249, 0, 250, 1)),
    ],
)
def test_of_a_photo_in_which_nothing_fits_the_centre_is_taken(
    size: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    photo = torch.zeros(3, size[1], size[0])
    top, left, down, across = RandomResizedCrop.get_params(photo, [0.9, 1.0], list(RATIOS))
    part = random_part(size, (0.9, 1.0), RATIOS, np.random.default_rng(0))
    assert part == expected == (left, top, left + across, top + down)


def test_augmentation_keeps_to_its_scale() -> None:
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8)[:, None], (1, 200))).convert("RGB")
    spans = [int(np.ptp(values(augmented(ramp, seed, crop_scale=(1.0, 1.0))))) for seed in range(20)]
    assert min(spans) > 150
    spans = [int(np.ptp(values(augmented(ramp, seed, crop_scale=(0.01, 0.02))))) for seed in range(20)]
    assert max(spans) < 50


@pytest.mark.parametrize("size", [(1600, 1200), (1203, 1601)])
def test_a_large_jpeg_is_augmented_as_its_lossless_twin(size: tuple[int, int]) -> None:
    data = io.BytesIO()
    shapes(1601).crop((0, 0, *size)).save(data, "JPEG", quality=95)
    complete = Image.open(io.BytesIO(data.getvalue())).convert("RGB")
    for seed in range(8):
        reduced = augment(
            EncodedImage(data.getvalue()), (100, 50, *size), 100, AugmentationSettings(), np.random.default_rng(seed)
        )
        lossless = augment(
            encoded(complete, compress_level=1),
            (100, 50, *size),
            100,
            AugmentationSettings(),
            np.random.default_rng(seed),
        )
        assert np.abs(values(reduced) - values(lossless)).mean() < 1


def test_the_filter_of_the_resize_can_be_chosen() -> None:
    image = shapes(200)
    for name, filter_ in (("bicubic", Image.Resampling.BICUBIC), ("bilinear", Image.Resampling.BILINEAR)):
        expected = image.resize((SIDE, SIDE), filter_)
        assert np.array_equal(values(augmented(image, **WHOLE | {"interpolation": name})), values(expected)), name


def test_crop_and_flip_do_not_depend_on_what_else_is_on() -> None:
    image = shapes(100)
    image.paste("white", (0, 0, 50, 50))
    for seed in range(12):
        plain = values(augmented(image, seed))
        hardly = values(augmented(image, seed, rotation=1e-6, colour_jitter=1e-6, hue_jitter=1e-6, blur=1e-6))
        assert np.abs(hardly - plain).mean() < 1, "only rounded"
        unflipped = values(augmented(image, seed, flip=False))
        assert np.array_equal(plain, unflipped) or np.array_equal(plain, unflipped[:, ::-1])


def test_half_of_the_photos_are_mirrored() -> None:
    image = shapes()
    mirrored = [np.array_equal(values(augmented(image, seed, crop_scale=(1, 1))), values(image)) for seed in range(200)]
    assert 80 < sum(mirrored) < 120


@pytest.mark.parametrize("seed", range(6))
def test_a_turned_photo_has_no_black_corners(seed: int) -> None:
    image = shapes()
    turned = values(augmented(image, seed, **WHOLE, rotation=180))
    assert turned.min() > 60, "the darkest of the photo is 80"
    assert np.abs(turned - values(image)).mean() > 1
    # The middle of the photo stays where it is.
    assert np.abs(turned[30:34, 30:34].mean((0, 1)) - values(image)[30:34, 30:34].mean((0, 1))).max() < 12


def test_a_rotation_keeps_to_its_largest_angle() -> None:
    line = Image.new("RGB", (201, 201), "white")
    ImageDraw.Draw(line).rectangle((0, 98, 201, 102), fill="black")
    angles = []
    for seed in range(60):
        dark = values(augmented(line, seed, side=201, **WHOLE, rotation=20))[:, :, 0] < 128
        rows = [np.flatnonzero(dark[:, column]).mean() for column in (60, 140)]
        angles.append(math.degrees(math.atan((rows[0] - rows[1]) / 80)))
    assert max(map(abs, angles)) < 20.5 and min(angles) < -14 and max(angles) > 14


def test_brightness_contrast_and_saturation_are_those_of_torchvision() -> None:
    """One pass over the pixels stands for three there, so the roundings differ."""
    image = shapes()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        random_part(image.size, (1.0, 1.0), RATIOS, rng)
        rng.random()
        brightness, contrast, saturation = rng.uniform(0.7, 1.3, 3)
        expected = functional.adjust_brightness(image, brightness)
        expected = functional.adjust_saturation(functional.adjust_contrast(expected, contrast), saturation)
        changed = values(augmented(image, seed, **WHOLE, colour_jitter=0.3))
        assert np.abs(changed - values(expected)).max() <= 3
        assert np.abs(changed - values(image)).mean() > 1


def test_a_shift_of_the_hue_is_that_of_torchvision() -> None:
    image = shapes()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        random_part(image.size, (1.0, 1.0), RATIOS, rng)
        rng.random()
        expected = functional.adjust_hue(image, rng.uniform(-0.2, 0.2))
        shifted = values(augmented(image, seed, **WHOLE, hue_jitter=0.2))
        assert np.abs(shifted - values(expected)).mean() < 1
        assert np.abs(shifted.max(2) - values(image).max(2)).max() <= 1, "the brightness stays"


def test_blur_softens_edges_and_leaves_the_mean() -> None:
    image = shapes()
    for seed in range(6):
        blurred = values(augmented(image, seed, **WHOLE, blur=1))
        assert np.abs(np.diff(blurred, axis=1)).max() <= np.abs(np.diff(values(image), axis=1)).max()
        assert np.abs(blurred.mean((0, 1)) - values(image).mean((0, 1))).max() < 1
    assert np.abs(blurred - values(image)).mean() > 0.01


def test_compression_leaves_the_marks_of_a_jpeg() -> None:
    image = shapes()
    marks = [np.abs(values(augmented(image, seed, **WHOLE, jpeg=1)) - values(image)).mean() for seed in range(12)]
    assert min(marks) > 0.1 and max(marks) < 6 and max(marks) > 1.5 * min(marks), "of several qualities"


def test_an_erased_rectangle_has_the_mean_colour() -> None:
    image = shapes()
    mean, shares = np.round(values(image).mean((0, 1))), []
    for seed in range(40):
        erased = values(augmented(image, seed, **WHOLE, erasing=1))
        changed = (erased != values(image)).any(2)
        assert np.abs(erased[changed] - mean).max() <= 1
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.95
        shares.append(changed.mean())
    assert min(shares) < 0.1 and 0.25 < max(shares) < 0.35


@pytest.mark.parametrize("kind", ["blur", "jpeg", "erasing"])
def test_probabilities_are_kept(kind: str) -> None:
    image = shapes()
    changed = [(values(augmented(image, seed, **WHOLE | {kind: 0.3})) != values(image)).any() for seed in range(300)]
    assert 0.2 < np.mean(changed) < 0.4


@given(
    rotation=st.floats(0, 180),
    jitter=st.floats(0, 1),
    hue=st.floats(0, 0.5),
    chances=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    side=st.integers(8, 65),
)
def test_all_of_them_together_make_a_picture_of_the_right_size_again_and_again(
    rotation: float, jitter: float, hue: float, chances: tuple[float, float, float], side: int
) -> None:
    blur, jpeg, erasing = chances
    settings: dict[str, Any] = {"rotation": rotation, "colour_jitter": jitter, "hue_jitter": hue}
    settings |= {"blur": blur, "jpeg": jpeg, "erasing": erasing}
    first, second = (augmented(shapes(), 5, side=side, **settings) for _ in range(2))
    assert first.size == (side, side) and first.mode == "RGB"
    assert np.array_equal(values(first), values(second))


def test_a_padded_photo_is_cropped_from_the_square_around_it() -> None:
    tall = Image.new("RGB", (30, 60), "blue")
    settings, rng = AugmentationSettings(**WHOLE), np.random.default_rng(0)
    crop = augment(encoded(tall), (0, 0, 30, 60), 20, settings, rng, "pad")
    pixels = values(crop)
    assert (pixels == [0, 0, 255]).all(axis=2).sum() == 200, "half of the square"
    assert (pixels[:, :5] == 255).all() and (pixels[:, 15:] == 255).all()


@given(st.integers(30, 90), st.integers(30, 90), st.integers(0, 10_000))
def test_padded_crops_show_the_same_place_as_crops_of_the_padded_photo(width: int, height: int, seed: int) -> None:
    rows, columns = np.mgrid[0:height, 0:width]
    photo = Image.fromarray(np.stack((rows * 2, columns * 2, rows + columns), axis=2).astype(np.uint8))
    length = max(width, height)
    square = Image.new("RGB", (length, length), "white")
    square.paste(photo, ((length - width) // 2, (length - height) // 2))
    settings, whole = AugmentationSettings(interpolation="bilinear", flip=False), (0, 0, length, length)
    expected = augment(encoded(square), whole, 24, settings, np.random.default_rng(seed))
    part = (0, 0, width, height)
    found = augment(encoded(photo), part, 24, settings, np.random.default_rng(seed), "pad")
    # The edge between photo and white is rounded to a pixel instead of blended.
    difference = np.abs(values(found) - values(expected)).max(axis=2)
    assert np.median(difference) <= 6 and (difference > 30).mean() <= 3 / 24
