"""Tables: the columns of open-metric-learning, and errors with their place."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from index.errors import LookalikeError
from training.data import Photo, load_data
from training.data.dataset import check_learnable
from training.data.tables import extend_spec, read_table
from training.errors import TrainingError

COLUMNS = ("label", "path", "split", "is_query", "is_gallery", "x_1", "y_1", "x_2", "y_2")
ROWS: list[dict[str, Any]] = [
    {"label": 0, "path": "a0.jpg", "split": "train"},
    {"label": 0, "path": "a1.jpg", "split": "train", "x_1": 1.5, "y_1": 2, "x_2": 30.2, "y_2": 40},
    {"label": 1, "path": "b0.jpg", "split": "train"},
    {"label": 2, "path": "c0.jpg", "split": "validation", "is_query": True, "is_gallery": False},
    {"label": 2, "path": "c1.jpg", "split": "validation", "is_query": False, "is_gallery": True},
]


def write_table(folder: Path, rows: list[dict[str, Any]], columns: tuple[str, ...] = COLUMNS) -> Path:
    folder.mkdir(exist_ok=True)
    for row in rows:
        (folder / str(row.get("path", "x"))).touch()
    with (folder / "shop.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return folder / "shop.csv"


def expected(folder: Path) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    train = Photo(folder / "a0.jpg", "0"), Photo(folder / "a1.jpg", "0", (1, 2, 31, 40)), Photo(folder / "b0.jpg", "1")
    return train, (
        Photo(folder / "c0.jpg", "2", None, is_query=True, is_gallery=False),
        Photo(folder / "c1.jpg", "2", None, is_query=False, is_gallery=True),
    )


def test_a_table_gives_splits_roles_and_boxes(tmp_path: Path) -> None:
    data = load_data(f"table:{write_table(tmp_path, ROWS)}")
    assert (data.train, data.test) == expected(tmp_path)
    assert (data.name, data.remarks) == ("shop", ("1 class to learn with one photo only: 1.",))


def test_a_parquet_table_reads_like_the_csv_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_table(tmp_path, ROWS)
    rows = [{column: row.get(column) for column in COLUMNS} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "shop.parquet")
    data = load_data(f"table:{tmp_path / 'shop.parquet'}")
    assert (data.train, data.test) == expected(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(LookalikeError, match=r"bad.parquet is .* Parquet table"):
        load_data(f"table:{tmp_path / 'bad.parquet'}")


def test_without_pyarrow_a_parquet_table_is_refused_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "shop.parquet").touch()
    with pytest.raises(LookalikeError, match=r"pip install .lookalike\[parquet\]"):
        load_data(f"table:{tmp_path / 'shop.parquet'}")


def test_without_a_split_column_classes_are_drawn_for_measuring(tmp_path: Path) -> None:
    rows = [{"label": label, "path": f"{label}{number}.jpg"} for label in "abcdef" for number in range(2)]
    data = load_data(f"table:{write_table(tmp_path, rows, ('label', 'path'))}")
    assert {photo.label for photo in data.train} | {photo.label for photo in data.test} == set("abcdef")
    assert 2 <= len({photo.label for photo in data.test}) <= 3
    assert all(photo.is_query and photo.is_gallery for photo in data.test)


def test_absolute_paths_stay_and_missing_files_are_remarked(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.jpg"
    elsewhere.touch()
    table = write_table(tmp_path / "table", [*ROWS, {"label": 1, "path": str(elsewhere), "split": "train"}])
    (tmp_path / "table" / "a0.jpg").unlink()
    data = load_data(f"table:{table}")
    assert data.train[-1] == Photo(elsewhere, "1")
    assert data.remarks[0] == "1 listed image file is missing, of 1 class: 0 (1)."


def test_missing_columns_are_reported_with_the_existing_ones(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no column 'label'; it has path, split\."):
        load_data(f"table:{write_table(tmp_path, ROWS, ('path', 'split'))}")
    with pytest.raises(TrainingError, match="no column 'y_1' and no 'y_2'"):
        load_data(f"table:{write_table(tmp_path, ROWS, ('label', 'path', 'x_1', 'x_2'))}")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"split": "valid"}, "split is 'valid', not 'train', 'validation' or 'test'"),
        ({"split": "validation", "is_query": "maybe", "is_gallery": 1}, "is_query is 'maybe'"),
        ({"x_1": 5, "x_2": 4, "y_1": 0, "y_2": 9}, "box 5, 0, 4, 9 must have"),
        ({"x_1": 5, "x_2": 6}, "not four numbers"),
    ],
)
def test_an_invalid_row_is_reported_with_its_line(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TrainingError, match=f"shop.csv, line 7: .*{problem}"):
        load_data(f"table:{write_table(tmp_path, [*ROWS, ROWS[0] | change])}")


@pytest.mark.parametrize(
    ("lines", "remark"),
    [
        (",a0.jpg,train,,,,,,\n", "1 row is left out of shop.csv: line 7 (no value for 'label')."),
        ("0,,train,,,,,,\n", "1 row is left out of shop.csv: line 7 (no value for 'path')."),
        ("0,a0.jpg\n", "1 row is left out of shop.csv: line 7 (2 fields under 9 columns)."),
        ("0,a0.jpg\n" * 4, "4 rows are left out of shop.csv: line 7 (2 fields under 9 columns), "),
    ],
)
def test_a_row_without_a_product_or_a_photo_is_left_out_with_a_remark(tmp_path: Path, lines: str, remark: str) -> None:
    expected = load_data(f"table:{write_table(tmp_path, ROWS)}")
    table = tmp_path / "shop.csv"
    table.write_text(table.read_text() + lines)
    data = load_data(f"table:{table}")
    assert (data.train, data.test) == (expected.train, expected.test)
    assert next(text for text in data.remarks if text not in expected.remarks).startswith(remark)


def test_a_catalogue_whose_last_row_has_no_id_is_read(tmp_path: Path) -> None:
    rows = [{"item_id": label, "image": f"{label}{number}.jpg"} for label in "abcdef" for number in range(2)]
    table = write_table(tmp_path, [{"path": row["image"]} | row for row in rows], ("item_id", "image"))
    table.write_text(table.read_text() + ",a0.jpg\n")
    photos, remarks = read_table(table)
    assert len(photos) == len(rows)
    assert remarks == ("1 row is left out of shop.csv: line 14 (no value for 'item_id').",)


def test_a_table_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path, ROWS)
    table.write_text("label,path\n,a.jpg\n")
    with pytest.raises(TrainingError, match=r"no usable row, such as line 2 \(no value for 'label'\)"):
        load_data(f"table:{table}")
    table.write_text("label,path\n")
    with pytest.raises(TrainingError, match="no rows"):
        load_data(f"table:{table}")
    table.write_text("")
    with pytest.raises(TrainingError, match="it has none"):
        load_data(f"table:{table}")


def test_a_query_without_a_photo_to_find_is_remarked_and_only_such_are_refused(tmp_path: Path) -> None:
    lonely = {"label": 3, "path": "d0.jpg", "split": "validation", "is_query": True, "is_gallery": True}
    data = load_data(f"table:{write_table(tmp_path, [*ROWS, lonely])}")
    assert data.remarks[-1] == "1 test photo has no other photo of the class to find: 3 (1)."
    with pytest.raises(TrainingError, match="cannot be measured"):
        load_data(f"table:{write_table(tmp_path, [*ROWS[:3], lonely])}")


def test_a_table_for_measuring_only_needs_nothing_to_learn(tmp_path: Path) -> None:
    rows = [{"label": label, "path": f"{label}{number}.jpg", "split": "test"} for label in "ab" for number in range(2)]
    data = load_data(f"table:{write_table(tmp_path, rows, ('label', 'path', 'split'))}")
    assert data.train == () and [photo.label for photo in data.test] == ["a", "a", "b", "b"]
    assert data.remarks == ()
    with pytest.raises(TrainingError, match="shop has 0 classes to learn"):
        check_learnable(data)


def test_validation_and_test_rows_are_both_measured_with_a_remark(tmp_path: Path) -> None:
    splits = {"a": "train", "b": "train", "c": "validation", "d": "test"}
    rows = [{"label": name, "path": f"{name}{n}.jpg", "split": split} for name, split in splits.items() for n in (0, 1)]
    data = load_data(f"table:{write_table(tmp_path, rows, ('label', 'path', 'split'))}")
    assert {photo.label for photo in data.test} == {"c", "d"}
    assert data.remarks == (
        "split has validation and test rows: all of them are measured, and none chooses the epoch.",
    )


def test_the_columns_of_a_catalogue_are_read_too(tmp_path: Path) -> None:
    rows = [{"item_id": label, "image": f"{label}{number}.jpg"} for label in "abcdef" for number in range(2)]
    table = write_table(tmp_path, [{"path": row["image"]} | row for row in rows], ("item_id", "image"))
    photos, remarks = read_table(table)
    assert [(photo.label, photo.path.name) for photo in photos] == [(row["item_id"], row["image"]) for row in rows]
    assert remarks == ()


def test_other_columns_and_the_folder_of_the_images_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    lines = [{"sku": label, "photos": [f"{label}0.jpg", f"{label}1.jpg"], "path": "no"} for label in "abcdef"]
    for line in lines:
        for name in line["photos"]:
            (tmp_path / "own" / name).touch()
    table = tmp_path / "shop.jsonl"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = extend_spec(f"table:{table}", ["item_id=sku", "image=photos"], str(tmp_path / "own"))
    data = load_data(spec)
    found = {(photo.label, photo.path.name) for photo in (*data.train, *data.test)}
    assert found == {(line["sku"], name) for line in lines for name in line["photos"]}
    assert data.remarks == ()
    with pytest.raises(TrainingError, match="no column 'code'; it has sku"):
        load_data(f"table:{table},item_id=code,image=photos")
    with pytest.raises(TrainingError, match="'colour=red' is unknown"):
        extend_spec(f"table:{table}", ["colour=red"], None)
    with pytest.raises(TrainingError, match="belong to a table"):
        extend_spec("folder:photos", ["item_id=sku"], None)


def test_an_address_in_a_table_is_refused_with_its_line(tmp_path: Path) -> None:
    table = write_table(tmp_path, ROWS)
    table.write_text("item_id,image\n1,https://example.com/a.jpg\n")
    with pytest.raises(TrainingError, match=r"line 2: https://example\.com/a\.jpg is an address; .* download"):
        load_data(f"table:{table}")


def test_a_box_belongs_to_one_image(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"label": "a", "path": ["b", "c"], "x_1": 0, "y_1": 0, "x_2": 1, "y_2": 1}\n')
    with pytest.raises(TrainingError, match="line 1: a box belongs to one image, not to 2"):
        load_data(f"table:{tmp_path / 't.jsonl'}")


def test_a_feed_of_a_shop_gives_its_photos_by_item_or_by_group(tmp_path: Path) -> None:
    (tmp_path / "products.csv").write_text(
        "Handle,Title,Option1 Name,Option1 Value,Variant Price,Image Src,Variant Image\n"
        "mug,Mug,Color,Red,9,red.jpg,red.jpg\nmug,,Color,Blue,9,blue.jpg,blue.jpg\n"
    )
    for name in ("red.jpg", "blue.jpg"):
        (tmp_path / name).touch()
    photos, _ = read_table(tmp_path / "products.csv")
    assert {(photo.label, photo.path.name) for photo in photos} == {("mug/Red", "red.jpg"), ("mug/Blue", "blue.jpg")}
    photos, _ = read_table(Path(f"{tmp_path}/products.csv,label=item_group_id"))
    assert {photo.label for photo in photos} == {"mug"}
    photos, _ = read_table(Path(f"{tmp_path}/products.csv,label=Handle,path=Image Src"))
    assert [(photo.label, photo.path.name) for photo in photos] == [("mug", "red.jpg"), ("mug", "blue.jpg")]
