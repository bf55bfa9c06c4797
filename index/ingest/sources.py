"""Sources: what a shop hands in to be indexed, as a stream of items with the places of their photos."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from index.embedding.images import DEFAULT_LIMITS, ImageLimits
from index.errors import LookalikeError
from index.gallery.types import Item
from index.ingest.remote_files import Places, folder_of, joined, local_path, name_of, scheme_of
from index.ingest.tables import Row, open_table, plain, typed

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"}
_REQUIRED = ("item_id", "image")
_OWN = (*_REQUIRED, "image_id", "title", "url")
_LONGEST_ID = 512
_TOLD = 10
"""Bad rows that one message names."""
_MAPPING = "map a column of another name, as in item_id=sku"


class SourceImage(NamedTuple):
    """A photo to index: the item that it shows, and the path or address where it lies."""

    item: Item
    image_id: str
    place: str


class Checked(NamedTuple):
    """What a source holds."""

    tables: int
    rows: int
    """Of tables; a folder has none."""
    images: int


class _Bad(NamedTuple):
    where: str
    problem: str


class _Entry(NamedTuple):
    """A row of a table or a folder of photos."""

    names: frozenset[str]
    """Of what may become attributes."""
    images: list[SourceImage]


class Source:
    """Folders with one folder an item, and tables of items, read as a stream as often as one likes.

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
        if unknown := sorted(set(columns) - set(_OWN)):
            raise LookalikeError(f"No column {unknown[0]!r} can be mapped.", f"Map one of {', '.join(_OWN)}.")
        self._addresses = [str(address) for address in addresses]
        self._columns = {name: columns.get(name, name) for name in _OWN}
        self._mapped = set(columns)
        self._attributes = None if attributes is None else frozenset(attributes)
        self._images = images
        self._places = Places()
        self._copies: dict[str, Path] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def name(self) -> str:
        """The addresses, for people."""
        return ", ".join(self._addresses)

    def check(self) -> Checked:
        """Counts all there is without opening an image, or refuses the source with the first bad rows it has."""
        tables = rows = images = 0
        seen: set[str] = set()
        schemes: set[str] = set()
        bad: list[_Bad] = []
        for place in self._matching():
            is_table = not _is_folder(place)
            tables += is_table
            for entry in self._entries(place):
                rows += is_table
                if isinstance(entry, _Bad):
                    bad.append(entry)
                    if len(bad) == _TOLD:
                        raise _refused(bad)
                else:
                    images += len(entry.images)
                    seen |= entry.names
                    schemes |= {scheme_of(image.place) for image in entry.images}
        if bad:
            raise _refused(bad)
        if not images:
            raise LookalikeError(
                f"{', '.join(self._addresses)} names no images.", "Expected rows of tables, or one folder an item."
            )
        if unseen := sorted((self._attributes or frozenset()) - seen):
            raise LookalikeError(
                f"No row has an attribute {unseen[0]!r}; there are {', '.join(sorted(seen)) or 'none'}.",
                "Mend the list of attributes to keep.",
            )
        for scheme in sorted(schemes - {""}):
            self._places.filesystem(scheme)
        return Checked(tables, rows, images)

    def __iter__(self) -> Iterator[SourceImage]:
        for place in self._matching():
            for entry in self._entries(place):
                if isinstance(entry, _Bad):
                    raise _refused([entry])
                yield from entry.images

    def read(self, place: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
        """The bytes of an image, or an ImageError; threads may call it at once."""
        return self._places.read(place, limits)

    def _matching(self) -> Iterator[str]:
        for address in self._addresses:
            yield from self._places.matching(address)

    def _entries(self, place: str) -> Iterator[_Entry | _Bad]:
        if _is_folder(place):
            yield from _folder_entries(local_path(place))
            return
        table = open_table(self._local(place), name_of(place), place)
        if table.columns is not None:
            self._check_columns(place, table.columns)
        is_text = name_of(place).lower().removesuffix(".gz").endswith(".csv")
        for row in table.rows:
            try:
                yield self._entry(row, self._images or folder_of(place), is_text)
            except ValueError as error:
                yield _Bad(f"{place}, {row.where}", _problem(error))

    def _local(self, place: str) -> Path:
        if not scheme_of(place):
            return local_path(place)
        if place not in self._copies:
            self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="lookalike-tables-")
            copy = Path(self._scratch.name) / str(len(self._copies))
            self._places.copy(place, copy)
            self._copies[place] = copy
        return self._copies[place]

    def _check_columns(self, place: str, found: list[str]) -> None:
        wanted = [self._columns[name] for name in _OWN if name in _REQUIRED or name in self._mapped]
        if missing := [column for column in wanted if column not in found]:
            raise LookalikeError(
                f"{place} has no column {' and no '.join(map(repr, missing))}; it has {', '.join(found) or 'none'}.",
                f"Give columns `item_id` and `image`, or {_MAPPING}.",
            )

    def _entry(self, row: Row, folder: str, is_text: bool) -> _Entry:
        """The images of a row; ValueError says what is wrong with it."""
        if row.problem:
            raise ValueError(row.problem)
        own = {name: row.values[column] for name, column in self._columns.items() if row.values.get(column) is not None}
        if missing := [self._columns[name] for name in _REQUIRED if name not in own]:
            has = ", ".join(name for name, value in row.values.items() if value is not None) or "nothing"
            raise ValueError(f"no value for {' and '.join(map(repr, missing))}, only for {has}")
        others = _others(row.values, set(self._columns.values()))
        kept = {
            name: value
            for name, value in others.items()
            if value is not None and (self._attributes is None or name in self._attributes)
        }
        item = Item(
            id=_text("item_id", own["item_id"]),
            title=_text("title", own.get("title", "")),
            url=_text("url", own.get("url", "")),
            attributes={name: typed(value) for name, value in kept.items()} if is_text else _plain(kept),
        )
        values, ids = _images(own["image"], own.get("image_id"))
        found = [
            SourceImage(item, image_id, joined(folder, value)) for value, image_id in zip(values, ids, strict=True)
        ]
        return _Entry(frozenset(others), found)


def _is_folder(place: str) -> bool:
    return not scheme_of(place) and local_path(place).is_dir()


def _folder_entries(folder: Path) -> Iterator[_Entry | _Bad]:
    for within in sorted(path for path in folder.iterdir() if path.is_dir()):
        photos = sorted(path for path in within.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        try:
            item = Item(id=within.name, title=within.name)
            images = [SourceImage(item, _image_id(photo.name), str(photo)) for photo in photos]
        except ValueError as error:
            yield _Bad(repr(str(within)), _problem(error))
        else:
            yield _Entry(frozenset(), images)


def _problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"


def _refused(bad: list[_Bad]) -> LookalikeError:
    told = "; ".join(f"{where}: {problem}" for where, problem in bad)
    rows = "row" if len(bad) == 1 else "rows"
    more = f" (the first {_TOLD})" if len(bad) == _TOLD else ""
    return LookalikeError(f"{told}{more}.", f"Mend the {rows}, or {_MAPPING}.")


def _others(values: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    """What is no column of ours, with an object `attributes` merged."""
    others = {name: value for name, value in values.items() if name not in own}
    if isinstance(merged := others.get("attributes"), dict):
        del others["attributes"]
        if twice := sorted(others.keys() & merged.keys()):
            raise ValueError(f"{twice[0]!r} is a column and in `attributes` too")
        others |= merged
    return others


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that keep their types; Item refuses what is nested."""
    return {name: found for name, value in values.items() if (found := plain(value)) is not None}


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name}: {value!r} is no text")
    return str(value)


def _images(value: Any, image_id: Any) -> tuple[list[str], list[str]]:
    """The image column's values and their ids, which are the values as written unless given."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str) and one for one in values):
        raise ValueError(f"image: {value!r} is no path or address, and no list of them")
    if image_id is None:
        ids = values
    else:
        ids = [_text("image_id", one) for one in (image_id if isinstance(image_id, list) else [image_id])]
    if len(ids) != len(values):
        raise ValueError(f"image_id: {len(ids)} for {len(values)} images")
    return values, [_image_id(one) for one in ids]


def _image_id(text: str) -> str:
    if not 0 < len(text) <= _LONGEST_ID:
        raise ValueError(f"image_id: {text[:60]!r}… has {len(text)} characters, not 1 to {_LONGEST_ID}")
    text.encode()  # a name that is no Unicode is a ValueError here, and could not be stored
    return text
