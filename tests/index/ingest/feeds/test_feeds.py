"""The format of a source is recognised by its content, and everything else stays a plain table."""

import gzip
from pathlib import Path

import pytest

from index.errors import LookalikeError
from index.ingest.feeds import detect_format, open_catalogue

RSS = '<rss xmlns:g="http://base.google.com/ns/1.0"><channel></channel></rss>'
CONTENTS = [
    ("feed.xml", RSS, "google-merchant"),
    ("feed", f"\ufeff\n<?xml version='1.0'?>{RSS}", "google-merchant"),
    ("feed.txt", "id\ttitle\timage_link\n", "google-merchant"),
    ("feed.csv", "ID,Title,Image link,Price\n", "google-merchant"),
    ("products.csv", "Handle,Title,Image Src\n", "shopify"),
    ("products.csv", "Title,URL handle,Product image URL\n", "shopify"),
    ("wc.csv", "ID,Type,SKU,Name,Images\n", "woocommerce"),
    ("wc.csv", "Type;SKU;Name;Images\n", "woocommerce"),
    ("import.csv", '"gs://a/1.jpg","","s","p","toys-v2","","",""\n', "google-product-search"),
    ("import.csv", "image-uri,image-id,product-set-id,product-id,product-category\n", "google-product-search"),
    ("catalogue.csv", "item_id,image,title\n", "table"),
    ("catalogue.csv", "label,path,split\n", "table"),
    ("catalogue.csv", "id,image\n", "table"),
    ("catalogue.csv", "item_id,image,id,image_link,Handle,Image Src\n", "table"),
    ("catalogue.csv", "", "table"),
    ("catalogue.jsonl", "<rss>", "table"),
    ("catalogue.parquet", "PAR1", "table"),
]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("name", "content", "kind"), CONTENTS)
def test_the_content_decides_the_format(tmp_path: Path, name: str, content: str, kind: str, compressed: bool) -> None:
    data = content.encode()
    (tmp_path / "copy").write_bytes(gzip.compress(data) if compressed else data)
    own = [["item_id", "label"], ["image", "path"]]
    assert detect_format(tmp_path / "copy", f"{name}.gz" if compressed else name, own) == kind


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    path = tmp_path / "products.csv"
    path.write_text("Handle,Title,Image Src,image_link,id,item_id,image\nh,t,1.jpg,2.jpg,5,6,3.jpg\n")
    found = {
        kind: next(open_catalogue(path, path.name, path.name, kind).rows).values["image"]
        for kind in ("shopify", "google-merchant", "table")
    }
    assert found == {"shopify": ["1.jpg"], "google-merchant": ["2.jpg"], "table": "3.jpg"}


def test_texts_that_are_too_long_for_an_attribute_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "feed.txt"
    path.write_text(f"id\timage_link\tcare\tsize\n1\t1.jpg\t{'x' * 4097}\t{'y' * 4096}\n")
    (row,) = open_catalogue(path, path.name, path.name).rows
    assert row.values == {"item_id": "1", "image": ["1.jpg"], "size": "y" * 4096}


def test_a_text_that_is_no_feed_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some notes\n")
    with pytest.raises(LookalikeError, match=r"notes.txt is not a table of a known format.*a feed of a shop"):
        open_catalogue(tmp_path / "notes.txt", "notes.txt", "notes.txt")
