"""The attributes of many items as dictionary-encoded columns: filtering a million items takes milliseconds.

A column has the sorted distinct values of an attribute and, for each row that has the attribute, the code of its value.
Numbers have the first codes, then texts, then false and true. So a value is one code, a range of values is a range of
codes, and a condition is a lookup table of booleans, indexed by code.

A column in which a row has several values lists the rows of each code instead, one code after the other. The texts that
are dates are listed a second time, in the order of their instants.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.dates import parse_instant
from index.gallery.filters import AllOf, AnyOf, Condition, Exists, Filter, Range, TypedValue, ValueType, plain_number
from index.gallery.types import Attribute, Facet
from index.gallery.vectors.faiss.arrays import Arrays, Texts, pack_texts
from index.items import MAX_FACETS, MAX_INTEGER, Value

Mask = NDArray[np.bool_]

_ALIGNMENT = 8
_RECENT_COLUMNS = 16
_MANY_ROWS = 4096
"""Rows from which on a column with lists is turned around, rather than each item parsed."""
_SPARSE_BELOW = 0.25
"""The share of rows below which a column stores the numbers of the rows that have the attribute.

Otherwise thousands of rare attributes would take memory in proportion to rows times attributes.
"""


class _ColumnBuilder:
    """Collects the values of one attribute; a value's provisional code is the order in which it was first seen."""

    def __init__(self) -> None:
        self.rows = array("i")
        self.codes = array("i")
        self.more = 0
        """The number of values that are not the first of their row."""
        self.seen: dict[object, int] = {}

    def add(self, row: int, values: Iterable[Value]) -> None:
        for value in values:
            key = (value,) if value is True or value is False else value
            self.codes.append(self.seen.setdefault(key, len(self.seen)))
            self.rows.append(row)

    def finish(self, count: int) -> tuple[list[int], list[NDArray[Any]]]:
        """Returns the column's entry without its start, and its arrays; codes are in the order of the values."""
        numbers: list[Any] = sorted(value for value in self.seen if isinstance(value, int | float))
        texts = sorted(value for value in self.seen if isinstance(value, str))
        ordered = [*numbers, *texts, *_BOOLEANS]
        renumbered = np.zeros(len(self.seen) + 1, _code_type(len(ordered)))
        # A boolean that no row has is written to the spare element at the end.
        provisional = np.fromiter((self.seen.get(value, -1) for value in ordered), np.int64, len(ordered))
        renumbered[provisional] = np.arange(len(ordered))
        codes = renumbered[np.frombuffer(self.codes, np.int32)]
        rows = np.frombuffer(self.rows, np.int32)
        holders, ends = len(rows) - self.more, np.empty(0, np.int64)
        if self.more:
            rows = rows[np.argsort(codes, kind="stable")]
            ends, codes = np.cumsum(np.bincount(codes, minlength=len(ordered))), codes[:0]
        elif holders >= _SPARSE_BELOW * count:
            dense = np.full(count, -1, codes.dtype)
            dense[rows] = codes
            codes, rows = dense, rows[:0]
        instants, dates = _find_dates(texts)
        offsets, blob = pack_texts(texts)
        # Adding zero turns -0.0 into 0.0.
        arrays: list[NDArray[Any]] = [
            np.array(numbers, np.float64) + 0.0, offsets, instants, ends, dates, rows, codes, blob
        ]  # fmt: skip
        return [len(numbers), len(texts), len(dates), holders, len(rows)], arrays


def _code_type(count: int) -> np.dtype[Any]:
    """Returns the smallest type for so many codes and -1."""
    return np.dtype(np.min_scalar_type(-count)).newbyteorder("<")


def _find_dates(texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the instants of those texts that are dates, in order, and the position of each text."""
    found = [(instant, position) for position, text in enumerate(texts) if (instant := parse_instant(text)) is not None]
    instants = np.array([instant for instant, _ in found], np.int64)
    order = np.argsort(instants, kind="stable")
    return instants[order], np.array([position for _, position in found], np.int32)[order]


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
            if type(value) is tuple:
                column.more += len(value) - 1
                column.add(count, value)
                continue
            # As `add` does, without the cost of a call for each attribute of each item.
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
    dates: int
    """The number of texts that are dates."""
    holders: int
    """The number of rows that have the attribute."""
    rows: int
    """The length of the list of these rows; 0 if there is a code for every row, and more than `holders` if rows have
    several values."""


class _Column:
    """One attribute. `rows` lists the rows that have it, or is None if `codes` has -1 for the rows without it.

    If rows have several values, `ends` is not None: the rows of code c are rows[ends[c - 1]:ends[c]].
    """

    def __init__(self, data: NDArray[np.uint8], entry: _Entry, count: int) -> None:
        end = entry.start

        def take(dtype: str, length: int) -> NDArray[Any]:
            nonlocal end
            start, end = end, end + length * np.dtype(dtype).itemsize
            return data[start:end].view(dtype)

        self.numbers = take("<f8", entry.numbers)
        offsets = take("<i8", entry.texts + 1)
        self.size = entry.numbers + entry.texts + len(_BOOLEANS)
        has_lists = entry.rows > entry.holders
        self.instants = take("<i8", entry.dates)
        self.ends = take("<i8", self.size) if has_lists else None
        self.dates = take("<i4", entry.dates)
        self.rows = take("<i4", entry.rows) if entry.rows else None
        self.codes = take(_code_type(self.size).str, 0 if has_lists else entry.rows or count)
        self.texts = Texts(offsets, take("|u1", int(offsets[-1])))
        self._count = count

    def value(self, code: int) -> Value:
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

    def mask(self, condition: Condition) -> Mask:
        """Returns for each row of the table whether it fulfils a condition."""
        if isinstance(condition, Exists):
            holders = self._rows_with(slice(0, self.size))
            return holders if condition.wanted else ~holders
        if isinstance(condition, AllOf):
            return self._rows_with_all(condition.values)
        return self._rows_with(self._codes(condition))

    def _codes(self, condition: AnyOf | Range) -> slice | NDArray[np.int64]:
        """Returns the codes of the values that fulfil a condition."""
        if isinstance(condition, AnyOf):
            return np.array(self._find(condition.values), np.int64)
        first, known = (0, self.instants.data) if condition.kind == "date" else self.sorted_values(condition.kind)
        start, stop = 0, len(known)
        for comparison, bound in condition.bounds:
            index = (bisect_left if comparison in ("gte", "lt") else bisect_right)(known, bound)
            start, stop = (index, stop) if comparison in ("gte", "gt") else (start, index)
        if condition.kind == "date":
            return self.dates[start:stop] + np.int64(len(self.numbers))
        return slice(first + start, first + max(start, stop))

    def _find(self, values: Iterable[TypedValue]) -> list[int]:
        """Returns the codes of those values that some row has."""
        codes = []
        for kind, value in values:
            first, known = self.sorted_values(kind)
            index = bisect_left(known, value)
            if index < len(known) and known[index] == value:
                codes.append(first + index)
        return codes

    def _rows_with(self, codes: slice | NDArray[np.int64]) -> Mask:
        """Returns for each row whether it has a value with one of some codes."""
        if self.ends is not None:
            mask = np.zeros(self._count, np.bool_)
            mask[self._rows_of(codes)] = True
            return mask
        # The last element is for rows without the attribute: it has the index -1, their code.
        table = np.zeros(self.size + 1, np.bool_)
        table[codes] = True
        if self.rows is None:
            return table.take(self.codes)
        mask = np.zeros(self._count, np.bool_)
        mask[self.rows] = table.take(self.codes)
        return mask

    def values(self, rows: NDArray[np.integer[Any]]) -> list[Attribute | None]:
        """Returns the value of each of some rows, which have at most one; None for those without the attribute."""
        if self.rows is None:
            codes = self.codes[rows]
        else:
            places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
            codes = np.where(self.rows[places] == rows, self.codes[places], -1)
        listed: list[int] = codes.tolist()
        if len(codes) and codes.min() >= 0 and codes.max() < len(self.numbers):
            numbers = self.numbers[codes]
            if (np.abs(numbers) <= MAX_INTEGER).all():
                whole = numbers.astype(np.int64)
                if (whole == numbers).all():
                    return list(whole.tolist())
            return [plain_number(number) for number in numbers.tolist()]
        known = {code: self.value(code) for code in set(listed) if code >= 0}
        return [known.get(code) for code in listed]

    def value_lists(self, rows: NDArray[np.integer[Any]]) -> list[Attribute | None]:
        """Returns the values of each of some rows in the order of their codes, the same object for the same values."""
        assert self.rows is not None and self.ends is not None
        order = np.argsort(self.rows, kind="stable")  # within a row by code
        holders, codes = self.rows[order], np.searchsorted(self.ends, order, side="right").astype(np.int32)
        starts, stops = (np.searchsorted(holders, rows, side=side).tolist() for side in ("left", "right"))
        known: dict[bytes, Attribute | None] = {b"": None}
        found = []
        for start, stop in zip(starts, stops, strict=True):
            own = codes[start:stop]
            key = own.tobytes()
            if key not in known:
                known[key] = tuple(map(self.value, own.tolist()))
            found.append(known[key])
        return found

    def _rows_with_all(self, values: Iterable[TypedValue]) -> Mask:
        wanted = list(values)
        codes = self._find(wanted)
        if self.ends is None or len(codes) < len(wanted):
            return np.zeros(self._count, np.bool_)
        counts = np.bincount(self._rows_of(np.array(codes, np.int64)), minlength=self._count)
        matching: Mask = counts == len(wanted)  # a row has a value once
        return matching

    def _rows_of(self, codes: slice | NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the rows of some codes, one code after the other."""
        assert self.rows is not None and self.ends is not None
        if isinstance(codes, slice):
            start, stop = (int(self.ends[code - 1]) if code else 0 for code in (codes.start, codes.stop))
            return self.rows[start:stop]
        parts = [self._rows_of(slice(code, code + 1)) for code in codes.tolist()]
        return np.concatenate([self.rows[:0], *parts])

    def _count_values(self, rows: Mask | None) -> NDArray[np.int64]:
        """Returns for each code the number of rows that have it, of all or of some."""
        if self.ends is not None and self.rows is not None:
            before = None if rows is None else np.concatenate(([0], np.cumsum(rows[self.rows])))
            counts: NDArray[np.int64] = np.diff(self.ends if before is None else before[self.ends], prepend=0)
            return counts
        codes = self.codes
        if rows is not None:
            codes = codes[rows if self.rows is None else rows[self.rows]]
        # The first element counts the rows without the attribute.
        return np.bincount(codes.astype(np.int64) + 1, minlength=self.size + 1)[1:]

    def facet(self, name: str, limit: int, rows: Mask | None, contains: str) -> Facet:
        counts = self._count_values(rows)
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
        self._recent: dict[str, _Column] = {}
        """Columns that rankings have read, of which there are few: opening one takes as long as a search."""

    def __len__(self) -> int:
        return self._count

    def _number(self, name: str) -> int | None:
        """Returns the number of an attribute's column; None if no row has it."""
        number = bisect_left(self.names, name)
        return number if number < len(self.names) and self.names[number] == name else None

    def _column(self, number: int) -> _Column:
        return _Column(self._data, _Entry(*self._entries[number].tolist()), self._count)

    def instants(self, name: str) -> Sequence[int]:
        """Returns the dates among the values of an attribute, sorted."""
        number = self._number(name)
        return () if number is None else self._column(number).instants.data

    def mask(self, filter: Filter) -> Mask:
        """Returns for each row whether it matches the filter; equals `filter.matches` of the row."""
        mask = np.ones(len(self), np.bool_)
        for name, condition in filter.conditions:
            number = self._number(name)
            if number is not None:
                mask &= self._column(number).mask(condition)
            elif not condition.matches(None):
                mask[:] = False
        for negated in filter.negated:
            mask &= ~self.mask(negated)
        if filter.alternatives:
            mask &= np.logical_or.reduce([self.mask(one) for one in filter.alternatives])
        return mask

    def group_size(self, name: str) -> float:
        """Returns how many rows have the same value of an attribute on average; 1 if none has it."""
        number = self._number(name)
        if number is None:
            return 1.0
        entry = _Entry(*self._entries[number].tolist())
        return entry.holders / max(1, entry.numbers + entry.texts)

    def values(self, name: str, rows: NDArray[np.integer[Any]]) -> list[Attribute | None] | None:
        """Returns the value of an attribute in each of some rows; None for those without it.

        Returns None if some rows have several values, which are listed by value and not by row, unless so many rows are
        asked for that it is quicker to turn the list around. Then the values of a row are in their canonical order.
        """
        column = self._recent.get(name)
        if column is None:
            number = self._number(name)
            if number is None:
                return [None] * len(rows)
            column = self._column(number)
            # A copy of the keys: other threads add to it concurrently.
            for oldest in list(self._recent)[: 1 - _RECENT_COLUMNS]:
                self._recent.pop(oldest, None)
            self._recent[name] = column
        if column.ends is None:
            return column.values(rows)
        return column.value_lists(rows) if len(rows) >= _MANY_ROWS else None

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
