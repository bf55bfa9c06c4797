"""Feeds of Google Merchant Center: XML and texts give the same items, with typed attributes."""

from pathlib import Path
from typing import Any

import pytest

from index.errors import LookalikeError
from index.ingest.feeds.google_merchant import read_feed
from index.ingest.tables import Row

RSS = """<?xml version="1.0" encoding="UTF-8"?>
<rss version="2.0" xmlns:g="http://base.google.com/ns/1.0" xmlns:c="http://base.google.com/cns/1.0">
<channel><title>Chairs and shirts</title><link>https://shop.example</link>
<item>
  <title>Shirt, red, M</title>
  <link>https://shop.example/shirt?colour=red&amp;size=M</link>
  <description>A shirt of linen.</description>
  <g:id>SHIRT-RED-M</g:id>
  <g:item_group_id>SHIRT</g:item_group_id>
  <g:image_link>https://cdn.shop.example/shirt-red.jpg</g:image_link>
  <g:additional_image_link>https://cdn.shop.example/w_400,h_400/shirt-back.jpg</g:additional_image_link>
  <g:additional_image_link>https://cdn.shop.example/shirt-red.jpg</g:additional_image_link>
  <g:price>1,299.00 EUR</g:price>
  <g:sale_price>999,50 EUR</g:sale_price>
  <g:sale_price_effective_date>2026-11-20T00:00+0100/2026-11-28T23:59+0100</g:sale_price_effective_date>
  <g:availability>in stock</g:availability>
  <g:availability_date>2026-11-25T13:00-0800</g:availability_date>
  <g:expiration_date>2026-12-24T18:00:00+01:00</g:expiration_date>
  <g:color>Red/White</g:color>
  <g:size>38</g:size>
  <g:gtin>04006381333931</g:gtin>
  <g:brand>Linum</g:brand>
  <g:product_type>Clothing &gt; Shirts</g:product_type>
  <g:product_type>Summer, 2026</g:product_type>
  <g:google_product_category>212</g:google_product_category>
  <g:adult>no</g:adult>
  <g:multipack>3</g:multipack>
  <g:custom_label_0>2024</g:custom_label_0>
  <g:cost_of_goods_sold>400 EUR</g:cost_of_goods_sold>
  <g:shipping><g:country>DE</g:country><g:price>4.90 EUR</g:price></g:shipping>
  <c:fit type="string">Slim</c:fit>
</item>
</channel></rss>
"""
ITEM: dict[str, Any] = {
    "item_id": "SHIRT-RED-M",
    "title": "Shirt, red, M",
    "url": "https://shop.example/shirt?colour=red&size=M",
    "image": ["https://cdn.shop.example/shirt-red.jpg", "https://cdn.shop.example/w_400,h_400/shirt-back.jpg"],
    "item_group_id": "SHIRT",
    "price": 1299.0,
    "sale_price": 999.5,
    "currency": "EUR",
    "sale_starts": "2026-11-19T23:00:00Z",
    "sale_ends": "2026-11-28T22:59:00Z",
    "availability": "in_stock",
    "availability_date": "2026-11-25T21:00:00Z",
    "expires_at": "2026-12-24T17:00:00Z",
    "color": ["Red", "White"],
    "size": "38",
    "gtin": ["04006381333931"],
    "brand": "Linum",
    "product_type": ["Clothing > Shirts", "Summer, 2026"],
    "google_product_category": "212",
    "adult": False,
    "multipack": 3,
    "custom_label_0": "2024",
    "fit": "Slim",
}
HEADER = (
    "id\ttitle\tlink\timage link\tprice\tadditional_image_link\tproduct_type\tavailability\tshipping(country:price)"
)
LINES = f"""{HEADER}
1\tA chair\thttps://shop.example/1\t1.jpg\t25 GBP\t1-back.jpg,1-side.jpg\tChairs,"Oak, old"\tOut of stock\tDE:4 EUR
2\t"A ""big""\tchair"\t\t2.jpg\t1,299 GBP
"""


def rows(tmp_path: Path, text: str) -> list[Row]:
    feed = tmp_path / "feed.txt"
    feed.write_text(text)
    return list(read_feed(feed, "feed.txt").rows)


def test_an_entry_of_rss_becomes_an_item(tmp_path: Path) -> None:
    assert rows(tmp_path, RSS) == [Row("line 4", ITEM)]


def test_an_entry_of_atom_becomes_the_same_item(tmp_path: Path) -> None:
    link = "https://shop.example/shirt?colour=red&amp;size=M"
    atom = (
        RSS.replace('<rss version="2.0"', '<feed xmlns="http://www.w3.org/2005/Atom"')
        .replace("<channel><title>Chairs and shirts</title><link>https://shop.example</link>", "")
        .replace("</channel></rss>", "</feed>")
        .replace("item>\n", "entry>\n")
        .replace(f"<link>{link}</link>", f'<link href="{link}"/>')
        .replace("description>", "summary>")
    )
    assert rows(tmp_path, atom) == [Row("line 4", ITEM)]


def test_a_text_separated_by_tabs_is_read_also_with_short_lines(tmp_path: Path) -> None:
    first, second = rows(tmp_path, LINES)
    assert first.values == {
        "item_id": "1",
        "title": "A chair",
        "url": "https://shop.example/1",
        "image": ["1.jpg", "1-back.jpg", "1-side.jpg"],
        "price": 25,
        "currency": "GBP",
        "product_type": ["Chairs", "Oak, old"],
        "availability": "out_of_stock",
    }
    assert second == Row(
        "line 3", {"item_id": "2", "title": 'A "big"\tchair', "image": ["2.jpg"], "price": "1,299 GBP"}
    )


def test_columns_that_are_repeated_are_lists(tmp_path: Path) -> None:
    text = "g:id,image_link,additional_image_link,additional_image_link\n1,1.jpg,2.jpg,3.jpg\n"
    assert rows(tmp_path, text)[0].values["image"] == ["1.jpg", "2.jpg", "3.jpg"]


@pytest.mark.parametrize(
    ("entry", "item_id", "problem"),
    [
        ("<g:image_link>1.jpg</g:image_link>", None, "no value for 'id'"),
        ("<g:id>1</g:id>", "1", "no value for 'image_link'"),
        (
            "<g:id>1</g:id><g:image_link>1</g:image_link><g:price>5 EUR</g:price><g:sale_price>4 USD</g:sale_price>",
            "1",
            "sale_price is in USD, but another price in EUR",
        ),
    ],
)
def test_an_entry_that_cannot_be_used_is_a_bad_row(tmp_path: Path, entry: str, item_id: str, problem: str) -> None:
    text = f'<rss xmlns:g="http://base.google.com/ns/1.0"><channel>\n<item>{entry}</item></channel></rss>'
    (row,) = rows(tmp_path, text)
    assert (row.where, row.problem, row.values.get("item_id")) == ("line 2", problem, item_id)


def test_a_line_with_too_many_fields_is_a_bad_row(tmp_path: Path) -> None:
    bad, good = rows(tmp_path, "id\timage_link\n1\t1.jpg\tmore\n2\t2.jpg\n")
    assert bad == Row("line 2", {}, "3 fields under 2 columns")
    assert good.values == {"item_id": "2", "image": ["2.jpg"]}


def test_attributes_never_take_the_names_of_fields(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, "id\timage_link\timage\turl\tcurrency\n1\t1.jpg\ta\tb\tc\n")
    assert row.values == {
        "item_id": "1",
        "image": ["1.jpg"],
        "feed_image": "a",
        "feed_url": "b",
        "feed_currency": "c",
    }


def test_a_text_with_other_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookalikeError, match=r"no columns 'id' and 'image_link'; it has sku, photo"):
        rows(tmp_path, "sku\tphoto\n")
