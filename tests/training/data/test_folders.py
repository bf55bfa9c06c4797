"""Folders of photos: one folder per class, or a given split."""

from pathlib import Path

import pytest

from tests.support.tiny_gallery import write_tiny_folder
from training.data import Photo, load_data
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
    assert first.remarks == ()


def test_classes_with_one_photo_are_left_out_with_a_remark(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos")
    for photo in list((folder / "red").iterdir())[1:]:
        photo.unlink()
    data = load_data(f"folder:{folder}")
    assert "red" not in labels(data.train) | labels(data.test)
    assert data.remarks == ("1 class with one photo only is left out: red.",)


def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    photos, split = write_tiny_folder(tmp_path / "photos"), tmp_path / "split"
    for name, half in (("train", ("red", "green", "blue")), ("test", ("cyan", "orange")), ("val", ("yellow",))):
        (split / name).mkdir(parents=True)
        for label in half:
            (photos / label).rename(split / name / label)
    data = load_data(f"folder:{split}")
    assert (labels(data.train), labels(data.test)) == ({"red", "green", "blue"}, {"cyan", "orange"})
    assert any("val" in remark for remark in data.remarks)


def test_a_class_in_both_train_and_test_is_refused(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "train", views=1)
    write_tiny_folder(tmp_path / "test", views=1)
    with pytest.raises(TrainingError, match=r"8 classes are in both splits.*never learned"):
        load_data(f"folder:{tmp_path}")


def test_files_of_unknown_types_and_empty_folders_are_remarked_but_hidden_ones_are_not(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos")
    for name in ("red/a.psd", "red/b.psd", "blue/notes.txt", "blue/._0.jpg", ".trash/0.jpg", "later/deep/0.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    data = load_data(f"folder:{folder}")
    assert data.remarks == (
        "1 folder holds no photos: later/deep.",
        "4 files are not images of a known type and left out: .psd (2), .txt (2).",
    )
    assert len(data.train) + len(data.test) == 32


def test_folders_that_hold_photos_are_the_classes_at_any_depth(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos" / "Fruit" / "Apple")
    folder.rename(folder.with_name("Pear"))
    write_tiny_folder(tmp_path / "photos" / "Fruit" / "Apple")
    data = load_data(f"folder:{tmp_path / 'photos'}")
    assert {"Fruit/Apple/red", "Fruit/Pear/red"} <= labels(data.train) | labels(data.test)
    assert len(labels(data.train) | labels(data.test)) == 16
    assert data.remarks == ()


def test_too_few_classes_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos", views=1)
    with pytest.raises(TrainingError, match=r"photos has 0 classes.*at least four"):
        load_data(f"folder:{folder}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="no class folders with photos"):
        load_data(f"folder:{tmp_path / 'empty'}")
