"""Checking photos before a run: bad ones are named and left out, good ones are not looked at again."""

import csv
import io
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.support.tiny_gallery import tiny_photo, write_tiny_folder
from training.data import DataSet, Photo, check_photos, load_data, validation
from training.data.torch_datasets import read_photo
from training.errors import TrainingError


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    return load_data(f"folder:{write_tiny_folder(tmp_path / 'photos')}")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "checked.sqlite"


@pytest.fixture
def checked_photos(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The photos that were decoded; the check still runs."""
    seen: list[Path] = []
    look = validation.photo_problem

    def watched(photo: Photo, data: bytes) -> str | None:
        seen.append(photo.path)
        return look(photo, data)

    monkeypatch.setattr(validation, "photo_problem", watched)
    return seen


def photo_bytes(kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    Image.effect_noise((400, 300), 60).convert("RGB").save(out, kind, **options)
    return out.getvalue()


def test_good_photos_are_left_as_they_are(data: DataSet, cache: Path) -> None:
    steps: list[tuple[int, int]] = []
    assert check_photos(data, cache=cache, on_progress=lambda done, total: steps.append((done, total))) is data
    assert steps[-1] == (32, 32)


def test_unreadable_photos_are_left_out_and_reported_by_class_with_the_reason(data: DataSet, cache: Path) -> None:
    first, second, third = data.train[0], data.train[1], data.test[0]
    first.path.write_bytes(b"")
    second.path.write_bytes(tiny_photo(0, 0)[:-200])
    third.path.unlink()
    checked = check_photos(data, cache=cache)
    assert set(data.train) - set(checked.train) == {first, second}
    assert set(data.test) - set(checked.test) == {third}
    assert checked.remarks[0] == (
        f"3 photos cannot be read and are left out, of 2 classes: {first.label} (2), {third.label} (1)."
    )
    reasons = sorted(remark.partition(f"(class {first.label}): ")[2] for remark in checked.remarks[1:])
    assert any("is empty" in reason for reason in reasons) and any("truncated" in reason for reason in reasons)


def test_good_photos_are_not_checked_again_until_they_change(
    data: DataSet, cache: Path, checked_photos: list[Path]
) -> None:
    check_photos(data, cache=cache)
    assert len(checked_photos) == 32
    checked_photos.clear()
    changed = data.train[3].path
    facts = changed.stat()
    os.utime(changed, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    check_photos(data, cache=cache)
    assert checked_photos == [changed]


def test_a_bad_photo_is_checked_again_each_time(data: DataSet, cache: Path, checked_photos: list[Path]) -> None:
    data.train[0].path.write_bytes(b"no image")
    first = check_photos(data, cache=cache)
    checked_photos.clear()
    assert check_photos(data, cache=cache) == first
    assert checked_photos == [data.train[0].path]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_the_check_and_the_training_agree_on_what_is_readable(data: DataSet, cache: Path, kind: str) -> None:
    """A truncated file that passes the check can be decoded by training."""
    complete = photo_bytes(kind)
    folder = data.train[0].path.parent
    cuts = [len(complete) * share // 20 for share in range(1, 20)] + [len(complete) - 1, len(complete)]
    photos = []
    for number, cut in enumerate(cuts):
        path = folder / f"cut-{number}.img"
        path.write_bytes(complete[:cut])
        photos.append(Photo(path, data.train[0].label))
    checked = check_photos(DataSet("cut", (*data.train, *photos), data.test), cache=cache)
    for photo in photos:
        if photo in checked.train:
            read_photo(photo)
        else:
            with pytest.raises(TrainingError):
                read_photo(photo)
    assert photos[-1] in checked.train and photos[0] not in checked.train


def test_a_box_outside_the_upright_image_is_left_out(data: DataSet, cache: Path) -> None:
    path = data.train[0].path
    exif = Image.Exif()
    exif[0x0112] = 6
    path.write_bytes(photo_bytes("JPEG", exif=exif))
    label = data.train[0].label
    inside, outside = Photo(path, label, (250, 350, 260, 390)), Photo(path, label, (350, 250, 390, 260))
    checked = check_photos(DataSet("boxes", (inside, outside, *data.train), data.test), cache=cache)
    assert inside in checked.train and outside not in checked.train
    assert "is outside the image of 300 x 400 pixels" in checked.remarks[1]
    assert read_photo(inside).size == (10, 40)


def test_a_data_set_of_bad_photos_is_refused_with_the_reason(data: DataSet, cache: Path) -> None:
    for photo in data.train:
        photo.path.write_bytes(b"no image")
    with pytest.raises(TrainingError, match=r"has 0 classes to learn\. 20 photos cannot be read.*not a photo"):
        check_photos(data, cache=cache)


def test_a_damaged_cache_is_reported_with_the_fix(data: DataSet, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(b"not a database" * 100)
    with pytest.raises(TrainingError, match=r"checked\.sqlite is not usable.*Delete it"):
        check_photos(data, cache=cache)
    shutil.rmtree(cache.parent)
    assert check_photos(data, cache=cache) is data


def read_csv(file: Path) -> list[list[str]]:
    with file.open(newline="", encoding="utf-8") as text:
        return list(csv.reader(text))


def test_every_unreadable_photo_is_listed_in_a_file(data: DataSet, cache: Path, tmp_path: Path) -> None:
    bad = data.train[:5]
    for photo in bad:
        photo.path.write_bytes(b"no image")
    formula = Photo(tmp_path / "=1+1.jpg", "=cmd()")
    checked = check_photos(DataSet("bad", (*data.train, formula), data.test), cache=cache, reports=tmp_path / "run")
    header, *rows = read_csv(tmp_path / "run" / "unreadable.csv")
    assert header == ["path", "class", "problem"]
    assert [row[0] for row in rows] == [str(photo.path) for photo in (*bad, formula)]
    assert rows[-1][1] == "'=cmd()", "a spreadsheet does not run it"
    assert f"All are listed in {tmp_path / 'run' / 'unreadable.csv'}." in checked.remarks
    assert not (tmp_path / "run" / "duplicates.csv").exists()


def test_equal_photos_of_two_classes_are_reported_from_the_cache_too(
    data: DataSet, cache: Path, tmp_path: Path, checked_photos: list[Path]
) -> None:
    first, other = data.train[0], next(photo for photo in data.train if photo.label != data.train[0].label)
    measured, twin = data.test[:2]
    assert measured.label == twin.label
    for copy in (other, measured):
        shutil.copy(first.path, copy.path)
    shutil.copy(data.test[4].path, data.test[5].path)
    for _ in range(2):
        checked = check_photos(data, cache=cache, reports=tmp_path)
        assert checked.train == data.train and checked.test == data.test, "nothing is left out"
        assert checked.remarks[0] == (
            "1 photo has two or more classes, 1 of them both to learn and to measure; the figures suffer:"
        )
        assert str(first.path) in checked.remarks[1]
        assert checked.remarks[2] == "1 test photo occurs more than once in its class, which raises recall."
        rows = read_csv(tmp_path / "duplicates.csv")
        assert rows[0] == ["group", "path", "class", "use"]
        assert {tuple(row[1:]) for row in rows if row[0] == "1"} == {
            (str(first.path), first.label, "learn"),
            (str(other.path), other.label, "learn"),
            (str(measured.path), measured.label, "measure"),
        }
    assert len(checked_photos) == 32, "digests come from the cache the second time"


def test_parts_of_one_photo_are_no_duplicates(data: DataSet, cache: Path) -> None:
    first, second = data.train[0], next(photo for photo in data.train if photo.label != data.train[0].label)
    boxes = (Photo(first.path, first.label, (0, 0, 20, 20)), Photo(first.path, second.label, (20, 20, 40, 40)))
    parts = DataSet("boxes", (*boxes, *data.train[1:]), data.test)
    assert check_photos(parts, cache=cache) is parts
