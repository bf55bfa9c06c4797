"""The format of a source is recognised by its content, and everything else stays a plain table."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index.errors import LookalikeError
from index.ingest.feeds import detect_format, open_catalogue
from index.ingest.options import SourceFormat
from index.ingest.sources import Source, SourceImage

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


ENTRY = "<item><g:id>1</g:id><g:image_link>1.jpg</g:image_link><g:price>5 EUR</g:price><g:color>a/b</g:color></item>"
SAMPLES: dict[SourceFormat, str] = {
    "google-merchant": RSS.replace("</channel>", f"{ENTRY}</channel>"),
    "shopify": 'Handle,Title,Tags,Option1 Name,Option1 Value,Variant Price,Image Src\nh,t,"a, b",Size,M,5,1.jpg\n',
    "woocommerce": "ID,Type,SKU,Name,Images,Parent,Attribute 1 name,Attribute 1 value(s)\n"
    '1,variable,a,A,1.jpg,,Size,"S, M"\n2,variation,b,A,,a,Size,S\n',
    "google-product-search": 'gs://a/1.jpg,i,s,p,toys-v2,Name,"a=b,a=c","0.1,0.1,0.9,0.9"\n',
}
EDITS = st.tuples(
    st.integers(0, 300), st.integers(0, 9), st.text(st.sampled_from('",;\t\n\r\0<>&=./|é\ud7ffA1'), max_size=4)
)


@pytest.mark.parametrize("kind", SAMPLES)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDITS, max_size=6))
def test_a_damaged_feed_gives_items_bad_rows_or_an_error_for_users(
    tmp_path: Path, kind: SourceFormat, edits: list[tuple[int, int, str]]
) -> None:
    text = SAMPLES[kind]
    for start, length, new in edits:
        text = text[:start] + new + text[start + length :]
    (tmp_path / "feed").write_text(text, newline="")
    try:
        rows = list(Source([tmp_path / "feed"], format=kind).rows())
    except LookalikeError as error:
        assert "feed" in str(error)
    else:
        assert all(isinstance(row, SourceImage) or (row.problem and row.where) for row in rows)
