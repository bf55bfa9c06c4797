"""The attributes of many items as dictionary-encoded columns: filtering a million items takes milliseconds.

A column has the sorted distinct values of an attribute and, for each row that has the attribute, the code of its value.
Numbers have the first codes, then texts, then false and true. So a value is one code, a range of values is a range of
codes, and a condition is a lookup table of booleans, indexed by code.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import AnyOf, Condition, Exists, Filter, Range, ValueType, plain_number
from index.gallery.types import Attribute, Facet
from index.gallery.vectors.faiss.arrays import Arrays, Texts, pack_texts

Mask = NDArray[np.bool_]

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

    def finish(self, count: int) -> dict[str, NDArray[Any]]:
        """Returns the arrays of the column, with codes in the order of the sorted values."""
        numbers: list[Any] = sorted(value for value in self.seen if isinstance(value, int | float))
        texts = sorted(value for value in self.seen if isinstance(value, str))
        ordered = [*numbers, *texts, *_BOOLEANS]
        renumbered = np.zeros(len(self.seen) + 1, np.min_scalar_type(-len(ordered)))
        # A boolean that no row has is written to the spare element at the end.
        provisional = np.fromiter((self.seen.get(value, -1) for value in ordered), np.int64, len(ordered))
        renumbered[provisional] = np.arange(len(ordered))
        codes = renumbered[np.frombuffer(self.codes, np.int32)]
        rows = np.frombuffer(self.rows, np.int32)
        offsets, blob = pack_texts(texts)
        # Adding zero turns -0.0 into 0.0.
        packed: dict[str, NDArray[Any]] = {
            "numbers": np.array(numbers, np.float64) + 0.0,
            "offsets": offsets,
            "blob": blob,
        }
        if len(rows) < _SPARSE_BELOW * count:
            return {**packed, "rows": rows, "codes": codes}
        dense = np.full(count, -1, codes.dtype)
        dense[rows] = codes
        return {**packed, "codes": dense}


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
    arrays = {"column/count": np.array([count]), "column/names/offsets": offsets, "column/names/blob": blob}
    for number, name in enumerate(names):
        # Popped to free the memory of one builder before the next one is finished.
        for part, values in builders.pop(name).finish(count).items():
            arrays[f"column/{number}/{part}"] = values
    return arrays


class _Column:
    """One attribute; `rows` lists the rows that have it, or is None if `codes` has -1 for the rows without it."""

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        self.numbers = arrays[f"{prefix}/numbers"]
        self.texts = Texts(arrays[f"{prefix}/offsets"], arrays[f"{prefix}/blob"])
        self.codes = arrays[f"{prefix}/codes"]
        self.rows = arrays.get(f"{prefix}/rows")
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

    def counts(self, allowed: Mask | None) -> NDArray[np.int64]:
        """Returns the number of rows per code."""
        codes = self.codes
        if allowed is not None:
            codes = codes[allowed if self.rows is None else allowed[self.rows]]
        # The first element counts the rows without the attribute.
        return np.bincount(codes.astype(np.int64) + 1, minlength=self.size + 1)[1:]

    def facet(self, name: str, limit: int, allowed: Mask | None) -> Facet:
        counts = self.counts(allowed)
        found = np.flatnonzero(counts)
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
        self._arrays = arrays
        self._count = int(arrays["column/count"][0])

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _numbers(self) -> dict[str, int]:
        texts = Texts(self._arrays["column/names/offsets"], self._arrays["column/names/blob"])
        return {name: number for number, name in enumerate(texts)}

    @property
    def names(self) -> list[str]:
        """The attributes that at least one row has, sorted."""
        return list(self._numbers)

    def _column(self, name: str) -> _Column:
        return _Column(self._arrays, f"column/{self._numbers[name]}")

    def mask(self, filter: Filter) -> Mask:
        """Returns for each row whether it matches the filter; equals `filter.matches` of the row."""
        mask = np.ones(len(self), np.bool_)
        for name, condition in filter.conditions:
            if name in self._numbers:
                mask &= self._column(name).mask(condition, len(self))
            elif not condition.matches(None):
                mask[:] = False
        for negated in filter.negated:
            mask &= ~self.mask(negated)
        return mask

    def facets(self, limit: int, allowed: Mask | None = None) -> list[Facet]:
        """Returns for every attribute its `limit` most frequent values, among the allowed rows or all rows.

        Attributes that none of these rows has are left out.
        """
        facets = (self._column(name).facet(name, limit, allowed) for name in self.names)
        return [facet for facet in facets if facet.distinct]
