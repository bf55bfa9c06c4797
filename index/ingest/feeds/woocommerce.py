"""Product exports of WooCommerce: a line per product or variation, which names its parent by SKU or id."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from index.errors import LookalikeError
from index.ingest.feeds.cells import add_attribute, distinct, one_or_all, parse_date, parse_number
from index.ingest.feeds.delimited import check_width, read_header, read_lines
from index.ingest.feeds.groups import GROUP, Group, GroupLine, Variant, group_lines, variant_rows
from index.ingest.tables import Row, Table, count, parse_value

_NUMBERS = {"regular price": "price", "sale price": "sale_price", "stock": "stock"}
_DATES = {"date sale price starts": "sale_starts", "date sale price ends": "sale_ends"}
_LISTS = {"categories": "categories", "tags": "tags", "brands": "brand"}
_TEXTS = {"sku": "sku", "gtin, upc, ean, or isbn": "gtin"}
_ATTRIBUTE = re.compile(r"attribute (\d+) name")
_LEFT_OUT = re.compile(
    r"(short )?description|id|type|name|published|visibility in catalog|in stock\?|images|parent|external url|position"
    r"|tax (status|class)|low stock amount|backorders allowed\?|sold individually\?|allow customer reviews\?"
    r"|purchase note|shipping class|download .*|grouped products|upsells|cross-sells|button text|cost of goods.*"
    r"|attribute \d+ .*|meta: .*|is featured\?|swatches attributes"
)
_TAKEN = frozenset(
    {*_NUMBERS.values(), *_DATES.values(), *_LISTS.values(), *_TEXTS.values(), GROUP, "availability", "featured"}
)
_AVAILABILITY = {"1": "in_stock", "0": "out_of_stock", "backorder": "backorder"}
_COMMA = re.compile(r"(?<!\\),")


def is_header(columns: Sequence[str]) -> bool:
    """Whether these are the columns of an export."""
    lowered = {column.lower() for column in columns}
    return {"type", "name", "images"} <= lowered and bool({"sku", "id"} & lowered)


def read_export(file: Path, title: str) -> Table:
    """Opens an export as a table of items; what is not published is left out."""
    header = read_header(file)
    if not is_header(header.columns):
        raise LookalikeError(
            f"{title} has no columns 'ID', 'Type', 'Name' and 'Images'; "
            f"it has {', '.join(header.columns)[:300] or 'none'}.",
            "Export with the column names in English, or give another format with --format.",
        )
    notes: list[str] = []
    return Table(None, _rows(file, title, header.delimiter, notes), notes=notes)


def _rows(file: Path, title: str, delimiter: str, notes: list[str]) -> Iterator[Row]:
    hidden = 0
    for group in group_lines(_lines(file, title, delimiter)):
        if isinstance(group, Row):
            yield group
        elif _is_hidden(group[0][1]):
            hidden += 1
        else:
            yield from _product_rows(group)
    if hidden:
        notes.append(f"{title}: {count(hidden, 'product')} private, hidden or drafts: left out.")


def _lines(file: Path, title: str, delimiter: str) -> Iterator[GroupLine]:
    lines = read_lines(file, title, delimiter)
    columns = [column.strip() for column in next(lines).fields]
    columns = [column if _is_own(column) else column.lower() for column in columns]
    for line in lines:
        values = {name: _unescape(field.strip()) for name, field in zip(columns, line.fields, strict=False)}
        if problem := check_width(line, len(columns)) or ("" if _item_id(values) else "no value for 'ID' and 'SKU'"):
            yield GroupLine(line.where, {}, problem=problem)
        elif _is_variation(values):
            yield GroupLine(line.where, values, parent=values.get("parent", ""))
        else:
            names = [f"id:{values['id']}"] if values.get("id") else []
            yield GroupLine(line.where, values, [*names, *filter(None, [values.get("sku")])])


def _is_own(column: str) -> bool:
    """Whether a column is of the shop or an extension, whose name is kept as written."""
    lowered = column.lower()
    return not any(lowered in known for known in (_NUMBERS, _DATES, _LISTS, _TEXTS)) and not _LEFT_OUT.fullmatch(
        lowered
    )


def _unescape(field: str) -> str:
    """Removes the quote that WooCommerce writes before what a spreadsheet would run."""
    return field[1:] if re.match(r"'[=+\-@]", field) else field


def _item_id(values: dict[str, str]) -> str:
    return values.get("id") or values.get("sku", "")


def _is_variation(values: dict[str, str]) -> bool:
    return "variation" in values.get("type", "").lower().replace(" ", "").split(",")


def _is_hidden(values: dict[str, str]) -> bool:
    return values.get("published", "1") in ("0", "-1") or values.get("visibility in catalog", "").lower() == "hidden"


def _product_rows(group: Group) -> Iterator[Row]:
    where, first = group[0]
    if _is_variation(first):
        # Its parent is not in the export: it is an item if it has a photo of its own.
        orphan = _to_item(where, first, {})
        parent = orphan._replace(item_id=first.get("parent", "").removeprefix("id:") or orphan.item_id, photos=[])
        yield from variant_rows(parent, [orphan])
        return
    product = _to_item(where, first, {})
    variants = [
        _to_item(place, values, product.attributes, product.title)
        for place, values in group[1:]
        if not _is_hidden(values)
    ]
    yield from variant_rows(product, variants)


def _to_item(where: str, values: dict[str, str], inherited: dict[str, Any], title: str = "") -> Variant:
    url = values.get("external url", "")
    return Variant(
        where,
        _item_id(values),
        values.get("name") or title,
        url,
        _split(values.get("images", "")),
        {**inherited, **_attributes(values)},
    )


def _split(text: str) -> list[str]:
    """Returns the values of a list, whose own commas WooCommerce writes as `\\,`."""
    return distinct(part.replace("\\,", ",") for part in _COMMA.split(text))


def _attributes(values: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, value in values.items():
        if not value or (value == "parent" and column == "stock"):
            continue
        if column in _NUMBERS:
            number = parse_number(value)
            found[_NUMBERS[column]] = value if number is None else number
        elif column in _DATES:
            found[_DATES[column]] = parse_date(value)
        elif column in _LISTS:
            found[_LISTS[column]] = _split(value)
        elif column in _TEXTS:
            found[_TEXTS[column]] = value
        elif not _LEFT_OUT.fullmatch(column.lower()):
            add_attribute(found, column, parse_value(value), prefix="column", taken=_TAKEN)
    if available := _AVAILABILITY.get(values.get("in stock?", "")):
        found["availability"] = available
    if "is featured?" in values and not _is_variation(values):
        found["featured"] = values["is featured?"] == "1"
    for column in values:
        if match := _ATTRIBUTE.fullmatch(column):
            listed = _split(values.get(f"attribute {match[1]} value(s)", ""))
            add_attribute(found, values[column], one_or_all(listed), prefix="attribute", taken=_TAKEN)
    return found
