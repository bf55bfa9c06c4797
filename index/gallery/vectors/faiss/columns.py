"""The attributes of many items as dictionary-encoded columns: filtering a million items takes milliseconds.

A column has the sorted distinct values of an attribute and, for each row that has the attribute, the code of its value.
Numbers have the first codes, then texts, then false and true. So a value is one code, a range of values is a range of
codes, and a condition is a lookup table of booleans, indexed by code.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import AnyOf, Condition, Exists, Filter, Range, ValueType, plain_number
from index.gallery.types import Attribute, Facet
from index.gallery.vectors.faiss.arrays import Arrays, Texts, pack_texts
from index.items import MAX_FACETS

Mask = NDArray[np.bool_]

_ALIGNMENT = 8
_SPARSE_BELOW = 0.25
"""The share of rows below which a column stores the numbers of the rows that have the attribute.

Otherwise thousands of rare attributes would take memory in proportion to rows times attributes.
"""


class _ColumnBuilder:
    """Collects the values of one attribute; a value's provisional code is the order in which it was first seen."""

    def __init__(self) -> None:
        self.rows = array("i")
        self.codes = array("i")
        self.seen: dict[object, int] = {}

    def finish(self, count: int) -> tuple[list[int], list[NDArray[Any]]]:
        """Returns the column's entry without its start, and its arrays; codes are in the order of the values."""
        numbers: list[Any] = sorted(value for value in self.seen if isinstance(value, int | float))
        texts = sorted(value for value in self.seen if isinstance(value, str))
        ordered = [*numbers, *texts, *_BOOLEANS]
        renumbered = np.zeros(len(self.seen) + 1, np.min_scalar_type(-len(ordered)))
        # A boolean that no row has is written to the spare element at the end.
        provisional = np.fromiter((self.seen.get(value, -1) for value in ordered), np.int64, len(ordered))
        renumbered[provisional] = np.arange(len(ordered))
        codes = renumbered[np.frombuffer(self.codes, np.int32)]
        rows = np.frombuffer(self.rows, np.int32)
        holders = len(rows)
        if holders >= _SPARSE_BELOW * count:
            dense = np.full(count, -1, codes.dtype)
            dense[rows] = codes
            codes, rows = dense, rows[:0]
        offsets, blob = pack_texts(texts)
        # Adding zero turns -0.0 into 0.0.
        arrays: list[NDArray[Any]] = [np.array(numbers, np.float64) + 0.0, offsets, rows, codes, blob]
        return [len(numbers), len(texts), holders, len(rows), codes.itemsize], arrays


_BOOLEANS = ((False,), (True,))
"""Keys of booleans in a column builder: False and True themselves equal the keys 0 and 1."""


def encode_columns(rows: Iterable[Mapping[str, Attribute]]) -> dict[str, NDArray[Any]]:
    """Encodes the attributes of items, one mapping per row, as arrays for `Columns`."""
    builders: dict[str, _ColumnBuilder] = {}
    count = 0
    for row in rows:
        for name, value in row.items():
            column = builders.get(name)
            if column is None:
                column = builders[name] = _ColumnBuilder()
            key = (value,) if value is True or value is False else value
            column.codes.append(column.seen.setdefault(key, len(column.seen)))
            column.rows.append(count)
        count += 1
    names = sorted(builders)
    offsets, blob = pack_texts(names)
    # One array for all columns: thousands of small ones would take far more memory than their content.
    entries, data = [], bytearray()
    for name in names:
        data += bytes(-len(data) % _ALIGNMENT)
        # Popped to free the memory of one builder before the next one is finished.
        entry, arrays = builders.pop(name).finish(count)
        entries.append([len(data), *entry])
        for values in arrays:
            data += values.astype(values.dtype.newbyteorder("<"), copy=False).data
    return {
        "column/count": np.array([count]),
        "column/names/offsets": offsets,
        "column/names/blob": blob,
        "column/entries": np.array(entries, np.int64).reshape(len(names), len(_Entry._fields)),
        "column/data": np.frombuffer(data, np.uint8),
    }


class _Entry(NamedTuple):
    """What the arrays of one column are; they follow each other in the order of their alignment."""

    start: int
    numbers: int
    texts: int
    holders: int
    """The number of rows that have the attribute."""
    rows: int
    """The length of the list of these rows; 0 if there is a code for every row."""
    code_bytes: int


class _Column:
    """One attribute; `rows` lists the rows that have it, or is None if `codes` has -1 for the rows without it."""

    def __init__(self, data: NDArray[np.uint8], entry: _Entry, count: int) -> None:
        end = entry.start

        def take(dtype: str, length: int) -> NDArray[Any]:
            nonlocal end
            start, end = end, end + length * np.dtype(dtype).itemsize
            return data[start:end].view(dtype)

        self.numbers = take("<f8", entry.numbers)
        offsets = take("<i8", entry.texts + 1)
        self.rows = take("<i4", entry.rows) if entry.rows else None
        self.codes = take(f"<i{entry.code_bytes}", entry.rows or count)
        self.texts = Texts(offsets, take("|u1", int(offsets[-1])))
        self.size = len(self.numbers) + len(self.texts) + len(_BOOLEANS)

    def value(self, code: int) -> Attribute:
        if code < len(self.numbers):
            return plain_number(float(self.numbers[code]))
        if code < self.size - len(_BOOLEANS):
            return self.texts[code - len(self.numbers)]
        return code == self.size - 1

    def sorted_values(self, kind: ValueType) -> tuple[int, Sequence[Any]]:
        """Returns the first code of a type, and the values of that type in the order of their codes."""
        if kind == "number":
            return 0, self.numbers.data
        if kind == "text":
            return len(self.numbers), self.texts
        return self.size - len(_BOOLEANS), (False, True)

    def mask(self, condition: Condition, count: int) -> Mask:
        # The last element is for rows without the attribute: it has the index -1, their code.
        table = np.zeros(self.size + 1, np.bool_)
        match condition:
            case Exists(wanted):
                table[:-1], table[-1] = wanted, not wanted
            case AnyOf(values):
                for kind, value in values:
                    first, known = self.sorted_values(kind)
                    index = bisect_left(known, value)
                    if index < len(known) and known[index] == value:
                        table[first + index] = True
            case Range(kind, bounds):
                first, known = self.sorted_values(kind)
                start, stop = 0, len(known)
                for comparison, bound in bounds:
                    index = (bisect_left if comparison in ("gte", "lt") else bisect_right)(known, bound)
                    start, stop = (index, stop) if comparison in ("gte", "gt") else (start, index)
                table[first + start : first + stop] = True
        if self.rows is None:
            return table.take(self.codes)
        mask = np.full(count, table[-1])
        mask[self.rows] = table.take(self.codes)
        return mask

    def values(self, rows: NDArray[np.integer[Any]]) -> list[Attribute | None]:
        """Returns the value of each of some rows; None for those without the attribute."""
        if self.rows is None:
            codes = self.codes[rows]
        else:
            places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
            codes = np.where(self.rows[places] == rows, self.codes[places], -1)
        listed: list[int] = codes.tolist()
        if len(codes) and codes.min() >= 0 and codes.max() < len(self.numbers):
            numbers: list[float] = self.numbers[codes].tolist()
            return [plain_number(number) for number in numbers]
        known = {code: self.value(code) for code in set(listed) if code >= 0}
        return [known.get(code) for code in listed]

    def facet(self, name: str, limit: int, rows: Mask | None, contains: str) -> Facet:
        codes = self.codes
        if rows is not None:
            codes = codes[rows if self.rows is None else rows[self.rows]]
        # The first element counts the rows without the attribute.
        counts = np.bincount(codes.astype(np.int64) + 1, minlength=self.size + 1)[1:]
        found = np.flatnonzero(counts)
        if contains:
            wanted = contains.casefold()
            matching = (code for code in found.tolist() if wanted in str(self.value(code)).casefold())
            found = np.fromiter(matching, np.int64)
        # Sorts by descending count, then by code; all keys differ, so the order is deterministic.
        keys = found - counts[found] * self.size
        chosen = np.argpartition(keys, limit)[:limit] if limit < len(keys) else np.arange(len(keys))
        chosen = chosen[np.argsort(keys[chosen])]
        numbers = found[found < len(self.numbers)]
        return Facet(
            name=name,
            values=[(self.value(code), int(counts[code])) for code in found[chosen].tolist()],
            minimum=plain_number(float(self.numbers[numbers[0]])) if len(numbers) else None,
            maximum=plain_number(float(self.numbers[numbers[-1]])) if len(numbers) else None,
            distinct=len(found),
        )


class Columns:
    """Reads the columns of `encode_columns`, from memory or from a mapped file of arrays."""

    def __init__(self, arrays: Arrays) -> None:
        self._count = int(arrays["column/count"][0])
        self._data = arrays["column/data"]
        self._entries = arrays["column/entries"]
        self.names: Sequence[str] = Texts(arrays["column/names/offsets"], arrays["column/names/blob"])
        """The attributes that at least one row has, sorted."""

    def __len__(self) -> int:
        return self._count

    def _number(self, name: str) -> int | None:
        """Returns the number of an attribute's column; None if no row has it."""
        number = bisect_left(self.names, name)
        return number if number < len(self.names) and self.names[number] == name else None

    def _column(self, number: int) -> _Column:
        return _Column(self._data, _Entry(*self._entries[number].tolist()), self._count)

    def mask(self, filter: Filter) -> Mask:
        """Returns for each row whether it matches the filter; equals `filter.matches` of the row."""
        mask = np.ones(len(self), np.bool_)
        for name, condition in filter.conditions:
            number = self._number(name)
            if number is not None:
                mask &= self._column(number).mask(condition, len(self))
            elif not condition.matches(None):
                mask[:] = False
        for negated in filter.negated:
            mask &= ~self.mask(negated)
        return mask

    def values(self, name: str, rows: NDArray[np.integer[Any]]) -> list[Attribute | None]:
        """Returns the value of an attribute in each of some rows; None for those without it."""
        number = self._number(name)
        return [None] * len(rows) if number is None else self._column(number).values(rows)

    def facets(
        self, limit: int, names: Sequence[str] = (), *, filter: Filter | None = None, contains: str = ""
    ) -> Iterator[Facet]:
        """Yields some attributes, each with its `limit` most frequent values.

        By default those that most rows have, at most MAX_FACETS; of `names` those that exist. Counts the rows that
        match the filter, and of their values those that contain a text in any case.
        """
        rows = self.mask(filter) if filter is not None else None
        if names:
            numbers = [number for name in names if (number := self._number(name)) is not None]
        else:
            holders = self._entries[:, _Entry._fields.index("holders")]
            numbers = np.argsort(-holders, kind="stable")[:MAX_FACETS].tolist()
        for number in numbers:
            yield self._column(number).facet(self.names[number], limit, rows, contains)
