"""Feeds of Google Merchant Center: RSS and Atom with its namespace, and texts separated by tabs or commas."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from index.errors import LookalikeError
from index.ingest.feeds.cells import (
    FIELDS,
    add_attribute,
    distinct,
    one_or_all,
    parse_date,
    parse_price,
    split_list,
    split_places,
)
from index.ingest.feeds.delimited import check_width, read_header, read_lines
from index.ingest.feeds.xml_feed import read_entries
from index.ingest.tables import Row, Table, parse_value
from index.items import EXPIRES_AT

_PRICES = ("price", "sale_price", "maximum_retail_price")
_LISTS = frozenset(
    {"product_type", "product_highlight", "promotion_id", "included_destination", "excluded_destination", "gtin"}
)
_BY_SLASH = ("color", "material")
_DATES = {"availability_date": "availability_date", "disclosure_date": "disclosure_date", "expiration_date": EXPIRES_AT}
_SWITCHES = ("adult", "is_bundle", "identifier_exists")
_TEXTS = frozenset(
    {
        *("brand", "mpn", "size", "pattern", "gender", "age_group", "item_group_id", "google_product_category"),
        *(
            "custom_label_0",
            "custom_label_1",
            "custom_label_2",
            "custom_label_3",
            "custom_label_4",
            "external_seller_id",
        ),
        *("condition", "size_system", "size_type"),
    }
)
_LEFT_OUT = frozenset(
    {
        # Long texts, and what is for machines, other countries or nobody outside the shop.
        *("description", "summary", "content", "structured_title", "structured_description", "short_title"),
        *("mobile_link", "ads_redirect", "canonical_link", "link_template", "mobile_link_template", "checkout_link"),
        *("lifestyle_image_link", "virtual_model_link", "video_link"),
        *("cost_of_goods_sold", "auto_pricing_min_price", "pause", "updated", "published", "author", "category"),
        *("shipping", "tax", "tax_category", "installment", "subscription_cost", "loyalty_points", "loyalty_program"),
        *("free_shipping_threshold", "carrier_shipping", "certification", "product_detail", "guid", "pubDate"),
    }
)
_FIRST = {"id": "item_id", "title": "title", "link": "url"}
_PHOTOS = ("image_link", "additional_image_link")
_EARLIER = frozenset({"currency", "sale_starts", "sale_ends", "availability"})


def is_header(columns: Sequence[str]) -> bool:
    """Whether these are the columns of a feed."""
    return {"id", "image_link"} <= {_column_name(column) for column in columns}


def read_feed(file: Path, title: str) -> Table:
    """Opens a feed as a table of items."""
    header = read_header(file)
    if header.text.startswith("<"):
        return Table(None, _entry_rows(file, title))
    if not is_header(header.columns):
        raise LookalikeError(
            f"{title} has no columns 'id' and 'image_link'; it has {', '.join(header.columns)[:300] or 'none'}.",
            "Give a feed of Google Merchant Center, or its format with --format.",
        )
    return Table(None, _line_rows(file, title, header.delimiter))


def _entry_rows(file: Path, title: str) -> Iterator[Row]:
    for entry in read_entries(file, title):
        yield _to_row(f"line {entry.line}", entry.values, entry.problem)


def _line_rows(file: Path, title: str, delimiter: str) -> Iterator[Row]:
    lines = read_lines(file, title, delimiter)
    columns = [_column_name(column) for column in next(lines).fields]
    for line in lines:
        if problem := check_width(line, len(columns), may_be_shorter=True):
            yield Row(line.where, {}, problem)
            continue
        values: dict[str, list[str]] = {}
        for name, field in zip(columns, line.fields, strict=False):
            if text := field.strip():
                values.setdefault(name, []).extend(split_list(text) if name in _LISTS else [text])
        yield _to_row(line.where, values, "")


def _column_name(column: str) -> str:
    """Returns `image_link` for `Image link` and `g:image_link`."""
    return column.strip().lower().removeprefix("g:").replace(" ", "_")


def _to_row(where: str, values: dict[str, list[str]], problem: str) -> Row:
    found: dict[str, Any] = {field: values[name][0] for name, field in _FIRST.items() if name in values}
    found["image"] = distinct(
        place for name in _PHOTOS for text in values.get(name, []) for place in split_places(text)
    )
    if problem or "item_id" not in found or not found["image"]:
        return Row(where, found, problem or f"no value for {'id' if 'item_id' not in found else 'image_link'!r}")
    try:
        _add_prices(found, values)
    except ValueError as error:
        return Row(where, found, str(error))
    _add_dates(found, values)
    if "availability" in values:
        found["availability"] = values["availability"][0].lower().replace(" ", "_")
    done = {*_FIRST, *_PHOTOS, *_PRICES, *_DATES, *_LEFT_OUT, "sale_price_effective_date", "availability"}
    for name, texts in values.items():
        if name not in done and "(" not in name:
            _add(found, name, texts)
    return Row(where, found)


def _add(found: dict[str, Any], name: str, texts: list[str]) -> None:
    """Adds an attribute with the type that the specification gives it."""
    value: Any = texts[0]
    if name in _LISTS:
        value = texts
    elif name in _BY_SLASH:
        value = one_or_all(distinct(part for text in texts for part in text.split("/")))
    elif name in _SWITCHES and value.lower() in ("yes", "no", "true", "false"):
        value = value.lower() in ("yes", "true")
    elif name not in _TEXTS:
        typed = [parse_value(text) for text in texts]
        value = typed[0] if len(typed) == 1 else typed
    if name in FIELDS or name in _EARLIER:
        add_attribute(found, name, value, prefix="feed", taken=_EARLIER)
    else:
        found[name] = value


def _add_prices(found: dict[str, Any], values: dict[str, list[str]]) -> None:
    """Adds the prices as numbers, and their currency; a price that cannot be read stays a text, and is reported."""
    for name in _PRICES:
        if name not in values:
            continue
        parsed = parse_price(values[name][0])
        if parsed is None:
            found[name] = values[name][0]
            continue
        found[name], currency = parsed
        if currency and found.setdefault("currency", currency) != currency:
            raise ValueError(f"{name} is in {currency}, but another price in {found['currency']}")


def _add_dates(found: dict[str, Any], values: dict[str, list[str]]) -> None:
    found |= {name: parse_date(values[given][0]) for given, name in _DATES.items() if given in values}
    if "sale_price_effective_date" in values:
        starts, _, ends = values["sale_price_effective_date"][0].partition("/")
        found.update({name: parse_date(text) for name, text in (("sale_starts", starts), ("sale_ends", ends)) if text})
