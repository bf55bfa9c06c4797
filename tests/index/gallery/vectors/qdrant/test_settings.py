"""Addresses of Qdrant, and the settings in them."""

import pytest

from index.errors import LookalikeError
from index.gallery.vectors.qdrant.settings import QdrantAddress


def test_an_address_names_nodes_a_prefix_and_options() -> None:
    parsed = QdrantAddress.parse(
        "qdrant://a:7001,b,[::1]:7003/shop?tls=true&shards=6&apply_delay=2.5&quantization=int8"
    )
    assert parsed.nodes == (("a", 7001), ("b", 6334), ("::1", 7003))
    assert parsed.prefix == "shop"
    settings = parsed.settings
    assert (settings.tls, settings.shards, settings.apply_delay, settings.quantization) == (True, 6, 2.5, "int8")


def test_the_port_of_the_rest_interface_stands_for_that_of_grpc() -> None:
    assert QdrantAddress.parse("qdrant://a:6333,b:6333/shop").nodes == (("a", 6334), ("b", 6334))


@pytest.mark.parametrize(
    ("address", "tls"),
    [("qdrant://a/shop", False), ("qdrant://a/shop?tls=true", True), ("qdrants://a/shop", True),
     ("qdrants://a/shop?tls=false", True)],
)  # fmt: skip
def test_a_secure_address_connects_with_tls(address: str, tls: bool) -> None:
    assert QdrantAddress.parse(address).settings.tls == tls


@pytest.mark.parametrize(
    "address",
    ["qdrant:///shop", "qdrant://a:port/shop", "qdrant://a", "qdrant://a/shop/b", "qdrant://a/sh.op", "http://a/shop",
     "qdrant://key@a/shop", "qdrant://a/shop?shard=3", "qdrant://a/shop?shards=many", "qdrant://a/shop?timeout=0"],
)  # fmt: skip
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(LookalikeError, match="qdrant://host1:6334"):
        QdrantAddress.parse(address)


@pytest.mark.parametrize("address", ["qdrant://me:hunter2@a/shop", "qdrant://a/shop?api_key=hunter2"])
def test_an_invalid_address_is_shown_without_its_secrets(address: str) -> None:
    with pytest.raises(LookalikeError) as raised:
        QdrantAddress.parse(address)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "candidates"), [("", 2), ("?quantization=binary", 8), ("?quantization=binary&oversampling=3", 3)]
)
def test_binary_codes_select_more_candidates(options: str, candidates: float) -> None:
    assert QdrantAddress.parse(f"qdrant://host/shop{options}").settings.candidates_per_result == candidates
