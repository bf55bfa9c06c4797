"""Data sets: who is learned from, who is only measured, what is remarked and what is refused."""

from pathlib import Path

import pytest

from tests.support.tiny_gallery import write_tiny_folder
from training.data import DataSet, Photo, load_data
from training.data.dataset import drop_missing, hold_out
from training.errors import TrainingError


def labels(photos: tuple[Photo, ...]) -> set[str]:
    return {photo.label for photo in photos}


def some_photos(**counts: int) -> list[Photo]:
    return [Photo(Path(label, f"{number}.jpg"), label) for label, count in counts.items() for number in range(count)]


def test_a_folder_is_split_by_class_and_always_the_same_way(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos")
    first, second = load_data(f"folder:{folder}"), load_data(f"folder:{folder}")
    assert first == second
    assert not labels(first.train) & labels(first.test)
    assert len(first.train) + len(first.test) == 32
    assert len(labels(first.test)) == 3, "a third of eight classes"
    assert first.remarks == ()


def test_classes_with_one_photo_are_left_out_and_named(tmp_path: Path) -> None:
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
    for name in ("red/a.heic", "red/b.heic", "blue/notes.txt", "blue/._0.jpg", ".trash/0.jpg", "later/deep/0.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    data = load_data(f"folder:{folder}")
    assert data.remarks == (
        "1 folder holds no photos: later.",
        "3 files are not images of a known type and left out: .heic (2), .txt (1).",
    )
    assert len(data.train) + len(data.test) == 32


@pytest.mark.parametrize("spec", ["nonsense", "folder", "folder:", "sampler", "cub", "table:"])
def test_an_unknown_specification_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(TrainingError, match=r"folder:DIR.*table:FILE.*inshop:DIR"):
        load_data(spec)


def test_too_few_classes_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "photos", views=1)
    with pytest.raises(TrainingError, match=r"photos has 0 classes.*at least four"):
        load_data(f"folder:{folder}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="no class folders with photos"):
        load_data(f"folder:{tmp_path / 'empty'}")


def test_a_class_in_both_splits_is_refused() -> None:
    photo = Photo(Path("a.jpg"), "a")
    with pytest.raises(TrainingError, match="both splits"):
        DataSet("leaky", (photo, Photo(Path("b.jpg"), "b")), (photo,))


def test_held_out_classes_are_whole_and_follow_from_the_seed() -> None:
    photos = some_photos(**{f"c{number}": 3 for number in range(20)})
    train, validation = hold_out(photos, 0.2, seed=1)
    assert sorted(train + validation) == sorted(photos)
    assert not labels(train) & labels(validation)
    assert len(labels(validation)) == 4
    assert hold_out(photos, 0.2, seed=1)[1] == validation != hold_out(photos, 0.2, seed=2)[1]


def test_classes_with_one_photo_are_never_held_out_but_stay_in_training() -> None:
    photos = some_photos(a=1, b=1, c=2, d=1, e=2)
    train, validation = hold_out(photos, 0.9, seed=0)
    assert (labels(train), labels(validation)) == ({"a", "b", "d"}, {"c", "e"})


def test_holding_out_leaves_two_classes_to_learn_and_takes_two() -> None:
    photos = some_photos(a=2, b=2, c=2, d=2, e=2)
    assert [len(labels(part)) for part in hold_out(photos, 0.99, seed=0)] == [2, 3]
    assert [len(labels(part)) for part in hold_out(photos, 0.01, seed=0)] == [3, 2]


@pytest.mark.parametrize("counts", [{"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 1, "c": 1, "d": 2}, {}])
def test_holding_out_of_too_few_classes_says_what_is_needed(counts: dict[str, int]) -> None:
    with pytest.raises(TrainingError, match="at least four classes"):
        hold_out(some_photos(**counts), 0.5, seed=0)


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(TrainingError, match="between 0 and 1"):
        hold_out(some_photos(a=2, b=2, c=2, d=2), share, seed=0)


def test_missing_files_are_counted_by_class_with_a_handful_of_names(tmp_path: Path) -> None:
    photos = [Photo(tmp_path / label / f"{n}.jpg", label) for label in "abcdefgh" for n in range(ord(label) - 96)]
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "0.jpg").touch()
    kept, remarks = drop_missing("shop", photos)
    assert kept == (Photo(tmp_path / "h" / "0.jpg", "h"),)
    assert remarks == (
        "35 listed image files are missing, of 8 classes: g (7), h (7), f (6), e (5), d (4) and 3 more.",
    )


def test_nothing_but_missing_files_is_refused_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"none of the 2 listed image files exists \(.*0\.jpg\)"):
        drop_missing("shop", [Photo(tmp_path / "0.jpg", "a"), Photo(tmp_path / "1.jpg", "a")])
