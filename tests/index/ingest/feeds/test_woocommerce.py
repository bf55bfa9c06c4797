"""Exports of WooCommerce: variations join their parent by SKU or id, wherever it is in the table."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from index.errors import LookalikeError
from index.ingest.feeds.woocommerce import read_export
from index.ingest.tables import Row

HEADER = """
ID,Type,SKU,"GTIN, UPC, EAN, or ISBN",Name,Published,Is featured?,Visibility in catalog,Short description,Description,
Date sale price starts,Date sale price ends,Tax status,Tax class,In stock?,Stock,Low stock amount,Backorders allowed?,
Sold individually?,Weight (kg),Length (cm),Allow customer reviews?,Purchase note,Sale price,Regular price,Categories,
Tags,Shipping class,Images,Download limit,Download expiry days,Parent,Grouped products,Upsells,Cross-sells,
External URL,Button text,Position,Brands,Attribute 1 name,Attribute 1 value(s),Attribute 1 visible,Attribute 1 global,
Attribute 2 name,Attribute 2 value(s),Attribute 2 visible,Attribute 2 global,Attribute 2 default,Meta: _internal,Season
"""
COLUMNS = next(csv.reader([HEADER.replace("\n", "")]))
SHOP = "https://shop.example/wp-content/uploads"
HOODIE = {
    "ID": "10",
    "Type": "variable",
    "SKU": "hoodie",
    "Name": "Hoodie",
    "Published": "1",
    "Is featured?": "1",
    "Visibility in catalog": "visible",
    "Description": 'Warm,\n"thick"',
    "In stock?": "1",
    "Categories": "Clothing, Clothing > Hoodies\\, jackets",
    "Tags": "warm, cotton",
    "Brands": "Northern",
    "Images": f"{SHOP}/front.jpg, {SHOP}/back.jpg",
    "Attribute 1 name": "Colour",
    "Attribute 1 value(s)": "Blue, Green",
    "Attribute 2 name": "Size",
    "Attribute 2 value(s)": "S, M",
    "Attribute 2 default": "M",
    "Meta: _internal": "a:1:{}",
    "Season": "2026",
}
SHARED: dict[str, Any] = {
    "item_group_id": "10",
    "url": None,
    "availability": "in_stock",
    "categories": ["Clothing", "Clothing > Hoodies, jackets"],
    "tags": ["warm", "cotton"],
    "brand": ["Northern"],
    "featured": True,
    "season": 2026,
}


def variation(number: str, colour: str, size: str, images: str = "", **others: str) -> dict[str, str]:
    return {
        "ID": number,
        "Type": "variation",
        "SKU": f"hoodie-{number}",
        "Name": f"Hoodie - {colour}, {size}",
        "Published": "1",
        "Is featured?": "0",
        "In stock?": "0",
        "Stock": "3",
        "Weight (kg)": "0.4",
        "Sale price": "29,95",
        "Regular price": "39.95",
        "Date sale price starts": "2026-11-20",
        "Date sale price ends": "2026-11-28 23:59:59",
        "Parent": "hoodie",
        "Images": images,
        "Attribute 1 name": "Colour",
        "Attribute 1 value(s)": colour,
        "Attribute 2 name": "Size",
        "Attribute 2 value(s)": size,
        **others,
    }


def export(tmp_path: Path, *lines: dict[str, str], columns: list[str] = COLUMNS) -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(lines)
    path = tmp_path / "wc-product-export.csv"
    path.write_text(text.getvalue(), encoding="utf-8-sig")
    return path


def read(path: Path) -> list[Row]:
    return list(read_export(path, path.name).rows)


def photos(rows: list[Row]) -> dict[str, list[str]]:
    return {row.values["item_id"]: row.values["image"] for row in rows}


def test_a_simple_product_is_one_item(tmp_path: Path) -> None:
    line = {
        **HOODIE,
        "Type": "simple, virtual",
        "SKU": "'-hoodie",
        "GTIN, UPC, EAN, or ISBN": "04006381333931",
        "Regular price": "1.299,00",
        "External URL": "https://other.example/hoodie",
    }
    assert read(export(tmp_path, line)) == [
        Row(
            "line 3",
            {
                **SHARED,
                "item_id": "10",
                "title": "Hoodie",
                "url": "https://other.example/hoodie",
                "image": [f"{SHOP}/front.jpg", f"{SHOP}/back.jpg"],
                "sku": "-hoodie",
                "gtin": "04006381333931",
                "price": 1299.0,
                "colour": ["Blue", "Green"],
                "size": ["S", "M"],
            },
        )
    ]


def test_a_variation_inherits_from_its_parent_and_overrides_it(tmp_path: Path) -> None:
    (row,) = read(export(tmp_path, {**HOODIE, "Stock": "9"}, variation("11", "Blue", "", Stock="parent")))
    assert row.values == {
        **SHARED,
        "item_id": "11",
        "title": "Hoodie - Blue,",
        "image": [f"{SHOP}/front.jpg", f"{SHOP}/back.jpg"],
        "sku": "hoodie-11",
        "availability": "out_of_stock",
        "stock": 9,
        "weight_kg": 0.4,
        "price": 39.95,
        "sale_price": 29.95,
        "sale_starts": "2026-11-20",
        "sale_ends": "2026-11-28T23:59:59Z",
        "colour": "Blue",
        "size": ["S", "M"],
    }


def test_variations_find_their_parent_by_sku_and_id_before_and_after_it(tmp_path: Path) -> None:
    lines = [
        variation("11", "Blue", "M", "blue.jpg"),
        {**HOODIE, "ID": "20", "SKU": "mug", "Type": "simple", "Images": "mug.jpg"},
        HOODIE,
        variation("12", "Green", "M", "green.jpg", Parent="id:10"),
    ]
    rows = read(export(tmp_path, *lines))
    assert photos(rows) == {
        "20": ["mug.jpg"],
        "11": ["blue.jpg"],
        "12": ["green.jpg"],
        "10": [f"{SHOP}/front.jpg", f"{SHOP}/back.jpg"],
    }
    assert {row.values["item_group_id"] for row in rows} == {"10", "20"}


def test_a_variation_without_its_parent_is_an_item_if_it_has_a_photo(tmp_path: Path) -> None:
    lines = [variation("11", "Blue", "M", "blue.jpg", Parent="id:10"), variation("12", "Green", "M")]
    good, bad = read(export(tmp_path, *lines))
    assert (good.values["item_group_id"], good.values["image"], good.problem) == ("10", ["blue.jpg"], "")
    assert (bad.values["item_id"], bad.problem) == ("12", "no photo, and no product with one")


@pytest.mark.parametrize("change", [{"Published": "0"}, {"Published": "-1"}, {"Visibility in catalog": "hidden"}])
def test_what_is_not_published_is_left_out_with_its_variations(tmp_path: Path, change: dict[str, str]) -> None:
    mug = {**HOODIE, "ID": "20", "SKU": "mug", "Type": "simple"}
    table = read_export(export(tmp_path, {**HOODIE, **change}, variation("11", "Blue", "M", "blue.jpg"), mug), "wc.csv")
    assert list(photos(list(table.rows))) == ["20"]
    assert list(table.notes) == ["wc.csv: 1 product private, hidden or drafts: left out."]


def test_a_variation_that_is_not_published_is_left_out(tmp_path: Path) -> None:
    lines = [HOODIE, variation("11", "Blue", "M", "b.jpg", Published="0"), variation("12", "Green", "M", "g.jpg")]
    assert list(photos(read(export(tmp_path, *lines)))) == ["12"]


def test_a_table_without_ids_uses_the_sku(tmp_path: Path) -> None:
    columns = [column for column in COLUMNS if column != "ID"]
    lines = [
        {name: line[name] for name in line if name != "ID"} for line in (HOODIE, variation("11", "Blue", "M", "b"))
    ]
    rows = read(export(tmp_path, *lines, columns=columns))
    assert [(row.values["item_id"], row.values["item_group_id"]) for row in rows] == [("hoodie-11", "hoodie")]
    assert rows[0].values["image"] == ["b", f"{SHOP}/front.jpg", f"{SHOP}/back.jpg"], "the only variation has all"


def test_an_attribute_with_a_taken_name_gets_a_prefix(tmp_path: Path) -> None:
    (row,) = read(export(tmp_path, {**HOODIE, "Type": "simple", "Attribute 1 name": "Tags"}))
    assert row.values["attribute_tags"] == ["Blue", "Green"]
    assert row.values["tags"] == ["warm", "cotton"]


def test_bad_lines_are_bad_rows(tmp_path: Path) -> None:
    path = export(tmp_path, {**HOODIE, "ID": "", "SKU": ""}, {**HOODIE, "Type": "simple", "Images": ""})
    with path.open("a") as file:
        file.write("cut off,line\n")
    assert [(row.where, row.problem, row.values.get("item_id")) for row in read(path)] == [
        ("line 3", "no value for 'ID' and 'SKU'", None),
        ("line 5", "no photo, and no product with one", "10"),
        ("line 6", "2 fields under 50 columns", None),
    ]


def test_another_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookalikeError, match=r"no columns 'ID', 'Type', 'Name' and 'Images'; it has ID, Nom"):
        read(export(tmp_path, columns=["ID", "Nom"]))
