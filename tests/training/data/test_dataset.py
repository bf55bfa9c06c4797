"""Data sets: splits by class, held-out classes, and missing files."""

import unicodedata
from pathlib import Path

import pytest

from training.data import DataSet, Photo
from training.data.dataset import drop_missing, hold_out, split_by_class
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
    assert 2 <= len(labels(validation)) <= 8, "about 4"
    assert hold_out(photos, 0.2, seed=1)[1] == validation != hold_out(photos, 0.2, seed=2)[1]


def test_the_share_of_held_out_classes_is_about_the_wanted_one() -> None:
    photos = some_photos(**{f"product-{number}": 2 for number in range(3000)})
    assert len(labels(split_by_class("shop", photos).test)) == pytest.approx(1000, abs=80)
    assert len(labels(hold_out(photos, 0.15, seed=3)[1])) == pytest.approx(450, abs=60)


@pytest.mark.parametrize("count", [81, 500])
def test_a_new_class_moves_no_other_to_another_split(count: int) -> None:
    """Month by month a catalogue grows and shrinks; the class that was measured is still measured."""
    names = [f"product-{number}" for number in range(count)]
    old = split_by_class("shop", some_photos(**dict.fromkeys(names, 3)))
    grown = split_by_class("shop", some_photos(**dict.fromkeys(["aaa", *names, "zzz", "m"], 3)))
    shrunk = split_by_class("shop", some_photos(**dict.fromkeys(names[1:], 3)))
    for other in (grown, shrunk):
        assert not labels(old.train) & labels(other.test) and not labels(old.test) & labels(other.train)
        for seed in range(3):
            before, after = (hold_out(data.train, 0.2, seed) for data in (old, other))
            assert not labels(before[0]) & labels(after[1]) and not labels(before[1]) & labels(after[0])


def test_in_a_tiny_catalogue_a_new_class_moves_at_most_one_other() -> None:
    for number in range(50):
        names = [f"{number}-{letter}" for letter in "abcdef"]
        old, new = (
            labels(split_by_class("shop", some_photos(**dict.fromkeys(of, 2))).test) for of in (names[:5], names)
        )
        assert len((old ^ new) - {names[5]}) <= 1


def test_the_validation_classes_do_not_follow_from_the_test_classes() -> None:
    """One hash for both would leave no class in the lowest part of the training set."""
    data = split_by_class("shop", some_photos(**{f"product-{number}": 2 for number in range(600)}))
    assert len(labels(hold_out(data.train, 0.15, seed=0)[1])) > 30


def test_an_accent_is_the_same_in_both_of_its_spellings() -> None:
    names = [f"caf\u00e9-{number}" for number in range(40)]
    spelled = [unicodedata.normalize("NFD", name) for name in names]
    composed, decomposed = (
        labels(split_by_class("shop", some_photos(**dict.fromkeys(of, 2))).test) for of in (names, spelled)
    )
    assert {unicodedata.normalize("NFC", name) for name in decomposed} == composed


def test_a_small_share_never_holds_out_more_than_half() -> None:
    for number in range(50):
        photos = some_photos(**{f"{number}-{letter}": 2 for letter in "abcdef"})
        assert 2 <= len(labels(split_by_class("shop", photos).test)) <= 3


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
