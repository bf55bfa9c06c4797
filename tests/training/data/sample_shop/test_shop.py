"""The sample shop on disk: deterministic bytes, reuse, refusals and atomic writes."""

import csv
import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from index.errors import LookalikeError
from training.data.sample_shop import ShopPhoto, read_shop, write_shop

small_shop = partial(write_shop, products_per_family=3, photos_per_product=2)
tiny_shop = partial(write_shop, products_per_family=1, photos_per_product=2)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shop(tmp_path_factory.mktemp("shops") / "shop", workers=2)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    alone, together = (tiny_shop(tmp_path / f"by-{count}", workers=count) for count in (1, 3))
    assert contents(alone) == contents(together)
    assert len(contents(alone)) == 24 + 2


def test_another_seed_gives_another_shop_in_the_same_place(tmp_path: Path) -> None:
    place = tmp_path / "shop"
    first = contents(tiny_shop(place, seed=1, workers=1))
    second = contents(tiny_shop(place, seed=2, workers=1))
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
    assert small_shop(shop, on_progress=lambda done, total: calls.append((done, total))) == shop
    assert (shop / "catalogue.csv").stat().st_mtime_ns == before
    assert calls == []


def test_a_shop_with_a_missing_photo_is_written_again(tmp_path: Path) -> None:
    place = tiny_shop(tmp_path / "shop", workers=1)
    lost = place / read_shop(place)[3].image
    lost.unlink()
    tiny_shop(place, workers=1)
    assert lost.is_file()


def test_progress_counts_up_to_all_photos(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    tiny_shop(tmp_path / "shop", workers=1, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2 * n, 24) for n in range(1, 13)]


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.txt").write_text("mine")
    with pytest.raises(LookalikeError, match="other than a sample shop"):
        small_shop(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["holiday.txt"]


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    place = tmp_path / "shop"
    place.mkdir()
    tiny_shop(place, workers=1)
    assert json.loads((place / "shop.json").read_text())["photos"] == 24


@pytest.mark.parametrize("size", [{"products_per_family": 0}, {"products_per_family": 99}, {"photos_per_product": 1}])
def test_impossible_sizes_are_refused(tmp_path: Path, size: dict[str, Any]) -> None:
    with pytest.raises(LookalikeError, match="per_"):
        write_shop(tmp_path / "shop", **size)


def test_an_interruption_leaves_nothing_behind(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_shop(tmp_path / "shop", workers=1, on_progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_leftovers_of_a_killed_writer_are_not_a_shop_and_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "shop"
    code = (
        "import sys; from pathlib import Path; from training.data.sample_shop import write_shop; "
        "write_shop(Path(sys.argv[1]), workers=2, on_progress=lambda done, total: print(done, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert int(writer.stdout.readline()) > 0
        writer.kill()
        writer.stdout.read()  # the pipe closes only when the workers have exited too
    (leftover,) = tmp_path.iterdir()
    assert not (leftover / "shop.json").exists()
    with pytest.raises(LookalikeError, match="no sample shop"):
        read_shop(place)
    tiny_shop(place, workers=1)
    assert [p.name for p in tmp_path.iterdir()] == ["shop"]
