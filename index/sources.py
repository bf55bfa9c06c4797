"""Sources: what a shop hands in to be indexed, as a stream of items with the places of their photos."""

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from index.errors import LookalikeError
from index.images import FORMATS
from index.items import MAX_INTEGER, Attribute, Item

_INTEGER = re.compile(r"[+-]?\d+")
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"}
_REQUIRED = ("item_id", "image")
_OWN = (*_REQUIRED, "image_id", "title", "url")


class SourceImage(NamedTuple):
    """A photo to index: where it lies, and the item that it shows."""

    item: Item
    image_id: str
    path: Path


def read_source(source: Path) -> list[SourceImage]:
    """Photos of a CSV table (item_id, image, then attributes) or of a folder with one folder an item."""
    if source.is_dir():
        images = _read_folder(source)
    elif source.is_file():
        images = list(_read_csv(source))
    else:
        raise LookalikeError(f"No source at {source}.", "Name a CSV file or a folder with one folder an item.")
    if not images:
        known = ", ".join(FORMATS)
        raise LookalikeError(
            f"{source} names no images.", f"Expected {known} files in one folder an item, or CSV rows."
        )
    return images


def _read_folder(folder: Path) -> list[SourceImage]:
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in IMAGE_SUFFIXES)
    return [SourceImage(Item(id=path.parent.name, title=path.parent.name), path.name, path) for path in paths]


def _read_csv(table: Path) -> Iterator[SourceImage]:
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        found = rows.fieldnames or []
        missing = [column for column in _REQUIRED if column not in found]
        if missing:
            raise LookalikeError(
                f"{table} has no column {' and no '.join(map(repr, missing))}; it has {', '.join(found) or 'none'}.",
                "Give the item's id and the image's path in columns `item_id` and `image`.",
            )
        for row in rows:
            if None in row or not row["item_id"] or not row["image"]:
                raise LookalikeError(
                    f"{table}, line {rows.line_num}: a row needs `item_id`, `image` and at most {len(found)} fields.",
                    "Mend the row.",
                )
            attributes = {key: _typed(value) for key, value in row.items() if key not in _OWN and value}
            try:
                item = Item(
                    id=row["item_id"], title=row.get("title") or "", url=row.get("url") or "", attributes=attributes
                )
            except ValidationError as error:
                fault = error.errors()[0]
                where = ".".join(map(str, fault["loc"]))
                raise LookalikeError(
                    f"{table}, line {rows.line_num}, {where}: {fault['msg']}.", "Mend the row."
                ) from None
            yield SourceImage(item, row.get("image_id") or row["image"], table.parent / row["image"])


def _typed(text: str) -> Attribute:
    """Numbers become numbers, so that a price can be compared; all else, and what is none that can be, stays text."""
    try:
        number = int(text) if _INTEGER.fullmatch(text) else float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) and abs(number) <= MAX_INTEGER and "_" not in text else text
