"""The CSV of bulk imports of Google's Vision API Product Search: a reference image per line, without a header."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from index.embedding.images import Region
from index.ingest.feeds.cells import add_attribute, distinct
from index.ingest.feeds.delimited import Line, read_lines
from index.ingest.feeds.groups import Group, GroupLine, group_lines
from index.ingest.tables import Row, Table, parse_value

_COLUMNS = (
    *("image-uri", "image-id", "product-set-id", "product-id"),
    *("product-category", "product-display-name", "labels", "bounding-poly"),
)
_MIN_COLUMNS = 5
_TAKEN = frozenset({"product_sets", "product_category"})
_INTEGER = re.compile(r"\d{1,6}")


def is_first_line(fields: Sequence[str]) -> bool:
    """Whether this is a reference image, or the names of the columns, which some write above."""
    is_image = _MIN_COLUMNS <= len(fields) <= len(_COLUMNS) and fields[0].startswith("gs://")
    return is_image or tuple(fields[:4]) == _COLUMNS[:4]


def read_csv(file: Path, title: str) -> Table:
    """Opens a CSV as a table of items, one per product."""
    return Table(None, _rows(file, title))


def _rows(file: Path, title: str) -> Iterator[Row]:
    for group in group_lines(_lines(file, title)):
        yield group if isinstance(group, Row) else _product_row(group)


def _lines(file: Path, title: str) -> Iterator[GroupLine]:
    for line in read_lines(file, title, ","):
        values = dict(zip(_COLUMNS, (field.strip() for field in line.fields), strict=False))
        product = values.get("product-id", "")
        if values.get("image-uri") == _COLUMNS[0]:
            continue
        if problem := _find_problem(line, values):
            yield GroupLine(line.where, {"item_id": product}, problem=problem)
        else:
            yield GroupLine(line.where, values, [product], product)


def _find_problem(line: Line, values: dict[str, str]) -> str:
    if line.problem or len(line.fields) > len(_COLUMNS):
        return line.problem or f"{len(line.fields)} fields under {len(_COLUMNS)} columns"
    missing = [name for name in ("image-uri", "product-id") if not values.get(name)]
    if missing:
        return f"no value for {' and '.join(map(repr, missing))}"
    try:
        _parse_polygon(values.get("bounding-poly", ""))
        _parse_labels(values.get("labels", ""))
    except ValueError as error:
        return str(error)
    return ""


def _product_row(group: Group) -> Row:
    """Returns a product: its first line describes it, and all lines give its images and sets."""
    where, first = group[0]
    lines = [values for _, values in group]
    found: dict[str, Any] = {"item_id": first["product-id"], "title": first.get("product-display-name")}
    if sets := distinct(line.get("product-set-id", "") for line in lines):
        found["product_sets"] = sets
    if category := first.get("product-category"):
        found["product_category"] = category
    for name, texts in _parse_labels(first.get("labels", "")).items():
        typed = [parse_value(text) for text in texts]
        add_attribute(found, name, typed[0] if len(typed) == 1 else typed, prefix="label", taken=_TAKEN)
    images = dict.fromkeys(_image(line) for line in lines)
    found["image"] = [place for place, _, _ in images]
    found["image_id"] = [image_id for _, image_id, _ in images]
    return Row(where, found, regions=[region for _, _, region in images])


def _image(line: dict[str, str]) -> tuple[str, str, Region | None]:
    """Returns the place of an image, its id and its region; an image without an id is known by its address."""
    place, polygon = line["image-uri"], line.get("bounding-poly", "")
    return place, line.get("image-id") or (f"{place}#{polygon}" if polygon else place), _parse_polygon(polygon)


def _parse_labels(text: str) -> dict[str, list[str]]:
    """Returns the values of each label of `colour=red,colour=blue,season=summer`."""
    labels: dict[str, list[str]] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise ValueError(f"labels: {pair[:60]!r} is not of the form key=value")
        if value not in labels.setdefault(name, []):
            labels[name].append(value)
    return labels


def _parse_polygon(text: str) -> Region | None:
    """Returns the smallest box around a polygon `x1,y1,x2,y2,...`: integers are pixels, others shares of the sides."""
    if not text:
        return None
    texts = [part.strip() for part in text.split(",")]
    try:
        numbers = [float(part) for part in texts]
    except ValueError:
        raise ValueError(f"bounding-poly: {text[:60]!r} is not a list of numbers") from None
    in_pixels = all(map(_INTEGER.fullmatch, texts)) and max(numbers) > 1
    if len(numbers) < 4 or len(numbers) % 2:
        raise ValueError(f"bounding-poly: {len(numbers)} numbers are not two or more points")
    if not all(0 <= number <= (float("inf") if in_pixels else 1) for number in numbers):
        raise ValueError(f"bounding-poly: {text[:60]!r} is neither pixels nor shares from 0 to 1")
    left, top, right, bottom = min(numbers[::2]), min(numbers[1::2]), max(numbers[::2]), max(numbers[1::2])
    if left == right or top == bottom:
        raise ValueError(f"bounding-poly: {text[:60]!r} has no area")
    return Region(left, top, right, bottom, in_pixels)
