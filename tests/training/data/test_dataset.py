"""Data sets: splits by class, held-out classes, and missing files."""

from pathlib import Path

import pytest

from training.data import DataSet, Photo
from training.data.dataset import drop_missing, hold_out
from training.errors import TrainingError


def labels(photos: tuple[Photo, ...]) -> set[str]:
    return {photo.label for photo in photos}


def some_photos(**counts: int) -> list[Photo]:
    return [Photo(Path(label, f"{number}.jpg"), label) for label, count in counts.items() for number in range(count)]


def test_a_class_in_both_splits_is_refused() -> None:
    photo = Photo(Path("a.jpg"), "a")
    with pytest.raises(TrainingError, match="both splits"):
        DataSet("leaky", (photo, Photo(Path("b.jpg"), "b")), (photo,))


def test_held_out_classes_are_complete_and_depend_on_the_seed() -> None:
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
def test_holding_out_of_too_few_classes_is_refused_with_the_minimum(counts: dict[str, int]) -> None:
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
