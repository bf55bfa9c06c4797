"""Feeds of shops are indexed by the command, with photos of this machine and of a server, and found by their groups."""

import base64
import csv
import functools
import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import load_pixels
from index.errors import LookalikeError
from index.gallery import open_gallery
from index.gallery.filters import Filter
from index.items import Item
from index.jobs import JobRecord
from tests.support.processes import run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, index_source, tiny_photo

RSS = """<?xml version="1.0" encoding="UTF-8"?>
<rss version="2.0" xmlns:g="http://base.google.com/ns/1.0"><channel><title>Balls</title>
<item><g:id>red-s</g:id><g:item_group_id>red</g:item_group_id><title>Red ball, S</title>
  <link>https://shop.example/red</link><g:image_link>{photos}/red-0.jpg</g:image_link>
  <g:additional_image_link>{photos}/red-1.jpg</g:additional_image_link>
  <g:price>5.00 EUR</g:price><g:color>Red/White</g:color><g:size>S</g:size></item>
<item><g:id>red-m</g:id><g:item_group_id>red</g:item_group_id><title>Red ball, M</title>
  <g:image_link>{photos}/red-0.jpg</g:image_link><g:price>7.00 EUR</g:price><g:size>M</g:size></item>
<item><g:id>blue</g:id><title>Blue ball</title><g:image_link>{photos}/blue-0.jpg</g:image_link></item>
<item><g:id>lost</g:id><title>No photo</title></item>
<item><g:id>secret</g:id><g:image_link>{secret}</g:image_link></item>
</channel></rss>
"""
SHOPIFY = """Handle,Title,Vendor,Tags,Option1 Name,Option1 Value,SKU,Variant Price,Image Src,Variant Image,Status
ball,Ball,Tiny,"round, toy",Color,Red,B-R,4.50,red-0.jpg,red-0.jpg,active
ball,,,,,Blue,B-B,4.75,blue-0.jpg,blue-0.jpg,
ball,,,,,,,,green-0.jpg,,
draft,Draft,Tiny,,Title,Default Title,D,1.00,cyan-0.jpg,,draft
"""
WOO = """\
ID,Type,SKU,Name,Published,In stock?,Regular price,Categories,Images,Parent,Attribute 1 name,Attribute 1 value(s)
1,variable,ball,Ball,1,1,,"Toys, Toys > Balls","green-0.jpg",,Colour,"Red, Blue"
2,variation,ball-r,Ball - Red,1,1,4.5,,red-0.jpg,ball,Colour,Red
3,variation,ball-b,Ball - Blue,1,0,4.75,,blue-0.jpg,id:1,Colour,Blue
"""
SEARCH = """gs://shop/photos/red-0.jpg,red-1,summer,red,toys-v2,Red ball,"colour=red,colour=white","0.05,0.05,0.95,0.95"
gs://shop/photos/red-1.jpg,red-2,sale,red,toys-v2,,,
gs://shop/photos/blue-0.jpg,,summer,blue,toys-v2,Blue ball,,
gs://other/blue-0.jpg,,summer,lost,toys-v2,Lost,,
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_tiny_bundle(tmp_path / "bundle")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    for number, colour in enumerate(COLOURS):
        for view in range(2):
            (folder / f"{colour}-{view}.jpg").write_bytes(tiny_photo(number, view))
    return folder


@pytest.fixture
def server(shop: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=shop)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def found(bundle: Path, query: dict[str, Any] | None = None) -> dict[str, Item]:
    """Returns the items that a search with a red ball finds, the best first."""
    embedder = Embedder(Bundle.load(bundle), threads=1)
    pixels = load_pixels(tiny_photo(0, 0), embedder.bundle.preprocessing)
    gallery = open_gallery(bundle.parent / "gallery")
    try:
        wanted = Filter.parse(query) if query else None
        hits = gallery.search(embedder.embed(pixels[None]), bundle_id=embedder.bundle.id, top=20, filter=wanted).hits[0]
    finally:
        gallery.close()
    return {hit.item.id: hit.item for hit in hits}


def index_feed(source: Path, bundle: Path, **options: Any) -> JobRecord:
    return index_source(source, gallery=bundle.parent / "gallery", bundle=bundle, **options)


def rejects(bundle: Path) -> list[dict[str, str]]:
    with (bundle.parent / "rejects.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_feed_of_google_merchant_is_indexed_with_its_bad_entries_as_rejects(shop: Path, bundle: Path) -> None:
    feed = write(shop / "feed.xml", RSS.format(photos=".", secret="/etc/passwd"))
    record = index_feed(feed, bundle, delete_missing=True)
    assert (record.state, record.embedded, record.rejected) == ("partial", 4, 2)
    secret, lost = sorted(rejects(bundle), key=lambda bad: bad["reason"])
    assert (secret["item_id"], secret["reason"], secret["place"]) == ("secret", "forbidden", "/etc/passwd")
    assert (lost["item_id"], lost["reason"], lost["place"]) == ("lost", "row", f"{feed}, line 10")
    assert "no value for 'image_link'" in lost["problem"]
    items = found(bundle)
    assert list(items)[2] == "blue"
    assert (items["red-s"].title, items["red-s"].url) == ("Red ball, S", "https://shop.example/red")
    assert items["red-s"].attributes == {
        "item_group_id": "red",
        "price": 5.0,
        "currency": "EUR",
        "color": ("Red", "White"),
        "size": "S",
    }
    assert set(found(bundle, {"color": "White"})) == {"red-s"}
    assert set(found(bundle, {"item_group_id": "red", "price": {"gte": 6}})) == {"red-m"}
    second = index_feed(feed, bundle)
    assert (second.embedded, second.unchanged) == (0, 4)


def test_what_a_feed_lets_expire_is_not_found(shop: Path, bundle: Path) -> None:
    dated = RSS.replace("<g:id>red-m", "<g:expiration_date>2026-01-31T12:00+0100</g:expiration_date><g:id>red-m")
    dated = dated.replace("<g:id>blue", "<g:expiration_date>31.12.2099</g:expiration_date><g:id>blue")
    index_feed(write(shop / "feed.xml", dated.format(photos=".", secret="red-1.jpg")), bundle, attributes=["size"])
    assert set(found(bundle)) == {"red-s", "secret"}
    assert [(bad["item_id"], bad["reason"]) for bad in rejects(bundle)] == [("blue", "row"), ("lost", "row")]


def test_an_export_of_shopify_is_indexed_without_what_is_not_published(shop: Path, bundle: Path) -> None:
    record = index_feed(write(shop / "products.csv", SHOPIFY), bundle)
    assert (record.state, record.embedded) == ("done", 3)
    assert "products.csv: 1 product not published, drafts or archived: left out." in record.message
    items = found(bundle)
    assert next(iter(items)) == "ball/Red"
    assert {name: item.attributes["item_group_id"] for name, item in items.items()} == dict.fromkeys(
        ("ball/Red", "ball/Blue", "ball"), "ball"
    )
    assert set(found(bundle, {"tags": "toy", "color": "Blue"})) == {"ball/Blue"}


def test_an_export_of_woocommerce_is_indexed_with_its_variations(shop: Path, bundle: Path) -> None:
    assert index_feed(write(shop / "wc-products.csv", WOO), bundle).state == "done"
    assert next(iter(found(bundle))) == "2"
    assert set(found(bundle, {"categories": "Toys > Balls"})) == {"1", "2", "3"}
    assert set(found(bundle, {"item_group_id": "1", "availability": "out_of_stock"})) == {"3"}


def test_the_csv_of_product_search_is_indexed_from_a_copy_of_its_bucket(shop: Path, bundle: Path) -> None:
    table = write(bundle.parent / "import.csv", SEARCH)
    record = index_feed(table, bundle, mirror={"gs://shop/photos": str(shop)})
    assert (record.embedded, record.rejected) == (3, 1)
    assert [(bad["item_id"], bad["reason"]) for bad in rejects(bundle)] == [("lost", "forbidden")]
    items = found(bundle)
    assert next(iter(items)) == "red"
    assert items["red"].attributes["product_sets"] == ("summer", "sale")
    assert set(found(bundle, {"product_sets": "sale", "colour": "white"})) == {"red"}
    table.write_text(SEARCH.replace("0.95,0.95", "0.75,0.75"))
    record = index_feed(table, bundle, mirror={"gs://shop/photos": str(shop)})
    assert (record.embedded, record.unchanged) == (1, 2), "another region is another photo"


def test_the_command_reads_a_compressed_feed_and_photos_from_a_server(shop: Path, bundle: Path, server: str) -> None:
    feed = RSS.format(photos=server, secret="http://[::1]:1/secret.jpg")
    (shop / "export").write_bytes(gzip.compress(feed.encode()))
    command = [sys.executable, "-m", "lookalike", "reindex", f"{server}/export?format=rss", "--gallery", "gallery"]
    options = ["--bundle", str(bundle), "--format", "google-merchant", "--allow-address", "127.0.0.1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=bundle.parent, check=False)
    assert (done.returncode, done.stdout.partition(";")[0]) == (
        3,
        "4 photos embedded, 0 unchanged, 2 rejected, 0 deleted",
    ), done.stderr
    assert {bad["item_id"]: bad["reason"] for bad in rejects(bundle)} == {"lost": "row", "secret": "forbidden"}
    assert set(found(bundle, {"item_group_id": "red"})) == {"red-s", "red-m"}


def test_a_feed_that_defines_entities_changes_nothing(shop: Path, bundle: Path) -> None:
    doctype = '<!DOCTYPE rss [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]><rss'
    feed = write(shop / "feed.xml", RSS.format(photos=".", secret=".").replace("<rss", doctype))
    with pytest.raises(LookalikeError, match="document type declaration"):
        index_feed(feed, bundle, delete_missing=True)


VARIANT = """
<item><g:id>{colour}-{size}</g:id><g:item_group_id>{colour}</g:item_group_id><title>A ball</title>
  <g:image_link>{colour}-{view}.jpg</g:image_link><g:price>{price}.00 EUR</g:price><g:size>{size}</g:size>
  <g:color>{colour}/White</g:color><g:material>{material}</g:material><g:availability>{stock}</g:availability></item>"""


@pytest.mark.slow
def test_variants_of_feeds_are_filtered_grouped_boosted_and_explained_over_http(shop: Path, bundle: Path) -> None:
    variants = [
        VARIANT.format(
            colour=colour,
            size=size,
            view=number % 2,
            price=10 + place,
            material="cotton/wool" if size == "M" else "cotton",
            stock="out_of_stock" if colour == "red" else "in_stock",
        )
        for place, colour in enumerate(COLOURS)
        for number, size in enumerate("SML")
    ]
    head, end = '<rss version="2.0" xmlns:g="http://base.google.com/ns/1.0"><channel>', "</channel></rss>"
    assert index_feed(write(shop / "feed.xml", head + "".join(variants) + end), bundle).embedded == 24
    assert index_feed(write(shop / "products.csv", SHOPIFY), bundle).embedded == 3

    in_stock = {"filter": {"availability": "in_stock"}, "weight": 0.9}
    ranking: dict[str, Any] = {"group_by": "item_group_id", "boosts": [in_stock], "window": 10}
    groups = {*COLOURS, "ball"}
    with run_server("serve", "--gallery", bundle.parent / "gallery") as address, httpx.Client(base_url=address) as web:

        def search(**options: Any) -> dict[str, Any]:
            image = base64.b64encode(tiny_photo(0, 0)).decode()
            response = web.post("/v1/search", json={"image": image, "limit": 4, "explain": True, **options})
            assert response.status_code == 200, response.text
            return dict(response.json())

        def walk(**options: Any) -> list[dict[str, Any]]:
            page = search(**options)
            items: list[dict[str, Any]] = page["items"]
            while page["cursor"]:
                page = search(**options, cursor=page["cursor"])
                items += page["items"]
            return items

        def group(item: dict[str, Any]) -> str:
            return str(item["attributes"]["item_group_id"])

        plain = walk(filter={"item_group_id": {"exists": True}})
        assert len(plain) == 27 and {group(item) for item in plain[:4]} == {"red", "ball"}
        assert web.put("/v1/rankings/home", json=ranking).status_code == 201
        for choice in (ranking, "home"):
            ranked = walk(ranking=choice)
            assert {group(item) for item in ranked} == groups and len(ranked) == len(groups), "each group once"
            assert [group(item) for item in ranked].index("red") > 0, "it looks most similar, but is sold out"
            for item in ranked:
                told, (share,) = item["explanation"], item["explanation"]["shares"]
                assert (told["similarity"], told["reason"], share["rule"]) == (item["score"], "score", "boosts[0]")
                assert share["share"] == (0.9 if item["attributes"].get("availability") == "in_stock" else 0)
                assert told["score"] == pytest.approx(told["similarity"] + share["share"], abs=1e-9)
            scores = [item["explanation"]["score"] for item in ranked]
            assert scores == sorted(scores, reverse=True)

        both = walk(ranking="home", filter={"size": ["M", "XL"], "material": {"all": ["wool", "cotton"]}})
        assert {item["id"] for item in both} == {f"{colour}-M" for colour in COLOURS}
        either = walk(ranking="home", filter={"any": [{"color": {"all": ["red", "White"]}}, {"tags": "toy"}]})
        assert {group(item) for item in either} == {"red", "ball"} and len(either) == 2
        cheap = walk(filter={"price": {"lt": 12}, "not": {"size": "L"}, "item_group_id": [*COLOURS]})
        assert {item["id"] for item in cheap} == {"red-S", "red-M", "green-S", "green-M"}
