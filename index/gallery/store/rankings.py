"""The table of stored rankings, which is the same in both stores."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from index.gallery.errors import RESTORE, LimitExceeded, StoreError, VersionConflict
from index.rankings import MAX_LENGTH, MAX_RANKINGS, MAX_VERSIONS, Ranking, StoredRanking

Run = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]
"""Runs a statement with parameters and returns its rows."""
_COLUMNS = "name, version, stored, document"
_NEWEST = "version = (SELECT max(version) FROM rankings AS others WHERE others.name = rankings.name)"


class RankingTable:
    """Versions of rankings by name; a version is the gallery's revision that stored it."""

    def __init__(self, run: Run, mark: str) -> None:
        """`mark` is what stands for a parameter in a statement."""
        self._run = run
        self._mark = mark

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._run(query.replace("?", self._mark), values)

    def _select(self, condition: str, *values: object) -> list[StoredRanking]:
        query = f"SELECT {_COLUMNS} FROM rankings WHERE {condition} ORDER BY name, version DESC"
        return [_parse(*row) for row in self._rows(query, *values)]

    def get(self, name: str, version: int | None = None) -> StoredRanking | None:
        if version is None:
            found = self._select(f"name = ? AND {_NEWEST}", name)
        else:
            found = self._select("name = ? AND version = ?", name, version)
        return found[0] if found else None

    def newest(self) -> list[StoredRanking]:
        return self._select(_NEWEST)

    def versions(self, name: str | None = None) -> list[StoredRanking]:
        return self._select("name = ?", name) if name is not None else self._select("1 = 1")

    def put(
        self,
        name: str,
        ranking: Ranking,
        *,
        revision: int,
        expected: Mapping[str, int | None],
        stored: float | None = None,
    ) -> StoredRanking:
        """Stores a version; returns the newest one if it has the same rules."""
        last = self.get(name)
        _check(name, last, expected)
        document = ranking.model_dump_json(exclude_defaults=True)
        if last and last.ranking.model_dump_json(exclude_defaults=True) == document:  # not ==: in a filter, True == 1
            return last
        if len(document) > MAX_LENGTH:
            raise LimitExceeded(
                f"The ranking has {len(document):,} characters as JSON; the limit is {MAX_LENGTH:,}.",
                "Use a filter instead of many ids or values.",
                name,
            )
        if last is None and len(self._rows("SELECT DISTINCT name FROM rankings")) >= MAX_RANKINGS:
            raise LimitExceeded(
                f"The gallery has {MAX_RANKINGS:,} rankings already.", "Delete one that is not used.", name
            )
        new = StoredRanking(name=name, version=revision, stored=stored or time.time(), ranking=ranking)
        query = f"INSERT INTO rankings ({_COLUMNS}) VALUES (?, ?, ?, ?) RETURNING version"
        self._rows(query, name, revision, new.stored, document)
        versions = self._rows("SELECT version FROM rankings WHERE name = ? ORDER BY version DESC", name)
        for (old,) in versions[MAX_VERSIONS:]:
            self._rows("DELETE FROM rankings WHERE name = ? AND version = ? RETURNING version", name, old)
        return new

    def delete(self, name: str, expected: Mapping[str, int | None]) -> bool:
        """Removes all versions of a ranking; returns whether there was any."""
        _check(name, self.get(name), expected)
        return bool(self._rows("DELETE FROM rankings WHERE name = ? RETURNING version", name))

    def problems(self, revision: int) -> list[str]:
        """Returns what no write of ours makes."""
        broken = early = 0
        for row in self._rows(f"SELECT {_COLUMNS} FROM rankings"):
            early += row[1] > revision
            try:
                _parse(*row)
            except StoreError:
                broken += 1
        counts = {"{} rankings are damaged": broken, "{} rankings have a revision that was never written": early}
        return [problem.format(f"{count:,}") for problem, count in counts.items() if count]


def _check(name: str, last: StoredRanking | None, expected: Mapping[str, int | None]) -> None:
    if name in expected and expected[name] != (last.version if last else None):
        raise VersionConflict(name, "Ranking")


def _parse(name: str, version: int, stored: float, document: str) -> StoredRanking:
    try:
        ranking = Ranking.model_validate_json(document)
    except ValidationError:
        raise StoreError(f"The store is damaged: the ranking {name!r} is not valid.", RESTORE) from None
    return StoredRanking(name=name, version=version, stored=stored, ranking=ranking)
