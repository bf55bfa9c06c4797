"""What rules read of the candidates of a window: attributes and vectors, each in one read per segment."""

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from index.gallery.filters import Filter
from index.gallery.search import Candidate
from index.gallery.vectors.base import Positions, Segment
from index.items import Attribute


class CandidateTable:
    """Columns of the candidates' attributes, read when a rule first asks for one."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self._columns: dict[str, list[Attribute | None]] = {}
        segments, positions = [one[3] for one in candidates], np.array([one[4] for one in candidates], np.int64)
        distinct = {id(segment): segment for segment in segments}
        self._parts: list[tuple[Segment, Positions, Positions]] = []
        """Segments, the rows of the table that they have, and the positions of these rows."""
        for segment in distinct.values():
            rows = np.arange(len(segments))
            if len(distinct) > 1:
                rows = np.array([row for row in rows.tolist() if segments[row] is segment])
            self._parts.append((segment, rows, positions[rows]))

    def __len__(self) -> int:
        return len(self.candidates)

    def column(self, name: str) -> list[Attribute | None]:
        """Returns the value of an attribute for each candidate."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = [None] * len(self)
            for segment, rows, positions in self._parts:
                values = segment.values(name, positions)
                if len(values) == len(column):
                    column[:] = values
                    continue
                for row, value in zip(rows.tolist(), values, strict=True):
                    column[row] = value
        return column

    def matches(self, filter: Filter) -> list[bool]:
        """Returns whether each candidate matches a filter, which is asked once per combination of values."""
        names = filter_names(filter)
        if not names:
            return [filter.matches({})] * len(self)
        columns = [self.column(name) for name in names]
        keys = list(zip(*columns, *(map(_types, column) for column in columns), strict=True))  # True == 1
        known = {
            key: filter.matches({name: value for name, value in zip(names, key, strict=False) if value is not None})
            for key in set(keys)
        }
        return [known[key] for key in keys]

    @cached_property
    def vectors(self) -> NDArray[np.float32]:
        """Returns the vector of each candidate's best image."""
        read = [segment.vectors(positions).astype(np.float32) for segment, _, positions in self._parts]
        if len(read) == 1:
            return read[0]
        found = np.empty((len(self), read[0].shape[1] if read else 0), np.float32)
        for (_, rows, _), vectors in zip(self._parts, read, strict=True):
            found[rows] = vectors
        return found


def _types(value: Attribute | None) -> object:
    """Returns the type of a value, or those of several."""
    return tuple(map(type, value)) if isinstance(value, tuple) else type(value)


def filter_names(filter: Filter) -> list[str]:
    """Returns the attributes that decide whether an item matches a filter."""
    parts = (part for field in fields(filter) for part in getattr(filter, field.name))
    inner = (name for part in parts if isinstance(part, Filter) for name in filter_names(part))
    return [*dict.fromkeys((*(name for name, _ in filter.conditions), *inner))]
