"""Groups: the lines of a feed that belong to one product, and the items that its variants become."""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from index.ingest.tables import Row

GROUP = "item_group_id"
"""The attribute that the variants of a product share."""
_MAX_LINES = 10_000
"""Lines of one group that are held in memory."""
_TOO_MANY = f"more than {_MAX_LINES:,} lines of one product"


Group = list[tuple[str, dict[str, str]]]
"""The places and the values of the lines of one product: the one that the others belong to, then in their order."""


class GroupLine(NamedTuple):
    """A line with what it can be called by, and the name of the line that it belongs to; or the problem with it."""

    where: str
    values: dict[str, str]
    names: Sequence[str] = ()
    parent: str = ""
    problem: str = ""


def group_lines(lines: Iterable[GroupLine]) -> Iterator[Group | Row]:
    """Yields the lines of each product, wherever in the feed they are, and bad lines as rows.

    The lines are kept in a temporary SQLite database: a feed may be larger than memory.
    """
    with closing(sqlite3.connect("", isolation_level=None, check_same_thread=False)) as db:
        # The text comes last, and the order is found without it: it is read once, when its group is.
        db.execute("CREATE TABLE lines (number INTEGER PRIMARY KEY, parent TEXT, place TEXT, problem TEXT, line TEXT)")
        db.execute("CREATE TABLE names (name TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID")
        db.execute("BEGIN")
        for number, (where, values, names, parent, problem) in enumerate(lines):
            db.execute("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", (number, parent, where, problem, _pack(values)))
            db.executemany("INSERT OR IGNORE INTO names VALUES (?, ?)", [(name, number) for name in names])
        db.execute(
            "CREATE TABLE places AS SELECT coalesce(names.number, lines.number) AS first, lines.number AS number "
            "FROM lines LEFT JOIN names ON name = parent ORDER BY first, lines.number <> first, lines.number"
        )
        ordered = db.execute(
            "SELECT first, place, line, problem FROM places CROSS JOIN lines ON lines.number = places.number "
            "ORDER BY places.rowid"
        )
        for _, rows in groupby(ordered, key=itemgetter(0)):
            group: Group = []
            for _, place, line, problem in rows:
                if problem or len(group) == _MAX_LINES:
                    yield Row(place, json.loads(line) if problem else {}, problem or _TOO_MANY)
                else:
                    group.append((place, json.loads(line)))
            if group:
                yield group


def _pack(values: dict[str, str]) -> str:
    return json.dumps({name: value for name, value in values.items() if value})


class Variant(NamedTuple):
    """A product, or one of its variants, as an item."""

    where: str
    item_id: str
    title: str
    url: str
    photos: list[str]
    attributes: dict[str, Any]


def variant_rows(product: Variant, variants: Sequence[Variant]) -> Iterator[Row]:
    """Yields an item for each variant, with its own photos or else all of the product's.

    The product is an item too, if it has no variants or photos that no variant has.
    """
    taken: set[str] = set()
    for variant in variants:
        photos = variant.photos or product.photos
        if len(variants) == 1:
            photos = list(dict.fromkeys([*variant.photos, *product.photos]))
        taken.update(photos)
        yield _row(variant._replace(photos=photos), product.item_id)
    left = [photo for photo in product.photos if photo not in taken]
    if left or not variants:
        yield _row(product._replace(photos=left), product.item_id)


def _row(item: Variant, group: str) -> Row:
    values = {
        **item.attributes,
        GROUP: group,
        "item_id": item.item_id,
        "image": item.photos,
        "title": item.title or None,
        "url": item.url or None,
    }
    return Row(item.where, values, "" if item.photos else "no photo, and no product with one")
