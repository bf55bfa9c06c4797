"""Data sets: who is learned from, who is only measured, and what is refused."""

from pathlib import Path

import pytest

from tests.support.tiny_gallery import write_tiny_folder
from training.data.photos import DataSet, Photo, load_data
from training.errors import TrainingError


def labels(photos: tuple[Photo, ...]) -> set[str]:
    return {photo.label for photo in photos}


def test_a_folder_is_split_by_class_and_always_the_same_way(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos")
    first, second = load_data(f"folder:{folder}"), load_data(f"folder:{folder}")
    assert first == second
    assert not labels(first.train) & labels(first.test)
    assert len(first.train) + len(first.test) == 32
    assert len(labels(first.test)) == 3, "a third of eight classes"


def test_classes_with_one_photo_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos")
    for photo in list((folder / "red").iterdir())[1:]:
        photo.unlink()
    data = load_data(f"folder:{folder}")
    assert "red" not in labels(data.train) | labels(data.test)


@pytest.mark.parametrize("spec", ["nonsense", "folder", "folder:", "sampler"])
def test_an_unknown_specification_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(TrainingError, match="folder:DIR"):
        load_data(spec)


def test_too_few_classes_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    with pytest.raises(TrainingError, match="0 classes"):
        load_data(f"folder:{folder}")


def test_a_class_in_both_splits_is_refused() -> None:
    photo = Photo(Path("a.jpg"), "a")
    with pytest.raises(TrainingError, match="both splits"):
        DataSet("leaky", (photo, Photo(Path("b.jpg"), "b")), (photo,))
