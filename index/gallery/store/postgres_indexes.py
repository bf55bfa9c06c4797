"""Where it is recorded what a vector index has built: in PostgreSQL, or per machine in a file of its cache folder."""

import json
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from index._util.files import atomic_write_text
from index.gallery.store.base import BundleRow


class BuiltIndexes(Protocol):
    """What was built, as far as this process may use it."""

    @property
    def is_shared(self) -> bool:
        """Whether it is recorded in PostgreSQL, for all machines."""

    def stamp(self) -> int:
        """Returns a number that changes when another process records something; cheap."""

    def fix(self) -> "BuiltIndexes":
        """Returns what is recorded now; later records do not change it."""

    def apply(self, bundle: BundleRow) -> BundleRow:
        """Returns a row of PostgreSQL with what was built."""


class SharedIndexes:
    """The index is shared, so PostgreSQL's rows name it."""

    is_shared = True

    def stamp(self) -> int:
        return 0

    def fix(self) -> "SharedIndexes":
        return self

    def apply(self, bundle: BundleRow) -> BundleRow:
        return bundle


class _Entry(NamedTuple):
    name: str
    revision: int


_ENTRIES = TypeAdapter(dict[int, _Entry])


class FixedIndexes:
    """Records of one instant, by the bundle's key."""

    is_shared = False

    def __init__(self, entries: dict[int, _Entry]) -> None:
        self.entries = entries

    def stamp(self) -> int:
        return 0

    def fix(self) -> "FixedIndexes":
        return self

    def apply(self, bundle: BundleRow) -> BundleRow:
        entry = self.entries.get(bundle.key)
        name, revision = entry if entry else (None, 0)
        return bundle._replace(index_name=name, index_revision=revision)


class LocalIndexes:
    """A file in the cache folder that the processes of one machine share."""

    is_shared = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[int, FixedIndexes] | None = None

    def stamp(self) -> int:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return 0
        return status.st_mtime_ns << 64 | status.st_ino

    def fix(self) -> FixedIndexes:
        stamp = self.stamp()  # before the file is read: a later record is then noticed
        if self._read is None or self._read[0] != stamp:
            self._read = stamp, FixedIndexes(self._load())
        return self._read[1]

    def _load(self) -> dict[int, _Entry]:
        try:
            return _ENTRIES.validate_json(self._path.read_bytes())
        except (FileNotFoundError, ValidationError):  # whatever is not recorded is built again
            return {}

    def apply(self, bundle: BundleRow) -> BundleRow:
        return self.fix().apply(bundle)

    def record(self, bundle: int, name: str | None, revision: int) -> None:
        """Records a build, while the caller holds the lock of builds."""
        entries = {key: entry for key, entry in self._load().items() if key != bundle}
        if name is not None:
            entries[bundle] = _Entry(name, revision)
        atomic_write_text(self._path, json.dumps(entries))
