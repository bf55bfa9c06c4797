"""Exports of Shopify: lines of a handle become the variants of one product, with the photos that show them."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from index.errors import LookalikeError
from index.ingest.feeds.shopify import read_export
from index.ingest.tables import Row

CDN = "https://cdn.shopify.com/s/files/1"
HEADER = """
Handle,Title,Body (HTML),Vendor,Product Category,Type,Tags,Published,Option1 Name,Option1 Value,Option2 Name,
Option2 Value,Option3 Name,Option3 Value,Variant SKU,Variant Grams,Variant Inventory Tracker,Variant Inventory Qty,
Variant Inventory Policy,Variant Fulfillment Service,Variant Price,Variant Compare At Price,Variant Requires Shipping,
Variant Taxable,Variant Barcode,Image Src,Image Position,Image Alt Text,Gift Card,SEO Title,SEO Description,
Google Shopping / Gender,Google Shopping / MPN,Fabric (product.metafields.shopify.fabric),
Care (product.metafields.custom.care),Variant Image,Variant Weight Unit,Cost per item,Status
"""
COLUMNS = HEADER.replace("\n", "").split(",")
SHIRT = {"Handle": "linen-shirt"}
PRODUCT = {
    **SHIRT,
    "Title": "Linen shirt",
    "Body (HTML)": '<p>Light,\n"cool"</p>',
    "Vendor": "Linum",
    "Product Category": "Apparel & Accessories > Clothing",
    "Type": "Shirts",
    "Tags": "summer, linen, summer",
    "Published": "TRUE",
    "Google Shopping / Gender": "unisex",
    "Google Shopping / MPN": "LS-1",
    "Fabric (product.metafields.shopify.fabric)": "linen; cotton",
    "Care (product.metafields.custom.care)": "30",
    "Gift Card": "FALSE",
    "Status": "active",
}
SHARED: dict[str, Any] = {
    "title": "Linen shirt",
    "brand": "Linum",
    "product_category": "Apparel & Accessories > Clothing",
    "product_type": "Shirts",
    "tags": ["summer", "linen"],
    "gender": "unisex",
    "mpn": "LS-1",
    "fabric": ["linen", "cotton"],
    "care": 30,
    "item_group_id": "linen-shirt",
}


def variant(colour: str, size: str, photo: str = "", **others: str) -> dict[str, str]:
    return {
        "Option1 Name": "Color",
        "Option1 Value": colour,
        "Option2 Name": "Size",
        "Option2 Value": size,
        "Variant SKU": f"LS-{colour[0]}{size}",
        "Variant Inventory Tracker": "shopify",
        "Variant Inventory Qty": "4",
        "Variant Inventory Policy": "deny",
        "Variant Price": "49.90",
        "Variant Grams": "180",
        "Variant Image": photo,
        **others,
    }


def export(tmp_path: Path, *lines: dict[str, str], columns: list[str] = COLUMNS, delimiter: str = ",") -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, delimiter=delimiter)
    writer.writeheader()
    writer.writerows(lines)
    path = tmp_path / "products_export.csv"
    path.write_text(text.getvalue(), encoding="utf-8-sig")
    return path


def read(path: Path) -> list[Row]:
    return list(read_export(path, path.name).rows)


def photos(rows: list[Row]) -> dict[str, list[str]]:
    return {row.values["item_id"]: row.values["image"] for row in rows}


def test_a_product_without_variants_is_one_item(tmp_path: Path) -> None:
    line = {
        **PRODUCT,
        "Option1 Name": "Title",
        "Option1 Value": "Default Title",
        "Variant Price": "49.90",
        "Variant Compare At Price": "59.90",
        "Variant Barcode": "04006381333931",
        "Image Src": f"{CDN}/b.jpg?v=2",
        "Image Position": "2",
    }
    second = {**SHIRT, "Image Src": f"{CDN}/a.jpg?v=1", "Image Position": "1"}
    assert read(export(tmp_path, line, second)) == [
        Row(
            "line 3",
            {
                **SHARED,
                "item_id": "linen-shirt",
                "image": [f"{CDN}/a.jpg?v=1", f"{CDN}/b.jpg?v=2"],
                "price": 49.9,
                "compare_at_price": 59.9,
                "barcode": "04006381333931",
                "availability": "in_stock",
                "url": None,
            },
        )
    ]


def test_variants_are_items_of_one_group_that_inherit_from_the_product(tmp_path: Path) -> None:
    lines = [
        {**PRODUCT, **variant("Red", "M"), "Image Src": f"{CDN}/front.jpg", "Image Position": "1"},
        {**SHIRT, **variant("Red", "L", **{"Variant Inventory Qty": "0", "Variant Price": "54.90"})},
        {**SHIRT, "Image Src": f"{CDN}/back.jpg", "Image Position": "2"},
    ]
    first, second = read(export(tmp_path, *lines))
    assert first.values == {
        **SHARED,
        "item_id": "linen-shirt/Red/M",
        "image": [f"{CDN}/front.jpg", f"{CDN}/back.jpg"],
        "color": "Red",
        "size": "M",
        "sku": "LS-RM",
        "price": 49.9,
        "stock": 4,
        "weight_grams": 180,
        "availability": "in_stock",
        "url": None,
    }
    assert second.values == {
        **first.values,
        "item_id": "linen-shirt/Red/L",
        "size": "L",
        "sku": "LS-RL",
        "price": 54.9,
        "stock": 0,
        "availability": "out_of_stock",
    }


def test_a_variant_has_its_own_photo_and_the_product_the_others(tmp_path: Path) -> None:
    lines = [
        {**PRODUCT, **variant("Red", "M", "red.jpg"), "Image Src": "red.jpg", "Image Position": "1"},
        {**SHIRT, **variant("Blue", "M", "blue.jpg"), "Image Src": "blue.jpg", "Image Position": "2"},
        {**SHIRT, "Image Src": "detail.jpg", "Image Position": "3"},
    ]
    rows = read(export(tmp_path, *lines))
    assert photos(rows) == {
        "linen-shirt/Red/M": ["red.jpg"],
        "linen-shirt/Blue/M": ["blue.jpg"],
        "linen-shirt": ["detail.jpg"],
    }
    product = rows[-1].values
    assert product["item_group_id"] == "linen-shirt"
    assert not {"color", "size", "sku", "price"} & product.keys()


def test_the_only_variant_has_all_photos(tmp_path: Path) -> None:
    line = {**PRODUCT, **variant("Red", "M", "red.jpg"), "Image Src": "detail.jpg"}
    assert photos(read(export(tmp_path, line))) == {"linen-shirt/Red/M": ["red.jpg", "detail.jpg"]}


def test_lines_of_a_product_may_be_apart(tmp_path: Path) -> None:
    other = {"Handle": "mug", "Title": "Mug", "Variant Price": "9", "Image Src": "mug.jpg"}
    lines = [{**PRODUCT, **variant("Red", "M")}, other, {**SHIRT, "Image Src": "front.jpg"}]
    assert photos(read(export(tmp_path, *lines))) == {"linen-shirt/Red/M": ["front.jpg"], "mug": ["mug.jpg"]}


@pytest.mark.parametrize("change", [{"Status": "draft"}, {"Status": "archived"}, {"Published": "FALSE"}])
def test_what_is_not_published_is_left_out_with_a_note(tmp_path: Path, change: dict[str, str]) -> None:
    hidden = {**PRODUCT, **variant("Red", "M", "red.jpg"), **change}
    mug = {"Handle": "mug", "Title": "Mug", "Variant Price": "9", "Image Src": "mug.jpg"}
    table = read_export(export(tmp_path, hidden, mug), "products_export.csv")
    assert photos(list(table.rows)) == {"mug": ["mug.jpg"]}
    assert list(table.notes) == ["products_export.csv: 1 product not published, drafts or archived: left out."]


@pytest.mark.parametrize(
    ("change", "availability"),
    [
        ({}, "in_stock"),
        ({"Variant Inventory Qty": "-2"}, "out_of_stock"),
        ({"Variant Inventory Qty": "0", "Variant Inventory Policy": "continue"}, "backorder"),
        ({"Variant Inventory Tracker": "", "Variant Inventory Qty": ""}, "in_stock"),
        ({"Variant Inventory Qty": ""}, None),
    ],
)
def test_the_stock_decides_the_availability(tmp_path: Path, change: dict[str, str], availability: str | None) -> None:
    (row,) = read(export(tmp_path, {**PRODUCT, **variant("Red", "M", "red.jpg", **change)}))
    assert row.values.get("availability") == availability


def test_the_columns_of_2025_mean_the_same(tmp_path: Path) -> None:
    newer = {
        "Handle": "URL handle",
        "Body (HTML)": "Description",
        "Published": "Published on online store",
        "Variant SKU": "SKU",
        "Variant Inventory Tracker": "Inventory tracker",
        "Variant Inventory Qty": "Inventory quantity",
        "Variant Price": "Price",
        "Variant Grams": "Weight value (grams)",
        "Image Src": "Product image URL",
        "Variant Image": "Variant image URL",
        "Google Shopping / MPN": "Google Shopping / Manufacturer part number (MPN)",
    }
    lines = [{**PRODUCT, **variant("Red", "M", "red.jpg")}, {**SHIRT, **variant("Red", "L"), "Image Src": "front.jpg"}]
    before = read(export(tmp_path, *lines))
    renamed = [{newer.get(name, name): value for name, value in line.items()} for line in lines]
    for line in renamed:
        line["Continue selling when out of stock"] = line.pop("Variant Inventory Policy", "")
    columns = [newer.get(column, column) for column in COLUMNS] + ["Continue selling when out of stock"]
    assert read(export(tmp_path, *renamed, columns=columns, delimiter=";")) == before


def test_options_and_columns_of_the_shop_keep_their_names_unless_taken(tmp_path: Path) -> None:
    line = {
        **PRODUCT,
        **variant("Red", "M", "red.jpg"),
        "Option2 Name": "Price",
        "Season": "2026",
        "Image Alt Text": "x",
    }
    (row,) = read(export(tmp_path, line, columns=[*COLUMNS, "Season"]))
    assert (row.values["option_price"], row.values["season"], row.values["price"]) == ("M", 2026, 49.9)
    assert not {"image_alt_text", "cost_per_item", "seo_title", "status", "published"} & row.values.keys()


def test_bad_lines_are_bad_rows(tmp_path: Path) -> None:
    path = export(tmp_path, {**PRODUCT, "Handle": ""}, {"Handle": "mug", "Title": "Mug", "Variant Price": "9"})
    with path.open("a") as file:
        file.write("cut off,line\n")
    assert [(row.where, row.problem, row.values.get("item_id")) for row in read(path)] == [
        ("line 3", "no value for 'Handle'", None),
        ("line 4", "no photo, and no product with one", "mug"),
        ("line 5", "2 fields under 39 columns", None),
    ]


def test_another_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookalikeError, match=r"no columns 'Handle' and 'Image Src'; it has Handle, Title"):
        read(export(tmp_path, columns=["Handle", "Title"]))
