"""Checking photos before a run: bad ones are named and left out, good ones are not looked at again."""

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

    def watched(photo: Photo) -> str | None:
        seen.append(photo.path)
        return look(photo)

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
    with pytest.raises(
        TrainingError, match=r"fewer than two classes to learn\. 20 photos cannot be read.*not an image"
    ):
        check_photos(data, cache=cache)


def test_a_damaged_cache_is_reported_with_the_fix(data: DataSet, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(b"not a database" * 100)
    with pytest.raises(TrainingError, match=r"checked\.sqlite is not usable.*Delete it"):
        check_photos(data, cache=cache)
    shutil.rmtree(cache.parent)
    assert check_photos(data, cache=cache) is data
