"""Cells of feeds: numbers, prices, dates and lists mean what shops write."""

from typing import Any

import pytest

from index.ingest.feeds.cells import (
    add_attribute,
    parse_date,
    parse_number,
    parse_price,
    plain_name,
    split_list,
    split_places,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("12.50", 12.5),
        ("12,50", 12.5),
        ("1,299.00", 1299.0),
        ("1.299,00", 1299.0),
        ("1 299,00", 1299.0),
        ("1\u202f299", 1299),
        ("1'299.00", 1299.0),
        ("2,500,000", 2500000),
        ("-3.5", -3.5),
        ("1,299", None),
        ("1,29,9", None),
        ("12.50.1", None),
        ("true", None),
        ("free", None),
        ("", None),
    ],
)
def test_numbers_are_read_unless_they_have_two_meanings(text: str, number: float | None) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("12.50 EUR", (12.5, "EUR")),
        ("12.50eur", (12.5, "EUR")),
        ("USD 1,299.00", (1299.0, "USD")),
        ("12,50 €", (12.5, "EUR")),
        ("£8", (8, "GBP")),
        ("25", (25, "")),
        ("EUR 12 USD", None),
        ("1,299 USD", None),
        ("on request", None),
        ("9" * 100_000 + "!", None),
    ],
)
def test_a_price_has_an_amount_and_a_currency(text: str, price: tuple[float, str] | None) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("2026-03-01", "2026-03-01"),
        ("2026-03-01T13:00-0800", "2026-03-01T21:00:00Z"),
        ("2026-03-01T13:00:00+01:00", "2026-03-01T12:00:00Z"),
        ("2026-03-01 13:00:00", "2026-03-01T13:00:00Z"),
        ("2026-03-01T13:00:00Z", "2026-03-01T13:00:00Z"),
        ("01.03.2026", "01.03.2026"),
    ],
)
def test_dates_are_iso_texts_in_utc(text: str, date: str) -> None:
    assert parse_date(text) == date


def test_lists_have_each_value_once() -> None:
    assert split_list('red, "blue, dark",red,,\n') == ["red", "blue, dark"]
    assert split_list("a; b", ";") == ["a", "b"]
    assert split_list("a,\r\n b\rc") == ["a", "b c"]
    assert split_list("") == []


def test_a_list_of_addresses_keeps_the_commas_in_them() -> None:
    text = "https://a.example/w_400,h_400/1.jpg,https://a.example/2.jpg , HTTP://b.example/3.jpg"
    assert split_places(text) == [
        "https://a.example/w_400,h_400/1.jpg",
        "https://a.example/2.jpg",
        "HTTP://b.example/3.jpg",
    ]
    assert split_places("front.jpg, back.jpg") == ["front.jpg", "back.jpg"]


def test_the_name_of_an_attribute_is_plain() -> None:
    assert plain_name(" Weight (kg) ") == "weight_kg"
    assert plain_name("Größe") == "größe"
    values: dict[str, Any] = {}
    for name, value in [("Color", "red"), ("Price", 3), ("Title", "Dr"), ("Empty", ""), ("!", "x"), ("None", [])]:
        add_attribute(values, name, value, prefix="option", taken=frozenset({"price"}))
    assert values == {"color": "red", "option_price": 3, "option_title": "Dr"}
