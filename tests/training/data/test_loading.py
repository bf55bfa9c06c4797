"""Photos to tensors: the same seed, epoch and place give the same pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from index.images import Preprocessing, decode
from tests.support.tiny_gallery import tiny_photo, write_tiny_folder
from training.config import AugmentationSettings
from training.data.loading import EpochSampler, MeasuredPhotos, TrainingPhotos, augment
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


def test_every_photo_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    sampler = EpochSampler(count=20, batch_size=5, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.epoch = epoch
        epochs.append([index for batch in sampler for at, index in batch if at == epoch])
    assert sorted(epochs[0]) == list(range(20))
    assert epochs[0] == epochs[2] != epochs[1]


def test_the_short_rest_is_dropped_but_a_small_set_is_one_batch() -> None:
    assert [len(batch) for batch in EpochSampler(count=11, batch_size=4, seed=0)] == [4, 4]
    assert [len(batch) for batch in EpochSampler(count=3, batch_size=4, seed=0)] == [3]


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
