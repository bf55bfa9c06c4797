"""Sources: reads tables and folders as a stream of items with the places of their photos."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from pydantic import ValidationError

from index._util.validation import explain_errors, format_value
from index.embedding.images import DEFAULT_LIMITS, ImageLimits, Region
from index.errors import LookalikeError
from index.ingest.attribute_types import AttributeTypes
from index.ingest.feeds import open_catalogue
from index.ingest.folders import UNSUPPORTED_SUFFIXES, ProductFolder, product_folders
from index.ingest.options import SourceFormat
from index.ingest.places import (
    HTTP,
    OWN_FOLDER,
    AllowedPlaces,
    file_name,
    local_path,
    parent_folder,
    resolve_place,
    url_scheme,
)
from index.ingest.plugins import PLUGIN_TABLE, find_plugin
from index.ingest.remote_files import FileReader
from index.ingest.tables import Row, parse_cell, parse_value, split_cell, to_attribute
from index.items import EXPIRES_AT, MAX_ID_LENGTH, Item, check_expiry

_REQUIRED = ("item_id", "image")
_FIELDS = (*_REQUIRED, "image_id", "title", "url", EXPIRES_AT)
_MAX_REPORTED = 10
"""Bad rows that one message lists."""
_MAPPING = "map a column with another name, such as item_id=sku"


class SourceImage(NamedTuple):
    """A photo to index: its item, its id, and its path or address."""

    item: Item
    image_id: str
    place: str
    folder: str
    """The folder that it must be in, unless more is allowed."""
    region: Region | None = None
    """The part of the photo to index; default: all of it."""


class BadRow(NamedTuple):
    """A row of a table, or a folder, that cannot be read; the others can."""

    where: str
    problem: str
    item_id: str = ""
    """Empty if the row does not name its item."""


class SourceSummary(NamedTuple):
    """The size of a source, and what is wrong with it."""

    tables: int
    rows: int
    """Rows of the tables; a folder has none."""
    images: int
    bad_rows: int = 0
    first_bad: tuple[BadRow, ...] = ()
    warnings: tuple[str, ...] = ()


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
        lists: Mapping[str, str] = {},
        images: str | None = None,
        fallback_images: str | None = None,
        format: SourceFormat | None = None,
        mirrors: Mapping[str, str] = {},
        allowed: AllowedPlaces = OWN_FOLDER,
    ) -> None:
        """`lists` maps attributes to the separator of their values.

        Image paths are relative to `images`; default: the folder of their table, then `fallback_images`. `mirrors` are
        folders with copies of the photos whose addresses begin with their keys. Without a `format`, the content
        decides.
        """
        if unknown := sorted(set(columns) - set(_FIELDS)):
            raise LookalikeError(f"There is no field {unknown[0]!r} to map a column to.", f"Use {', '.join(_FIELDS)}.")
        self._addresses = [str(address) for address in addresses]
        self._columns = {name: columns.get(name, name) for name in _FIELDS}
        self._mapped = set(columns)
        self._attributes = None if attributes is None else frozenset(attributes)
        self._lists = lists
        self._images = images
        self._fallback_images = fallback_images
        self._format: SourceFormat | None = format
        self._mirrors = dict(mirrors)
        self.allowed = allowed
        self._files = FileReader(allowed)
        self._copies: dict[str, Path] = {}
        self._notes: list[str] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def name(self) -> str:
        """The addresses, as shown in the job's record."""
        return ", ".join(self._addresses)

    def check(self) -> SourceSummary:
        """Counts the images and the bad rows without opening an image; raises LookalikeError if no row is good."""
        tables = rows = images = bad_rows = 0
        names: set[str] = set()
        schemes: set[str] = set()
        types = AttributeTypes()
        first_bad: list[BadRow] = []
        self._notes.clear()
        for place in self.places():
            is_table = not _is_folder(place)
            tables += is_table
            for entry in self._entries(place):
                rows += is_table
                if isinstance(entry, BadRow):
                    bad_rows += 1
                    first_bad += [entry] if bad_rows <= _MAX_REPORTED else []
                    continue
                images += len(entry.images)
                names |= entry.names
                types.add(entry.images[0].item.attributes if entry.images else {})
                schemes |= {
                    url_scheme(image.place)
                    for image in entry.images
                    if url_scheme(image.place) and self.allowed.permits(image.place, image.folder)
                }
        summary = SourceSummary(tables, rows, images, bad_rows, tuple(first_bad), (*self._notes, *types.warnings()))
        self._check_content(summary, names)
        for scheme in sorted(schemes):
            self._files.filesystem(scheme)
        return summary

    def _check_content(self, summary: SourceSummary, names: set[str]) -> None:
        if not summary.images and summary.bad_rows:
            raise rows_error(summary)
        if not summary.images:
            raise LookalikeError(
                f"{self.name} has no images of items.",
                "Give tables with rows, or a folder with one folder per item, as in photos/mug-01/front.jpg.",
            )
        for wanted, remedy in (
            (self._attributes or frozenset(), "Correct the list of attributes to keep."),
            (self._lists.keys(), "Correct the attributes whose values are separated."),
        ):
            if missing := sorted(wanted - names):
                known = ", ".join(sorted(names)) or "none"
                raise LookalikeError(f"No row has an attribute {missing[0]!r}; there are {known}.", remedy)

    def __iter__(self) -> Iterator[SourceImage]:
        return (row for row in self.rows() if isinstance(row, SourceImage))

    def rows(self) -> Iterator[SourceImage | BadRow]:
        """Yields the images, and the rows that cannot be read."""
        for place in self.places():
            for entry in self._entries(place):
                yield from [entry] if isinstance(entry, BadRow) else entry.images

    def read(self, image: SourceImage, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
        """Returns the bytes of an image; raises ImageError. Threads may call it concurrently."""
        return self._files.read(image.place, image.folder, limits)

    def places(self) -> Iterator[str]:
        """Yields the tables, folders and plug-ins that the addresses name."""
        for address in self._addresses:
            yield from [address] if find_plugin(address) else self._files.matching(address)

    def _entries(self, place: str) -> Iterator[_Entry | BadRow]:
        if _is_folder(place):
            yield from self._folder_entries(local_path(place))
            return
        plugin = find_plugin(place)
        name = PLUGIN_TABLE if plugin else file_name(place)
        required = [[self._columns[field]] for field in _REQUIRED]
        kind = "table" if plugin else self._format
        table = open_catalogue(self._local_copy(place), name, place, kind, columns=required)
        if table.columns is not None:
            self._check_columns(place, table.columns)
        for row in table.rows:
            try:
                yield self._entry(row, self._images or ("." if plugin else parent_folder(place)), table.is_text)
            except ValueError as error:
                yield BadRow(
                    f"{place}, {row.where}", _problem(error), _known_id(row.values.get(self._columns["item_id"]))
                )
        self._notes += table.notes

    def _local_copy(self, place: str) -> Path:
        """Returns the path of a table on this machine, written there the first time if it comes from elsewhere."""
        plugin = find_plugin(place)
        if not url_scheme(place) and not plugin:
            return local_path(place)
        if place not in self._copies:
            self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="lookalike-tables-")
            copy = Path(self._scratch.name) / str(len(self._copies))
            plugin.write(copy) if plugin else self._files.copy(place, copy)
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
        kept = {name: value for name, value in others.items() if self._attributes is None or name in self._attributes}
        expiry = {EXPIRES_AT: _expiry(own[EXPIRES_AT])} if EXPIRES_AT in own else {}
        item = Item(
            id=_text("item_id", own["item_id"]),
            title=_text("title", own.get("title", "")),
            url=_text("url", own.get("url", "")),
            attributes={**self._typed(kept, is_text), **expiry},
        )
        values, ids = _images(own["image"], own.get("image_id"))
        regions = row.regions or [None] * len(values)
        found = [
            SourceImage(item, image_id, *self._locate(folder, value), region)
            for value, image_id, region in zip(values, ids, regions, strict=True)
        ]
        return _Entry(frozenset(others), found)

    def _typed(self, values: Mapping[str, Any], is_text: bool) -> dict[str, Any]:
        """Returns attributes with their types, of those that have a value; Item rejects nested values."""
        typed = {}
        for name, value in values.items():
            if name in self._lists and isinstance(value, str):
                parts = split_cell(value, self._lists[name])
                typed[name] = [parse_value(part) for part in parts] if is_text else parts
            elif value is not None:
                typed[name] = parse_cell(value) if is_text else to_attribute(value)
        return {name: value for name, value in typed.items() if value is not None}

    def _locate(self, folder: str, value: str) -> tuple[str, str]:
        """Returns the place of an image, and the folder that it must be in."""
        for prefix, copies in self._mirrors.items():
            if value.startswith(f"{prefix.rstrip('/')}/"):
                path = value.removeprefix(prefix).lstrip("/")
                if url_scheme(value) in HTTP:
                    path = unquote(path.partition("?")[0].partition("#")[0])
                return resolve_place(copies, path), copies
        place, fallback = resolve_place(folder, value), self._fallback_images
        if fallback is None or url_scheme(place) or local_path(place).exists():
            return place, folder
        return resolve_place(fallback, value), fallback

    def _folder_entries(self, root: Path) -> Iterator[_Entry | BadRow]:
        # A folder that a link leads out of the root to becomes one reject.
        for folder in product_folders(root, lambda path: self.allowed.permits(str(path), str(root))):
            try:
                yield _Entry(frozenset(), _folder_images(root, folder))
            except (OSError, ValueError) as error:
                yield BadRow(repr(str(folder.path)), _problem(error), _known_id(folder.id))


def _folder_images(root: Path, folder: ProductFolder) -> list[SourceImage]:
    if folder.error:
        raise folder.error
    item = Item(id=folder.id, title=folder.path.name)
    rejects = [file for file in folder.others if file.suffix.lower() in UNSUPPORTED_SUFFIXES]
    photos = [*folder.photos, *rejects]
    return [SourceImage(item, _image_id(photo.name), str(photo), str(root)) for photo in photos]


def _known_id(value: Any) -> str:
    """Returns the item id of a bad row as far as it can be read, or an empty text."""
    return str(value)[:MAX_ID_LENGTH] if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _is_folder(place: str) -> bool:
    return not url_scheme(place) and local_path(place).is_dir()


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return explain_errors(error.errors(), Item)[0]


def rows_error(summary: SourceSummary) -> LookalikeError:
    """Returns an error with the first bad rows."""
    problems = "; ".join(f"{bad.where}: {bad.problem}" for bad in summary.first_bad)
    rows = "row" if summary.bad_rows == 1 else "rows"
    more = f" (the first {_MAX_REPORTED} of {summary.bad_rows:,})" if summary.bad_rows > _MAX_REPORTED else ""
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


def _expiry(value: Any) -> str:
    try:
        return check_expiry(to_attribute(value))
    except ValueError as error:
        raise ValueError(f"{EXPIRES_AT} {error} (got {format_value(value)})") from None


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
