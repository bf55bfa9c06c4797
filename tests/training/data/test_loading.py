"""Photos to tensors: the same seed, epoch and place give the same pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from index.images import Preprocessing, decode
from tests.support.tiny_gallery import tiny_photo, write_tiny_folder
from training.config import AugmentationSettings
from training.data.loading import MeasuredPhotos, TrainingPhotos, augment, read_photo
from training.data.photos import Photo, load_data
from training.errors import TrainingError


@pytest.fixture
def photos(tmp_path: Path) -> tuple[Photo, ...]:
    return load_data(f"folder:{write_tiny_folder(tmp_path / 'photos')}").train


def test_a_photo_of_an_epoch_is_always_the_same(photos: tuple[Photo, ...]) -> None:
    first, second = (TrainingPhotos(photos, 32, AugmentationSettings(), seed=1) for _ in range(2))
    second[0, 5], second[3, 1]  # what was read before must not matter
    assert torch.equal(first[2, 7][0], second[2, 7][0])
    assert not torch.equal(first[2, 7][0], first[3, 7][0])
    assert first[2, 7][0].shape == (32, 32, 3) and first[2, 7][0].dtype == torch.uint8


def test_labels_are_the_numbers_of_sorted_classes(photos: tuple[Photo, ...]) -> None:
    data = TrainingPhotos(photos, 32, AugmentationSettings(), seed=1)
    assert data.classes == sorted(data.classes)
    assert [data.classes[data[0, index][1]] for index in range(len(data))] == [photo.label for photo in photos]
    assert [data.classes[number] for number in data.labels] == [photo.label for photo in photos]


def test_augmentation_keeps_to_its_scale() -> None:
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8)[:, None], (1, 200))).convert("RGB")
    rng = np.random.default_rng(0)
    whole = AugmentationSettings(crop_scale=(1.0, 1.0))
    spans = [int(np.ptp(np.asarray(augment(ramp, 50, whole, rng)))) for _ in range(20)]
    assert min(spans) > 150
    small = AugmentationSettings(crop_scale=(0.01, 0.02))
    spans = [int(np.ptp(np.asarray(augment(ramp, 50, small, rng)))) for _ in range(20)]
    assert max(spans) < 50


def test_measured_photos_are_the_pixels_that_serving_sees(photos: tuple[Photo, ...]) -> None:
    rule = Preprocessing(resize=40, input_size=32)
    expected = rule.apply(decode(photos[3].path.read_bytes()))
    np.testing.assert_array_equal(MeasuredPhotos(photos, rule)[3].numpy(), expected)


def test_an_unreadable_photo_is_named_with_its_class(tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(tiny_photo(0, 0)[:100])
    with pytest.raises(TrainingError, match=r"broken\.jpg \(class mug\)"):
        MeasuredPhotos([Photo(path, "mug")], Preprocessing(resize=8, input_size=8))[0]


def test_a_photo_is_cut_to_its_box_before_anything_else(tmp_path: Path) -> None:
    pixels = np.zeros((60, 80, 3), np.uint8)
    pixels[20:50, 10:40] = 255
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    photo = Photo(tmp_path / "photo.png", "mug", (10, 20, 40, 50))
    assert MeasuredPhotos([photo], Preprocessing(resize=16, input_size=16))[0].min() == 255
    for epoch in range(5):
        assert TrainingPhotos([photo], 16, AugmentationSettings(), seed=0)[epoch, 0][0].min() == 255


def test_a_box_is_cut_to_the_image_but_one_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(tiny_photo(0, 0))
    assert read_photo(Photo(tmp_path / "photo.jpg", "mug", (-5, 90, 20, 300))).size == (20, 6)
    with pytest.raises(TrainingError, match=r"photo\.jpg \(class mug\): the box .* lies outside its \(96, 96\) pixels"):
        read_photo(Photo(tmp_path / "photo.jpg", "mug", (96, 0, 120, 20)))
