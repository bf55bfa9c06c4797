"""Sources of other packages: found by address, read once, and refused with a reason."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from index._util.plugins import PluginError
from index.ingest.plugins import find_plugin
from index.ingest.sources import Source

MODULE = """
from datetime import date
from decimal import Decimal

calls = []


def products(season):
    calls.append(season)
    for number in (1, 2):
        yield {
            "item_id": f"{season}-{number}", "image": f"{number}.jpg",
            "price": Decimal("9.50"), "since": date(2026, 5, 1),
        }


def broken(argument):
    yield {"item_id": "a", "image": "a.jpg"}
    raise ConnectionError("the shop is closed")


def nested(argument):
    yield {"item_id": "a", "image": "a.jpg", "stock": object()}
"""


@pytest.fixture
def shop_feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "shop_feed.py").write_text(MODULE)
    metadata = tmp_path / "shop_feed-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-feed\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[lookalike.sources]\nfeed = shop_feed:products\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    find_plugin.cache_clear()
    yield tmp_path
    find_plugin.cache_clear()
    sys.modules.pop("shop_feed", None)


@pytest.mark.parametrize("address", ["shop_feed:products:spring", "feed:spring"])
def test_a_source_of_another_package_is_read_once_as_a_typed_table(shop_feed: Path, address: str) -> None:
    source = Source([address])
    assert source.check().images == 2
    first = next(iter(source))
    assert (first.item.id, first.image_id) == ("spring-1", "1.jpg")
    assert first.item.attributes == {"price": 9.5, "since": "2026-05-01"}
    assert Path(first.place).resolve() == shop_feed / "1.jpg", "relative to the working folder"
    assert [image.item.id for image in source] == ["spring-1", "spring-2"]
    assert sys.modules["shop_feed"].calls == ["spring"], "a long job sees the rows of one moment"


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("shop_feed:broken", "failed after 1 rows .ConnectionError: the shop is closed"),
        ("shop_feed:nested", "failed after 0 rows"),
        ("shop_feed:absent", "cannot be loaded"),
        ("no_such_module:products", "No module named 'no_such_module'"),
    ],
)
def test_a_source_that_fails_is_named_with_the_reason(shop_feed: Path, address: str, problem: str) -> None:
    with pytest.raises(PluginError, match=problem):
        Source([address]).check()


@pytest.mark.parametrize("address", ["s3://bucket/table.csv", "https://shop/feed:1", "table.csv", "a-b:c", "odd:na me"])
def test_urls_and_paths_are_not_plugins(shop_feed: Path, address: str) -> None:
    assert find_plugin(address) is None


def test_a_file_with_a_colon_in_its_name_is_a_file(shop_feed: Path) -> None:
    (shop_feed / "shop_feed:products").mkdir()
    assert find_plugin("shop_feed:products") is None
