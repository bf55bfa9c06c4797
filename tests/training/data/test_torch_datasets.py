"""Photos to tensors: the same seed, epoch and place give the same pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from index.embedding.images import Preprocessing, decode
from tests.support.tiny_gallery import tiny_photo, write_tiny_folder
from training.config import AugmentationSettings
from training.data import Photo, load_data
from training.data.torch_datasets import MeasuredPhotos, TrainingPhotos, decoding_workers, read_photo
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


def test_measured_photos_are_the_pixels_that_serving_sees(photos: tuple[Photo, ...]) -> None:
    rule = Preprocessing(resize=40, input_size=32)
    expected = rule.apply(decode(photos[3].path.read_bytes()))
    np.testing.assert_array_equal(MeasuredPhotos(photos, rule)[3].numpy(), expected)


def test_an_unreadable_photo_is_reported_with_its_class(tmp_path: Path) -> None:
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
    with pytest.raises(TrainingError, match=r"photo\.jpg \(class mug\): the box .* is outside its \(96, 96\) pixels"):
        read_photo(Photo(tmp_path / "photo.jpg", "mug", (96, 0, 120, 20)))


def test_a_box_of_a_large_photo_is_measured_as_if_all_of_it_were_decoded(tmp_path: Path) -> None:
    rows, columns = np.mgrid[0:1501, 0:1203]
    pixels = np.stack((rows % 200, columns % 180, (rows + columns) % 256), axis=2).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "photo.jpg", quality=95, exif=exif)
    photo, rule = Photo(tmp_path / "photo.jpg", "mug", (131, 57, 1300, 1100)), Preprocessing(resize=72, input_size=64)
    expected = rule.apply(read_photo(photo)).astype(int)
    assert read_photo(photo).size == (1169, 1043) and read_photo(photo, 72).size == (147, 131), "an eighth"
    assert np.abs(MeasuredPhotos([photo], rule)[0].numpy() - expected).mean() < 2


def test_an_unreadable_training_photo_is_reported_with_its_class(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(tiny_photo(0, 0)[:-100])
    with pytest.raises(TrainingError, match=r"broken\.jpg \(class mug\) cannot be used: The image is truncated"):
        TrainingPhotos([Photo(tmp_path / "broken.jpg", "mug")], 16, AugmentationSettings(), seed=0)[0, 0]


@pytest.mark.parametrize(
    ("cores", "processes", "on_cpu", "on_gpu"),
    [(1, 1, 0, 1), (2, 1, 2, 2), (6, 1, 6, 6), (64, 1, 8, 8), (16, 4, 4, 4), (8, 8, 0, 1)],
)
def test_workers_follow_from_the_cores_that_a_process_has(
    cores: int, processes: int, on_cpu: int, on_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.torch_datasets.usable_cores", lambda: cores)
    assert decoding_workers(None, "cpu", processes) == on_cpu
    assert decoding_workers(None, "cuda", processes) == on_gpu
    assert decoding_workers(3, "cpu", processes) == 3 and decoding_workers(0, "cuda", processes) == 0
