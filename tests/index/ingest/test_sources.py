"""Sources: every kind of table is read back as written, and mistakes are reported before any image is opened."""

import csv
import gzip
import json
import tracemalloc
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from index.embedding.images import ImageError, Region
from index.errors import LookalikeError
from index.ingest.sources import BadRow, Source, SourceImage, SourceSummary
from index.items import Attribute, Item
from tests.support.tiny_gallery import write_tiny_folder

MIXED = "Attribute 'sizes' has 2 numbers and 2 texts, such as 'M': a filter compares values of one type only."
PHOTO = b"the bytes of a photo"


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


WRITERS = {".csv": write_csv, ".jsonl": write_json_lines, ".ndjson": write_json_lines, ".parquet": write_parquet}
ROWS = [
    {"item_id": "a", "image": "1.jpg", "title": "A ball", "colour": "red", "price": 4.5},
    {"item_id": "a", "image": "2.jpg", "title": "A ball", "colour": "red", "price": 4.5},
    {"item_id": "b", "image": "sub/3.jpg", "title": "A cube", "colour": "blue", "price": 7.0},
]


def attributes(source: Source) -> list[dict[str, Attribute]]:
    return [image.item.attributes for image in source]


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_yields_the_same_items(tmp_path: Path, suffix: str) -> None:
    table = WRITERS[suffix](tmp_path / f"catalogue{suffix}", ROWS)
    source = Source([table])
    ball = Item(id="a", title="A ball", attributes={"colour": "red", "price": 4.5})
    cube = Item(id="b", title="A cube", attributes={"colour": "blue", "price": 7.0})
    assert list(source) == [
        SourceImage(ball, "1.jpg", str(tmp_path / "1.jpg"), str(tmp_path)),
        SourceImage(ball, "2.jpg", str(tmp_path / "2.jpg"), str(tmp_path)),
        SourceImage(cube, "sub/3.jpg", str(tmp_path / "sub/3.jpg"), str(tmp_path)),
    ]
    assert source.check() == SourceSummary(tables=1, rows=3, images=3)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
IDS = TEXTS.filter(bool)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(-(2.0**53), 2.0**53, allow_nan=False)
FULL = st.fixed_dictionaries({"item_id": IDS, "image": IDS.map("p/{}".format), "title": TEXTS, "url": TEXTS})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_typed_tables_give_back_what_was_written(tmp_path: Path, suffix: str, data: st.DataObject) -> None:
    kinds: list[st.SearchStrategy[Attribute]] = [st.integers(-99, 99), st.floats(-9, 9), st.booleans(), TEXTS]
    kind = data.draw(st.sampled_from(kinds))
    rows = data.draw(st.lists(FULL, min_size=1, max_size=5))
    sizes = data.draw(st.lists(st.none() | kind, min_size=len(rows), max_size=len(rows)))
    written = [{**row, "size": size} for row, size in zip(rows, sizes, strict=True)]
    table = WRITERS[suffix](tmp_path / f"t{suffix}", written)
    expected = [
        Item(id=row["item_id"], title=row["title"], url=row["url"], attributes={} if size is None else {"size": size})
        for row, size in zip(rows, sizes, strict=True)
    ]
    images = list(Source([table]))
    assert [image.item for image in images] == expected
    assert [image.image_id for image in images] == [row["image"] for row in rows]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(FULL, NUMBERS | st.booleans() | IDS.map("text {}".format)), min_size=1, max_size=5))
def test_a_csv_gives_back_what_was_written(tmp_path: Path, rows: list[tuple[dict[str, str], Attribute]]) -> None:
    table = write_csv(tmp_path / "t.csv", [{**row, "size": size} for row, size in rows])
    images = list(Source([table]))
    assert [image.item.attributes["size"] for image in images] == [size for _, size in rows]
    assert [type(image.item.attributes["size"]) for image in images] == [type(size) for _, size in rows]
    assert [image.item.id for image in images] == [row["item_id"] for row, _ in rows]


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("12", 12),
        ("-.5", -0.5),
        ("1e3", 1000.0),
        ("True", True),
        ("false", False),
        ("007", "007"),
        ("+49", "+49"),
        ("1_000", "1_000"),
        ("nan", "nan"),
        ("9007199254740993", "9007199254740993"),
        ("12345678901234567890", "12345678901234567890"),
        ("yes", "yes"),
        ('["S", "M", 38, true]', ("S", "M", 38, True)),
        ("[1.0, 1]", (1.0,)),
        ("[S, M]", "[S, M]"),
        ('[["S"], null]', '[["S"], null]'),
        ("[" * 2_000 + "]", "[" * 2_000 + "]"),
    ],
)
def test_a_csv_cell_becomes_a_number_or_a_list_only_where_nothing_is_lost(
    tmp_path: Path, cell: str, value: Attribute
) -> None:
    table = write_csv(tmp_path / "t.csv", [{"item_id": "1", "image": "a.jpg", "x": cell, "empty": ""}])
    (found,) = attributes(Source([table]))
    assert found == {"x": value} and type(found["x"]) is type(value)


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_has_attributes_of_several_values(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"item_id": "a", "image": "1.jpg", "sizes": ["S", "M", "S"]},
        {"item_id": "b", "image": "2.jpg", "sizes": []},
    ]
    is_text = suffix == ".csv"
    written = [{**row, "sizes": json.dumps(row["sizes"])} for row in rows] if is_text else rows
    table = WRITERS[suffix](tmp_path / f"t{suffix}", written)
    assert attributes(Source([table])) == [{"sizes": ("S", "M")}, {}]
    separated = [{**row, "sizes": "38| M ||38", "note": "a|b"} for row in rows]
    table = WRITERS[suffix](tmp_path / f"u{suffix}", separated)
    source = Source([table], lists={"sizes": "|"})
    assert source.check().warnings == ((MIXED,) if is_text else ())
    assert attributes(source) == [{"sizes": (38, "M") if is_text else ("38", "M"), "note": "a|b"}] * 2


def test_nulls_within_lists_are_left_out_and_other_values_converted(tmp_path: Path) -> None:
    days = [date(2026, 5, 4), None, date(2026, 5, 5)]
    table = pyarrow.table({"item_id": [1], "image": ["a"], "days": [days], "none": [[float("nan"), None]]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert attributes(Source([tmp_path / "t.parquet"])) == [{"days": ("2026-05-04", "2026-05-05")}]


def test_an_item_expires_at_the_time_in_its_column(tmp_path: Path) -> None:
    row = {"item_id": "a", "image": "1.jpg", "colour": "red"}
    table = write_csv(tmp_path / "t.csv", [{**row, "expires_at": "2026-11-19T12:00+02:00"}, {**row, "expires_at": ""}])
    source = Source([table], attributes=["colour"])
    assert source.check().warnings == () and [image.item.expires_at for image in source] == [
        "2026-11-19T10:00:00Z",
        None,
    ]
    times = [datetime(2026, 11, 19, tzinfo=UTC), None]
    parquet.write_table(
        pyarrow.table({"item_id": ["a", "b"], "image": ["1", "2"], "until": times}), tmp_path / "t.parquet"
    )
    found = Source([tmp_path / "t.parquet"], columns={"expires_at": "until"})
    assert [image.item.expires_at for image in found] == ["2026-11-19T00:00:00Z", None]
    assert attributes(found)[1] == {}
    table = write_csv(tmp_path / "u.csv", [{**row, "expires_at": "soon"}])
    with pytest.raises(LookalikeError, match=r"line 2: expires_at must be a date, or .* \(got 'soon'\)"):
        Source([table]).check()


def test_an_attribute_that_no_row_has_cannot_be_a_list(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", [{"item_id": "a", "image": "1.jpg", "sizes": "S"}])
    with pytest.raises(LookalikeError, match="No row has an attribute 'size'; there are sizes"):
        Source([table], lists={"size": "|"}).check()


def test_json_lines_may_list_images_and_nest_attributes(tmp_path: Path) -> None:
    row = {"item_id": 7, "image": ["a.jpg", "https://example.com/b.jpg"], "attributes": {"size": 3, "none": None}}
    images = list(Source([write_json_lines(tmp_path / "t.jsonl", [row])]))
    item = Item(id="7", attributes={"size": 3})
    assert images == [
        SourceImage(item, "a.jpg", str(tmp_path / "a.jpg"), str(tmp_path)),
        SourceImage(item, "https://example.com/b.jpg", "https://example.com/b.jpg", str(tmp_path)),
    ]


def test_parquet_dates_decimals_and_times_become_texts_and_numbers(tmp_path: Path) -> None:
    moment = datetime(2026, 5, 4, 3, 2, 1, 999, tzinfo=UTC)
    table = pyarrow.table(
        {
            "item_id": [1],
            "image": [["a.jpg"]],
            "day": [date(2026, 5, 4)],
            "price": [Decimal("4.50")],
            "stock": [Decimal("12.00")],
            "fine": pyarrow.array([moment], pyarrow.timestamp("ns", "UTC")).cast(pyarrow.timestamp("ns", "UTC")),
            "gone": pyarrow.array([float("nan")], from_pandas=False),
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    assert attributes(Source([tmp_path / "t.parquet"])) == [
        {"day": "2026-05-04", "price": 4.5, "stock": 12, "fine": "2026-05-04T03:02:01.000999+00:00"}
    ]


def test_columns_are_mapped_and_attributes_limited(tmp_path: Path) -> None:
    rows = [{"sku": "a", "photo": "1.jpg", "photo_id": "front", "colour": "red", "cost": 3}]
    table = write_csv(tmp_path / "t.csv", rows)
    mapping = {"item_id": "sku", "image": "photo", "image_id": "photo_id"}
    source = Source([table], columns=mapping, attributes=["colour"], images="/photos")
    source.check()
    item = Item(id="a", attributes={"colour": "red"})
    assert list(source) == [SourceImage(item, "front", "/photos/1.jpg", "/photos")]


def test_several_addresses_patterns_and_folders_are_one_source(tmp_path: Path) -> None:
    for name in ("2.csv", "1.csv"):
        write_csv(tmp_path / name, [{"item_id": name, "image": "a.jpg"}])
    (tmp_path / "3.jsonl.gz").write_bytes(gzip.compress(b'{"item_id": "packed", "image": "a.jpg"}\n'))
    (tmp_path / "shop" / "ball").mkdir(parents=True)
    (tmp_path / "shop" / "ball" / "b.JPG").write_bytes(PHOTO)
    (tmp_path / "shop" / "ball" / "notes.txt").write_text("no photo")
    source = Source([str(tmp_path / "*.csv"), tmp_path / "shop", f"file://{tmp_path}/3.jsonl.gz"])
    assert [image.item.id for image in source] == ["1.csv", "2.csv", "ball", "packed"]
    assert source.check() == SourceSummary(tables=3, rows=3, images=4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "sku,photo\n1,a.jpg\n", "no column 'item_id' and no 'image'; it has sku, photo.*item_id=sku"),
        ("t.csv", "", "no column .*it has none"),
        ("t.csv", "item_id,image,image\n", "two columns 'image'"),
        ("t.csv", "item_id,image\n", "has no images"),
        ("t.csv", "item_id,image\n\n2,\n", "t.csv, line 3: no value for 'image', only for item_id"),
        ("t.csv", "item_id,image\n1,a.jpg,surplus\n", "line 2: 3 fields under 2 columns"),
        ("t.csv", "item_id,image\n1\n", "line 2: 1 field under 2 columns"),
        ("t.csv", f"item_id,image\n1,{'x' * 600}\n", "line 2: image_id: .* has 600 characters"),
        ("t.csv", f"item_id,image,title\n1,a.jpg,{'x' * 1001}\n", "line 2: title .* at most 1,000 characters"),
        ("t.jsonl", json.dumps({"item_id": "1", "image": "a", "url": "x" * 2001}), "line 1: url .* at most 2,000 char"),
        ("t.csv.gz", gzip.compress(b"item_id,image\n1,a.jpg\n", mtime=0)[:-9], "Compressed file ended"),
        ("t.csv", b"item_id,image\n1,\xff\n", "utf-8"),
        ("t.jsonl", '\n{"item_id": 2\n', "line 2: not valid JSON"),
        ("t.jsonl", '{"sku": 1, "image": "a"}\n', "line 1: no value for 'item_id', only for sku, image"),
        (
            "t.jsonl",
            '{"item_id": "1", "image": "a", "size": [{}]}\n',
            r"line 1: attributes.size\[0\] .* text, a number",
        ),
        ("t.jsonl", '{"item_id": "1", "image": "a", "x": 1, "attributes": {"x": 2}}\n', "'x' is both a column and"),
        ("t.jsonl", '{"item_id": "1", "image": ["a", "b"], "image_id": "c"}\n', "line 1: image_id: 1 for 2 images"),
        ("t.jsonl", '{"item_id": "\\ud800", "image": "a"}\n', "line 1: id"),
        ("t.jsonl", '{"item_id": "1", "image": "\\ud800"}\n', "line 1: .*surrogates not allowed"),
        ("t.jsonl", "[]\n", "line 1: not a JSON object"),
        ("t.parquet", "no parquet", "not a Parquet table"),
        ("t.xlsx", "", "not a table of a known format"),
    ],
)
def test_a_table_without_a_good_row_is_refused_with_its_lines(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LookalikeError, match=message):
        Source([tmp_path / name]).check()


def test_a_nested_value_of_parquet_is_reported_with_row_and_column(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"item_id": "1", "image": "a", "size": None},
        {"item_id": "2", "image": "b", "size": {"x": 1}},
    ]
    (bad,) = Source([write_parquet(tmp_path / "t.parquet", rows)]).check().first_bad
    assert bad.where.endswith("t.parquet, row 2") and bad.problem.startswith("attributes.size ")
    assert bad.item_id == "2"


def test_bad_rows_of_all_tables_are_counted_and_the_good_ones_are_read(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("item_id,image\n1,\n,a.jpg\n3,fine.jpg\n4,a.jpg,surplus\n")
    (tmp_path / "2.csv").write_text("item_id,image\n" + "1,\n" * 30)
    source = Source([tmp_path / "1.csv", tmp_path / "2.csv"])
    summary = source.check()
    assert (summary.rows, summary.images, summary.bad_rows, len(summary.first_bad)) == (34, 1, 33, 10)
    assert [image.item.id for image in source] == ["3"]
    bad = [row for row in source.rows() if isinstance(row, BadRow)]
    assert [(row.where.rpartition("/")[2], row.item_id) for row in bad[:4]] == [
        ("1.csv, line 2", "1"),
        ("1.csv, line 3", ""),
        ("1.csv, line 5", ""),
        ("2.csv, line 2", "1"),
    ]
    (tmp_path / "1.csv").write_text("item_id,image\n1,\n")
    with pytest.raises(LookalikeError) as caught:
        source.check()
    assert caught.value.problem.count(", line ") == 10 and "the first 10 of 31" in caught.value.problem


def test_an_attribute_of_mixed_types_is_reported_once_with_counts_and_an_example(tmp_path: Path) -> None:
    prices = ["12.50", "9", "1.299,00", "", "7.25"]
    rows = [{"item_id": str(n), "image": "a.jpg", "price": price, "name": "x"} for n, price in enumerate(prices)]
    (warning,) = Source([write_csv(tmp_path / "t.csv", rows)]).check().warnings
    assert warning.startswith("Attribute 'price' has 3 numbers and 1 text, such as '1.299,00'")
    assert Source([tmp_path / "t.csv"], attributes=["name"]).check().warnings == ()


def test_folders_that_hold_photos_are_the_items_at_any_depth(tmp_path: Path) -> None:
    for name in ("Fruit/Apple/Granny-Smith/1.jpg", "Fruit/Apple/Gala/1.jpg", "Fruit/Apple/2.jpg", "Bag/3.png", "0.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(PHOTO)
    (tmp_path / "Bag" / ".hidden").mkdir()
    (tmp_path / "Bag" / ".hidden" / "4.png").write_bytes(PHOTO)
    (tmp_path / "Bag" / "back").symlink_to(tmp_path)
    found = [(row.item.id, row.item.title, row.image_id) for row in Source([tmp_path])]
    assert found == [
        ("Bag", "Bag", "3.png"),
        ("Fruit/Apple", "Apple", "2.jpg"),
        ("Fruit/Apple/Gala", "Gala", "1.jpg"),
        ("Fruit/Apple/Granny-Smith", "Granny-Smith", "1.jpg"),
    ]


def test_an_image_that_is_not_beside_its_table_is_looked_for_in_the_fallback(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for place in ("own.jpg", "photos/own.jpg", "photos/other.jpg"):
        (tmp_path / place).write_bytes(place.encode())
    table = write_csv(
        tmp_path / "t.csv", [{"item_id": "1", "image": "own.jpg"}, {"item_id": "2", "image": "other.jpg"}]
    )
    source = Source([table], fallback_images=str(tmp_path / "photos"))
    assert [source.read(image) for image in source] == [b"own.jpg", b"photos/other.jpg"]


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", [{"item_id": "1", "image": "a.jpg", "colour": "", "size": 1}])
    with pytest.raises(LookalikeError, match="Nothing matches"):
        Source([str(tmp_path / "*.parquet")]).check()
    with pytest.raises(LookalikeError, match="No source at"):
        Source([tmp_path / "missing.csv"]).check()
    with pytest.raises(LookalikeError, match="no field 'sku' to map"):
        Source([table], columns={"sku": "item_id"})
    with pytest.raises(LookalikeError, match="no column 'name'"):
        Source([table], columns={"title": "name"}).check()
    with pytest.raises(LookalikeError, match="attribute 'color'; there are colour, size"):
        Source([table], attributes=["color"]).check()
    Source([table], attributes=["colour"]).check()  # a column without values is valid
    with pytest.raises(LookalikeError, match="gopher://"):
        Source(["gopher://example.com/t.csv"]).check()


def test_a_long_table_is_read_in_constant_memory(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        with (tmp_path / "t.csv").open("w") as file:
            file.write("item_id,image,colour\n")
            file.writelines(f"{number},{number}.jpg,red\n" for number in range(rows))
        tracemalloc.start()
        assert Source([tmp_path / "t.csv"]).check().images == rows
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(10)  # what is allocated once
    assert peak(5_000) < 2 * peak(200) + 100_000


def test_photos_without_a_folder_of_their_item_are_explained(tmp_path: Path) -> None:
    (tmp_path / "mug.jpg").write_bytes(PHOTO)
    with pytest.raises(LookalikeError, match=r"no images of items.*one folder per item, as in photos/mug-01/front.jpg"):
        Source([tmp_path]).check()


def test_a_folder_with_one_folder_per_item_is_a_source(tmp_path: Path) -> None:
    images = list(Source([write_tiny_folder(tmp_path / "photos", views=2)]))
    assert len(images) == 16 and images[0].item.id == "blue" and images[0].image_id == "0.jpg"


PRODUCT = "Handle,Title,Vendor,Image Src,Variant Price,Status\nmug,Mug,Potter,mug.jpg,9.50,active\n"


def test_a_feed_gives_items_with_typed_attributes(tmp_path: Path) -> None:
    (tmp_path / "products.csv").write_text(PRODUCT)
    item = Item(
        id="mug",
        title="Mug",
        attributes={"item_group_id": "mug", "brand": "Potter", "price": 9.5, "availability": "in_stock"},
    )
    source = Source([tmp_path / "products.csv"])
    assert list(source) == [SourceImage(item, "mug.jpg", str(tmp_path / "mug.jpg"), str(tmp_path))]
    kept = Source([tmp_path / "products.csv"], attributes=["price"])
    assert [image.item.attributes for image in kept] == [{"price": 9.5}]


def test_a_feed_is_a_plain_table_if_the_columns_that_are_mapped_are_in_it(tmp_path: Path) -> None:
    table = tmp_path / "products.csv"
    table.write_text(PRODUCT)
    plain = Source([table], columns={"item_id": "Handle", "image": "Image Src"})
    assert [image.item.attributes["Vendor"] for image in plain] == ["Potter"]
    feed = Source([table], columns={"item_id": "brand"})
    assert [image.item.id for image in feed] == ["Potter"]
    with pytest.raises(LookalikeError, match="no column 'item_id' and no 'image'; it has Handle"):
        Source([table], format="table").check()


def test_what_a_feed_leaves_out_is_a_warning(tmp_path: Path) -> None:
    table = tmp_path / "products.csv"
    table.write_text(f"{PRODUCT}plate,Plate,Potter,plate.jpg,9.50,draft\n")
    for source in (Source([table]), Source([table])):
        summary = source.check()
        assert summary.warnings == (f"{table}: 1 product not published, drafts or archived: left out.",)
        assert (summary.rows, summary.images) == (1, 1)


def test_bad_entries_of_a_feed_are_bad_rows_with_their_item(tmp_path: Path) -> None:
    feed = tmp_path / "feed.txt"
    feed.write_text(f"id\timage_link\ttitle\n1\t1.jpg\tM\n2\t\tM\n3\t3.jpg\t{'x' * 1001}\n")
    first, second, third = Source([feed]).rows()
    assert isinstance(first, SourceImage)
    assert second == BadRow(f"{feed}, line 3", "no value for 'image_link'", "2")
    assert isinstance(third, BadRow)
    assert (third.item_id, third.where) == ("3", f"{feed}, line 4")
    assert "title" in third.problem


def test_regions_of_photos_are_kept(tmp_path: Path) -> None:
    table = tmp_path / "import.csv"
    table.write_text('gs://shop/1.jpg,a,s,p,toys-v2,,,"0.1,0.1,0.5,0.5"\ngs://shop/1.jpg,b,s,p,toys-v2\n')
    images = list(Source([table], mirrors={"gs://shop": str(tmp_path)}))
    assert [(image.image_id, image.place, image.region) for image in images] == [
        ("a", str(tmp_path / "1.jpg"), Region(0.1, 0.1, 0.5, 0.5)),
        ("b", str(tmp_path / "1.jpg"), None),
    ]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("https://cdn.example/m/a%20b/1.jpg?v=2#top", "{root}/copies/a b/1.jpg"),
        ("https://cdn.example/media/1.jpg", "https://cdn.example/media/1.jpg"),
        ("gs://shop/a%20b.jpg", "{root}/copies/a%20b.jpg"),
        ("gs://shop-2/1.jpg", "gs://shop-2/1.jpg"),
        ("1.jpg", "{root}/1.jpg"),
    ],
)
def test_copies_of_photos_are_read_instead_of_their_addresses(tmp_path: Path, value: str, place: str) -> None:
    table = write_csv(tmp_path / "t.csv", [{"item_id": "a", "image": value}])
    copies = str(tmp_path / "copies")
    (image,) = Source([table], mirrors={"https://cdn.example/m": copies, "gs://shop/": copies})
    assert (image.place, image.image_id) == (place.format(root=tmp_path), value)


def test_a_copy_is_below_the_folder_of_copies(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "secret.jpg").write_bytes(PHOTO)
    table = write_csv(tmp_path / "t.csv", [{"item_id": "a", "image": "gs://shop/../secret.jpg"}])
    source = Source([table], mirrors={"gs://shop": str(tmp_path / "copies")})
    (image,) = source
    with pytest.raises(ImageError) as caught:
        source.read(image)
    assert caught.value.reason == "forbidden"
