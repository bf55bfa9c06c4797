"""Addresses of galleries, and how messages show them."""

import pytest

from index.errors import LookalikeError
from index.gallery.addresses import Address, parse_address, redact


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gallery", Address("gallery")),
        ("a folder with spaces", Address("a folder with spaces")),
        ("postgresql://shop@db/shops?schema=toys", Address("postgresql://shop@db/shops?schema=toys")),
        ("postgresql://db/shops  qdrant://a:1,b:2", Address("postgresql://db/shops", "qdrant://a:1,b:2")),
    ],
)
def test_an_address_has_a_store_and_may_have_a_vector_index(text: str, parts: Address) -> None:
    assert parse_address(text) == parts
    assert parts.is_folder == ("://" not in text)


@pytest.mark.parametrize(
    "text", ["mysql://u:secret@db", "qdrant://:secret@a", "postgresql://u:secret@db gallery", "postgresql://a b c"]
)
def test_an_unknown_engine_is_refused_without_showing_a_password(text: str) -> None:
    with pytest.raises(LookalikeError, match="unknown engine") as caught:
        parse_address(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://u:secret@db/shop", "postgresql://u:***@db/shop"),
        ("postgresql://u:se@cret@a,b:5432/shop?schema=toys", "postgresql://u:***@a,b:5432/shop?schema=toys"),
        ("postgresql://db/shop?user=u&password=secret&schema=x", "postgresql://db/shop?user=u&password=***&schema=x"),
        ("postgresql://u:secret@db qdrant://:secret@a:6333", "postgresql://u:***@db qdrant://:***@a:6333"),
        ("postgresql://u@db/shop", "postgresql://u@db/shop"),
        ("a/folder", "a/folder"),
    ],
)
def test_a_redacted_address_has_no_password(address: str, shown: str) -> None:
    assert redact(address) == shown
