"""Product exports of Shopify: a line per variant or photo, and lines of one handle are one product."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from index.errors import LookalikeError
from index.ingest.feeds.cells import add_attribute, distinct, one_or_all, parse_number, plain_name, split_list
from index.ingest.feeds.delimited import check_width, read_header, read_lines
from index.ingest.feeds.groups import GROUP, Group, GroupLine, Variant, group_lines, variant_rows
from index.ingest.tables import Row, Table, count, parse_value

_COLUMNS = {
    **dict.fromkeys(("handle", "url handle"), "handle"),
    **dict.fromkeys(("published", "published on online store"), "published"),
    **dict.fromkeys(("image src", "product image url", "image source"), "photo"),
    **dict.fromkeys(("variant image", "variant image url"), "variant_photo"),
    **dict.fromkeys(("variant sku", "sku"), "sku"),
    **dict.fromkeys(("variant barcode", "barcode"), "barcode"),
    **dict.fromkeys(("variant price", "price"), "price"),
    **dict.fromkeys(("variant compare at price", "variant compare-at price", "compare-at price"), "compare_at_price"),
    **dict.fromkeys(("variant inventory tracker", "inventory tracker"), "tracker"),
    **dict.fromkeys(("variant inventory qty", "inventory quantity"), "stock"),
    **dict.fromkeys(("variant inventory policy", "continue selling when out of stock"), "oversell"),
    **dict.fromkeys(("variant grams", "weight value (grams)"), "weight_grams"),
    **dict.fromkeys(("product category", "standard product type"), "product_category"),
    **dict.fromkeys(("type", "product type", "custom product type"), "product_type"),
    "image position": "position",
    "vendor": "brand",
    **{name: name.replace(" ", "_") for n in "123" for name in (f"option{n} name", f"option{n} value")},
    **{name: name for name in ("title", "tags", "status")},
}
_GOOGLE = re.compile(
    r"google shopping / (gender|age group|mpn|.*\(mpn\)|condition|google product category|custom label \d)"
)
_LEFT_OUT = re.compile(
    r"body \(html\)|description|seo .*|image alt text|gift card|cost per item|charge tax|(variant )?tax code"
    r"|variant (fulfillment service|requires shipping|taxable|weight unit)|requires shipping|fulfillment service"
    r"|weight unit for display|unit price .*|(included|price|compare at price) / .*|google shopping / .*"
    r"|option\d linked to"
)
_METAFIELD = re.compile(r"(.*)\(product\.metafields\.([^.]+)\.[^)]+\)")
_OF_VARIANTS = ("sku", "barcode", "price", "compare_at_price", "stock", "weight_grams", "availability")
_TAKEN = frozenset({*_OF_VARIANTS, "brand", "product_category", "product_type", "tags", GROUP})
_NUMBERS = ("price", "compare_at_price", "stock", "weight_grams")
_DEFAULT = ("Title", "Default Title")
"""The option of a product without variants."""


def is_header(columns: Sequence[str]) -> bool:
    """Whether these are the columns of an export, of today or as until 2025."""
    return {"handle", "photo"} <= {_COLUMNS.get(column.lower(), "") for column in columns}


def read_export(file: Path, title: str) -> Table:
    """Opens an export as a table of items; what is not published is left out."""
    header = read_header(file)
    if not is_header(header.columns):
        raise LookalikeError(
            f"{title} has no columns 'Handle' and 'Image Src'; it has {', '.join(header.columns)[:300] or 'none'}.",
            "Give a product export of Shopify, or its format with --format.",
        )
    notes: list[str] = []
    return Table(None, _rows(file, title, header.delimiter, notes), notes=notes)


def _rows(file: Path, title: str, delimiter: str, notes: list[str]) -> Iterator[Row]:
    hidden = 0
    for group in group_lines(_lines(file, title, delimiter)):
        if isinstance(group, Row):
            yield group
        elif _is_hidden(group):
            hidden += 1
        else:
            yield from _product_rows(group)
    if hidden:
        notes.append(f"{title}: {count(hidden, 'product')} not published, drafts or archived: left out.")


def _lines(file: Path, title: str, delimiter: str) -> Iterator[GroupLine]:
    lines = read_lines(file, title, delimiter)
    columns = [_known_name(column) for column in next(lines).fields]
    for line in lines:
        values = {name: field.strip() for name, field in zip(columns, line.fields, strict=False) if name}
        handle = values.get("handle", "")
        if problem := check_width(line, len(columns)) or ("" if handle else "no value for 'Handle'"):
            yield GroupLine(line.where, {}, problem=problem)
        else:
            yield GroupLine(line.where, values, [handle], handle)


def _known_name(column: str) -> str:
    """Returns the name of a column whatever the age of the export; empty if the column is left out."""
    lowered = column.strip().lower()
    if lowered in _COLUMNS:
        return _COLUMNS[lowered]
    if google := _GOOGLE.fullmatch(lowered):
        return "mpn" if "mpn" in google[1] else plain_name(google[1])
    return "" if _LEFT_OUT.fullmatch(lowered) else f"own:{column.strip()}"


def _is_hidden(group: Group) -> bool:
    values = [values for _, values in group]
    status, published = (_first(values, name).lower() for name in ("status", "published"))
    return status in ("draft", "archived", "unlisted") or published == "false"


def _first(lines: Iterable[dict[str, str]], name: str) -> str:
    return next((line[name] for line in lines if line.get(name)), "")


def _product_rows(group: Group) -> Iterator[Row]:
    where, first = group[0]
    lines = [values for _, values in group]
    handle = first["handle"]
    product = Variant(where, handle, _first(lines, "title"), "", _photos(lines), _shared_attributes(lines))
    names = [_first(lines, f"option{n}_name") for n in "123"]
    variants = [_variant(product, place, values, names) for place, values in group if _is_variant(values)]
    yield from variant_rows(product, variants)


def _is_variant(values: dict[str, str]) -> bool:
    return any(values.get(name) for name in ("option1_value", "price", "sku"))


def _photos(lines: Iterable[dict[str, str]]) -> list[str]:
    """Returns the photos of a product by their positions."""
    placed = [(parse_number(line.get("position", "")) or 0, line["photo"]) for line in lines if line.get("photo")]
    return distinct(photo for _, photo in sorted(placed, key=lambda pair: pair[0]))


def _shared_attributes(lines: list[dict[str, str]]) -> dict[str, Any]:
    """Returns the attributes of the product, which only its first line has."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        value = _first(lines, name)
        if not value or name in _COLUMNS.values():
            continue
        if name.startswith("own:"):
            _add_own(found, name.removeprefix("own:"), value)
        else:
            found[name] = value
    found |= {name: value for name in ("brand", "product_category", "product_type") if (value := _first(lines, name))}
    if tags := split_list(_first(lines, "tags")):
        found["tags"] = tags
    return found


def _add_own(found: dict[str, Any], column: str, value: str) -> None:
    """Adds a metafield or a column of the shop; Shopify's own metafields are lists."""
    if field := _METAFIELD.fullmatch(column):
        listed = one_or_all(split_list(value, ";")) if field[2] == "shopify" else parse_value(value)
        add_attribute(found, field[1], listed, prefix="metafield", taken=_TAKEN)
    else:
        add_attribute(found, column, parse_value(value), prefix="column", taken=_TAKEN)


def _variant(product: Variant, where: str, values: dict[str, str], names: list[str]) -> Variant:
    pairs = [(name, values.get(f"option{n}_value", "")) for n, name in zip("123", names, strict=True)]
    options = [(name, value) for name, value in pairs if value and (name, value) != _DEFAULT]
    found = dict(product.attributes)
    for name in _OF_VARIANTS:
        if value := values.get(name):
            number = parse_number(value) if name in _NUMBERS else None
            found[name] = value if number is None else number
    if available := _availability(values):
        found["availability"] = available
    for name, value in options:
        add_attribute(found, name or "option", value, prefix="option", taken=_TAKEN)
    item_id = "/".join([product.item_id, *(value for _, value in options)])
    return Variant(where, item_id, product.title, "", distinct([values.get("variant_photo", "")]), found)


def _availability(values: dict[str, str]) -> str:
    """Returns the availability; empty if the export has no stock, as with several locations."""
    stock = parse_number(values.get("stock", ""))
    if not values.get("tracker"):
        return "in_stock"
    if stock is None:
        return ""
    if stock > 0:
        return "in_stock"
    return "backorder" if values.get("oversell", "").lower() in ("continue", "true") else "out_of_stock"
