"""The specifications of data sets."""

import csv
from pathlib import Path

import pytest

from tests.support.tiny_gallery import write_tiny_folder, write_tiny_source
from training.data import load_data, load_search
from training.data.registry import display_name
from training.errors import TrainingError


@pytest.mark.parametrize("spec", ["nonsense", "folder", "folder:", "sampler", "cub", "table:"])
def test_an_unknown_specification_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(TrainingError, match=r"folder:DIR.*table:FILE.*inshop:DIR"):
        load_data(spec)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("folder:/secret/place/shirts, trousers", "folder shirts, trousers"),
        ("table:shop/catalogue.csv,item_id=sku,images=/secret/place", "table catalogue.csv"),
        ("folder:.", "folder"),
        ("sample:/tmp/shop", "sample"),
        ("cub:/data/CUB_200_2011", "cub"),
    ],
)
def test_the_name_of_data_for_others_has_no_path(spec: str, name: str) -> None:
    assert display_name(spec) == name


def test_queries_search_a_gallery_with_the_same_labels(tmp_path: Path) -> None:
    catalogue = write_tiny_source(tmp_path / "shop")
    queries = write_tiny_folder(tmp_path / "photos")
    (queries / "red").rename(queries / "ball-red")
    (queries / "blue").rename(queries / "ball-blue")
    for specs in ((f"folder:{queries}", f"table:{catalogue}"), (str(queries), str(catalogue))):
        data = load_search(*specs)
        asked = [photo for photo in data.test if photo.is_query]
        assert data.train == () and len(asked) == 32 and not any(photo.is_gallery for photo in asked)
        assert {photo.label for photo in data.test if photo.is_gallery} >= {"ball-red", "ball-green"}
        assert data.remarks[0].startswith("24 test photos have no other photo of the class to find: ")


def test_a_photo_in_queries_and_gallery_never_finds_itself(tmp_path: Path) -> None:
    photos = write_tiny_folder(tmp_path / "photos")
    data = load_search(str(photos), str(photos))
    assert len(data.test) == 32 and all(photo.is_query and photo.is_gallery for photo in data.test)


def test_queries_without_any_item_of_the_gallery_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="none of its 32 query photos has another of its class to find"):
        load_search(str(write_tiny_folder(tmp_path / "photos")), str(write_tiny_source(tmp_path / "shop")))


def test_the_split_of_queries_and_gallery_does_not_matter(tmp_path: Path) -> None:
    photos = write_tiny_folder(tmp_path / "photos")
    with (tmp_path / "queries.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "path", "split"])
        writer.writerows([["red", photos / "red" / "0.jpg", "train"], ["blue", photos / "blue" / "0.jpg", "test"]])
    data = load_search(str(tmp_path / "queries.csv"), str(photos))
    assert sum(photo.is_query for photo in data.test) == 2


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="No table at"):
        load_search(str(tmp_path / "nothing"), str(tmp_path))
    with pytest.raises(TrainingError, match="No folder at"):
        load_search(f"folder:{tmp_path / 'nothing'}", str(tmp_path))
