"""The sample shop on disk: the same bytes however it is written, reused, refused and never half there."""

import csv
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from index.errors import LookalikeError
from training.data.sample_shop import ShopPhoto, read_shop, write_shop

SMALL = {"products_per_family": 3, "photos_per_product": 2}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shops") / "shop", workers=2, **SMALL)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_the_bytes_do_not_depend_on_the_number_of_workers(shop: Path, tmp_path: Path) -> None:
    assert contents(write_shop(tmp_path / "again", workers=1, **SMALL)) == contents(shop)


def test_another_seed_gives_another_shop_in_the_same_place(tmp_path: Path) -> None:
    place = tmp_path / "shop"
    first = contents(write_shop(place, seed=1, workers=1, products_per_family=1, photos_per_product=2))
    second = contents(write_shop(place, seed=2, workers=1, products_per_family=1, photos_per_product=2))
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first)
    assert [p.name for p in tmp_path.iterdir()] == ["shop"]


def test_the_catalogue_lists_every_photo_with_its_attributes(shop: Path) -> None:
    photos = read_shop(shop)
    assert len(photos) == 12 * 3 * 2
    with (shop / "catalogue.csv").open(newline="", encoding="utf-8") as file:
        assert next(csv.reader(file)) == list(ShopPhoto._fields)
    for photo in photos:
        assert all(photo)
        with Image.open(shop / photo.image) as image:
            assert (image.format, image.size) == ("JPEG", (256, 256))
    assert {p.image for p in photos} == {str(f.relative_to(shop).as_posix()) for f in shop.rglob("*.jpg")}


def test_splits_and_roles_are_disjoint_and_complete(shop: Path) -> None:
    photos = read_shop(shop)
    splits: dict[str, set[str]] = {}
    for photo in photos:
        splits.setdefault(photo.item_id, set()).add(photo.split)
    assert Counter(next(iter(s)) for s in splits.values() if len(s) == 1) == {"train": 24, "unseen": 12}
    assert Counter(p.role for p in photos) == {"gallery": 36, "query": 36}
    assert {p.role for p in photos if p.image.endswith("01.jpg")} == {"query"}


def test_a_complete_shop_is_reused(shop: Path) -> None:
    before = (shop / "catalogue.csv").stat().st_mtime_ns
    calls: list[tuple[int, int]] = []
    assert write_shop(shop, on_progress=lambda done, total: calls.append((done, total)), **SMALL) == shop
    assert (shop / "catalogue.csv").stat().st_mtime_ns == before
    assert calls == []


def test_a_shop_that_lost_a_photo_is_written_anew(tmp_path: Path) -> None:
    place = write_shop(tmp_path / "shop", workers=1, products_per_family=1, photos_per_product=2)
    lost = place / read_shop(place)[3].image
    lost.unlink()
    write_shop(place, workers=1, products_per_family=1, photos_per_product=2)
    assert lost.is_file()


def test_progress_counts_up_to_all_photos(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_shop(
        tmp_path / "shop",
        workers=1,
        on_progress=lambda done, total: calls.append((done, total)),
        products_per_family=1,
        photos_per_product=2,
    )
    assert calls == [(2 * n, 24) for n in range(1, 13)]


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.txt").write_text("mine")
    with pytest.raises(LookalikeError, match="other than a sample shop"):
        write_shop(tmp_path, **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["holiday.txt"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    place = tmp_path / "shop"
    place.mkdir()
    assert (
        json.loads(
            (write_shop(place, workers=1, products_per_family=1, photos_per_product=2) / "shop.json").read_text()
        )["photos"]
        == 24
    )


@pytest.mark.parametrize("size", [{"products_per_family": 0}, {"products_per_family": 99}, {"photos_per_product": 1}])
def test_impossible_sizes_are_refused(tmp_path: Path, size: dict[str, int]) -> None:
    with pytest.raises(LookalikeError, match="per_"):
        write_shop(tmp_path / "shop", **size)


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shop(tmp_path / "shop", workers=1, on_progress=stop, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_no_shop_and_is_cleared_away(tmp_path: Path) -> None:
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    leftover = tmp_path / f".shop.{dead}.building"
    (leftover / "photos" / "mug-01").mkdir(parents=True)
    with pytest.raises(LookalikeError, match="no sample shop"):
        read_shop(leftover)
    write_shop(tmp_path / "shop", workers=1, products_per_family=1, photos_per_product=2)
    assert [p.name for p in tmp_path.iterdir()] == ["shop"]
