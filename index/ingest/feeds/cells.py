"""Cells of feeds: converts texts to numbers, prices, dates and lists, and column names to attribute names."""

import csv
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from index.ingest.tables import parse_value
from index.items import EXPIRES_AT

_SPACES = str.maketrans("", "", " '\u00a0\u202f\u2019")
_ENGLISH = re.compile(r"-?\d{1,3}(,\d{3})+\.\d+|-?\d{1,3}(,\d{3}){2,}")
_CONTINENTAL = re.compile(r"-?\d{1,3}(\.\d{3})+,\d+|-?\d+,\d{1,2}")
_PRICE = re.compile(r"\s*([A-Za-z]{3}|[€£])?\s*(-?[\d.,'\u2019 \u00a0\u202f]*\d)\s*([A-Za-z]{3}|[€£])?\s*")
_SYMBOLS = {"€": "EUR", "£": "GBP"}
_NEXT_URL = re.compile(r",\s*(?=[a-zA-Z][\w+.-]*://)")


def parse_number(text: str) -> int | float | None:
    """Returns a number, also with separators of thousands or a decimal comma, or None.

    `1,299` is None: it is one number in English and another in German.
    """
    digits = text.translate(_SPACES)
    if _ENGLISH.fullmatch(digits):
        digits = digits.replace(",", "")
    elif _CONTINENTAL.fullmatch(digits):
        digits = digits.replace(".", "").replace(",", ".")
    number = parse_value(digits)
    return None if isinstance(number, str | bool) else number


def parse_price(text: str) -> tuple[int | float, str] | None:
    """Returns the amount and the currency of `12.50 EUR`; the currency is empty if it is not given."""
    found = _PRICE.fullmatch(text)
    amount = parse_number(found[2]) if found else None
    if found is None or amount is None or (found[1] and found[3]):
        return None
    currency = found[1] or found[3] or ""
    return amount, _SYMBOLS.get(currency, currency.upper())


def parse_date(text: str) -> str:
    """Returns a date as ISO text, and a time in UTC, which it is without an offset; anything else as it is."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return text
    if len(text.strip()) <= len("2026-03-01"):
        return moment.date().isoformat()
    return f"{(moment.astimezone(UTC) if moment.tzinfo else moment).replace(tzinfo=None).isoformat()}Z"


def split_list(text: str, delimiter: str = ",") -> list[str]:
    """Returns the values of a list, of which each may be quoted."""
    line = " ".join(text.split())
    return distinct(next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), []))


def split_places(text: str) -> list[str]:
    """Returns the addresses or paths of a list; an address may contain commas."""
    return distinct(_NEXT_URL.split(text)) if "://" in text else split_list(text)


def distinct(values: Iterable[str]) -> list[str]:
    """Returns the values that are not blank, each once."""
    return list(dict.fromkeys(stripped for value in values if (stripped := value.strip())))


def one_or_all(values: list[str]) -> str | list[str]:
    """Returns the value if there is one, or the list."""
    return values[0] if len(values) == 1 else values


def plain_name(text: str) -> str:
    """Returns the name of an attribute: `Weight (kg)` becomes `weight_kg`."""
    return re.sub(r"\W+", "_", text.strip().lower()).strip("_")


FIELDS = frozenset({"item_id", "image", "image_id", "title", "url", "attributes", EXPIRES_AT})
"""Names that are not free for attributes."""


def add_attribute(values: dict[str, Any], name: str, value: Any, *, prefix: str, taken: frozenset[str]) -> None:
    """Adds an attribute that the shop named; with the prefix if the feed has another meaning for its name."""
    key = plain_name(name)
    if key in FIELDS or key in taken:
        key = f"{prefix}_{key}"
    if key and value not in ("", [], None):
        values[key] = value
