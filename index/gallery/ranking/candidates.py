"""What rules read of the candidates of a window: attributes and vectors, each in one read per segment."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.gallery.search import Candidate
from index.gallery.vectors.base import Positions, Segment
from index.items import Attribute


class CandidateTable:
    """Columns of the candidates' attributes, read when a rule first asks for one."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self._columns: dict[str, list[Attribute | None]] = {}
        rows: dict[int, list[int]] = {}
        for row, candidate in enumerate(candidates):
            rows.setdefault(id(candidate[3]), []).append(row)
        self._parts: list[tuple[Segment, list[int], Positions]] = [
            (candidates[own[0]][3], own, np.array([candidates[row][4] for row in own], np.int64))
            for own in rows.values()
        ]

    def __len__(self) -> int:
        return len(self.candidates)

    def column(self, name: str) -> list[Attribute | None]:
        """Returns the value of an attribute for each candidate."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = [None] * len(self)
            for segment, rows, positions in self._parts:
                for row, value in zip(rows, segment.values(name, positions), strict=True):
                    column[row] = value
        return column

    def rows(self) -> Iterator[Mapping[str, Attribute]]:
        """Yields the attributes of each candidate, of which only those are read that somebody gets."""
        return (_Row(self, row) for row in range(len(self)))

    @cached_property
    def vectors(self) -> NDArray[np.float32]:
        """Returns the vector of each candidate's best image."""
        found: NDArray[np.float32] | None = None
        for segment, rows, positions in self._parts:
            vectors = segment.vectors(positions)
            if found is None:
                found = np.empty((len(self), vectors.shape[1]), np.float32)
            found[rows] = vectors
        return np.empty((0, 0), np.float32) if found is None else found


class _Row(Mapping[str, Attribute]):
    """The attributes of one candidate, for `Filter.matches`."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: CandidateTable, row: int) -> None:
        self._table = table
        self._row = row

    def get(self, key: str, default: Any = None) -> Any:
        value = self._table.column(key)[self._row]
        return default if value is None else value

    def __getitem__(self, key: str) -> Attribute:
        value = self._table.column(key)[self._row]
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("which attributes an item has is not read")

    def __len__(self) -> int:
        raise NotImplementedError("which attributes an item has is not read")
