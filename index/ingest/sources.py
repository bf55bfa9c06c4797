"""Sources: reads tables and folders as a stream of items with the places of their photos."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from index.embedding.images import DEFAULT_LIMITS, ImageLimits
from index.errors import LookalikeError
from index.ingest.remote_files import FileReader, file_name, local_path, parent_folder, resolve_place, url_scheme
from index.ingest.tables import Row, open_table, parse_cell, to_attribute
from index.items import MAX_ID_LENGTH, Item

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".heif", ".gif", ".bmp"}
_REQUIRED = ("item_id", "image")
_FIELDS = (*_REQUIRED, "image_id", "title", "url")
_MAX_REPORTED = 10
"""Bad rows that one message lists."""
_MAPPING = "map a column with another name, such as item_id=sku"


class SourceImage(NamedTuple):
    """A photo to index: its item, its id, and its path or address."""

    item: Item
    image_id: str
    place: str


class SourceSummary(NamedTuple):
    """The size of a source."""

    tables: int
    rows: int
    """Rows of the tables; a folder has none."""
    images: int


class _BadRow(NamedTuple):
    where: str
    problem: str


class _Entry(NamedTuple):
    """A row of a table or a folder of photos."""

    names: frozenset[str]
    """The columns that may become attributes."""
    images: list[SourceImage]


class Source:
    """Tables of items, and folders with one folder per item, read as a stream that can be repeated.

    Remote tables are copied once, so that a job of hours neither holds a connection open nor sees a table change.
    """

    def __init__(
        self,
        addresses: Sequence[str | Path],
        *,
        columns: Mapping[str, str] = {},
        attributes: Sequence[str] | None = None,
        images: str | None = None,
    ) -> None:
        if unknown := sorted(set(columns) - set(_FIELDS)):
            raise LookalikeError(f"There is no field {unknown[0]!r} to map a column to.", f"Use {', '.join(_FIELDS)}.")
        self._addresses = [str(address) for address in addresses]
        self._columns = {name: columns.get(name, name) for name in _FIELDS}
        self._mapped = set(columns)
        self._attributes = None if attributes is None else frozenset(attributes)
        self._images = images
        self._files = FileReader()
        self._copies: dict[str, Path] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def name(self) -> str:
        """The addresses, as shown in the job's record."""
        return ", ".join(self._addresses)

    def check(self) -> SourceSummary:
        """Counts the images without opening them; raises LookalikeError with the first bad rows if there are any."""
        tables = rows = images = 0
        names: set[str] = set()
        schemes: set[str] = set()
        bad: list[_BadRow] = []
        for place in self._matching():
            is_table = not _is_folder(place)
            tables += is_table
            for entry in self._entries(place):
                rows += is_table
                if isinstance(entry, _BadRow):
                    bad.append(entry)
                    if len(bad) == _MAX_REPORTED:
                        raise _rows_error(bad)
                else:
                    images += len(entry.images)
                    names |= entry.names
                    schemes |= {url_scheme(image.place) for image in entry.images}
        if bad:
            raise _rows_error(bad)
        if not images:
            raise LookalikeError(
                f"{self.name} has no images.", "Give tables with rows, or a folder with one folder per item."
            )
        if missing := sorted((self._attributes or frozenset()) - names):
            raise LookalikeError(
                f"No row has an attribute {missing[0]!r}; there are {', '.join(sorted(names)) or 'none'}.",
                "Correct the list of attributes to keep.",
            )
        for scheme in sorted(schemes - {""}):
            self._files.filesystem(scheme)
        return SourceSummary(tables, rows, images)

    def __iter__(self) -> Iterator[SourceImage]:
        for place in self._matching():
            for entry in self._entries(place):
                if isinstance(entry, _BadRow):
                    raise _rows_error([entry])
                yield from entry.images

    def read(self, place: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
        """Returns the bytes of an image; raises ImageError. Threads may call it concurrently."""
        return self._files.read(place, limits)

    def _matching(self) -> Iterator[str]:
        for address in self._addresses:
            yield from self._files.matching(address)

    def _entries(self, place: str) -> Iterator[_Entry | _BadRow]:
        if _is_folder(place):
            yield from _folder_entries(local_path(place))
            return
        table = open_table(self._local_copy(place), file_name(place), place)
        if table.columns is not None:
            self._check_columns(place, table.columns)
        is_text = file_name(place).lower().removesuffix(".gz").endswith(".csv")
        for row in table.rows:
            try:
                yield self._entry(row, self._images or parent_folder(place), is_text)
            except ValueError as error:
                yield _BadRow(f"{place}, {row.where}", _problem(error))

    def _local_copy(self, place: str) -> Path:
        """Returns the path of a table on this machine, copied there the first time if it is remote."""
        if not url_scheme(place):
            return local_path(place)
        if place not in self._copies:
            self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="lookalike-tables-")
            copy = Path(self._scratch.name) / str(len(self._copies))
            self._files.copy(place, copy)
            self._copies[place] = copy
        return self._copies[place]

    def _check_columns(self, place: str, found: list[str]) -> None:
        wanted = [self._columns[name] for name in _FIELDS if name in _REQUIRED or name in self._mapped]
        if missing := [column for column in wanted if column not in found]:
            raise LookalikeError(
                f"{place} has no column {' and no '.join(map(repr, missing))}; it has {', '.join(found) or 'none'}.",
                f"Give columns `item_id` and `image`, or {_MAPPING}.",
            )

    def _entry(self, row: Row, folder: str, is_text: bool) -> _Entry:
        """Returns the images of a row; raises ValueError with the problem of a bad one."""
        if row.problem:
            raise ValueError(row.problem)
        own = {name: row.values[column] for name, column in self._columns.items() if row.values.get(column) is not None}
        if missing := [self._columns[name] for name in _REQUIRED if name not in own]:
            has = ", ".join(name for name, value in row.values.items() if value is not None) or "nothing"
            raise ValueError(f"no value for {' and '.join(map(repr, missing))}, only for {has}")
        others = _attribute_columns(row.values, set(self._columns.values()))
        kept = {
            name: value
            for name, value in others.items()
            if value is not None and (self._attributes is None or name in self._attributes)
        }
        item = Item(
            id=_text("item_id", own["item_id"]),
            title=_text("title", own.get("title", "")),
            url=_text("url", own.get("url", "")),
            attributes={name: parse_cell(value) for name, value in kept.items()}
            if is_text
            else _typed_attributes(kept),
        )
        values, ids = _images(own["image"], own.get("image_id"))
        found = [
            SourceImage(item, image_id, resolve_place(folder, value))
            for value, image_id in zip(values, ids, strict=True)
        ]
        return _Entry(frozenset(others), found)


def _is_folder(place: str) -> bool:
    return not url_scheme(place) and local_path(place).is_dir()


def _folder_entries(folder: Path) -> Iterator[_Entry | _BadRow]:
    for within in sorted(path for path in folder.iterdir() if path.is_dir()):
        photos = sorted(path for path in within.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        try:
            item = Item(id=within.name, title=within.name)
            images = [SourceImage(item, _image_id(photo.name), str(photo)) for photo in photos]
        except ValueError as error:
            yield _BadRow(repr(str(within)), _problem(error))
        else:
            yield _Entry(frozenset(), images)


def _problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"


def _rows_error(bad: list[_BadRow]) -> LookalikeError:
    problems = "; ".join(f"{where}: {problem}" for where, problem in bad)
    rows = "row" if len(bad) == 1 else "rows"
    more = f" (the first {_MAX_REPORTED})" if len(bad) == _MAX_REPORTED else ""
    return LookalikeError(f"{problems}{more}.", f"Correct the {rows}, or {_MAPPING}.")


def _attribute_columns(values: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    """Returns the columns that are not fields, with the object of a column `attributes` merged in."""
    others = {name: value for name, value in values.items() if name not in own}
    if isinstance(merged := others.get("attributes"), dict):
        del others["attributes"]
        if repeated := sorted(others.keys() & merged.keys()):
            raise ValueError(f"{repeated[0]!r} is both a column and in `attributes`")
        others |= merged
    return others


def _typed_attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attributes with the types of the table; Item rejects nested values."""
    return {name: found for name, value in values.items() if (found := to_attribute(value)) is not None}


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name}: {value!r} is not a text or a number")
    return str(value)


def _images(value: Any, image_id: Any) -> tuple[list[str], list[str]]:
    """Returns the values of the image column and their ids; default: the values as written."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(path, str) and path for path in values):
        raise ValueError(f"image: {value!r} is not a path or address, or a list of them")
    if image_id is None:
        ids = values
    else:
        ids = [_text("image_id", name) for name in (image_id if isinstance(image_id, list) else [image_id])]
    if len(ids) != len(values):
        raise ValueError(f"image_id: {len(ids)} for {len(values)} images")
    return values, [_image_id(name) for name in ids]


def _image_id(text: str) -> str:
    if not 0 < len(text) <= MAX_ID_LENGTH:
        raise ValueError(f"image_id: {text[:60]!r}… has {len(text)} characters, not 1 to {MAX_ID_LENGTH}")
    text.encode()  # raises ValueError for a name that is not valid Unicode and could not be stored
    return text
