"""Where it is recorded what a vector index has built: in PostgreSQL, or per machine in a file of its cache folder."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from index._util.files import atomic_write_text
from index._util.system import exclusive_lock
from index.gallery.store.base import BundleRow

log = logging.getLogger(__name__)


class BuiltIndexes(Protocol):
    """What was built, as far as this process may use it."""

    def stamp(self) -> int:
        """Returns a number that changes when another process records something; cheap."""

    def fix(self) -> "FixedIndexes | SharedIndexes":
        """Returns what is recorded now; later records do not change it. Called before rows are read, so that nothing
        newer than these rows is added to them."""


class SharedIndexes:
    """The index is shared, so PostgreSQL's rows name it."""

    def stamp(self) -> int:
        return 0

    def fix(self) -> "SharedIndexes":
        return self

    def apply(self, bundle: BundleRow, revision: int) -> BundleRow:
        return bundle


class _Entry(NamedTuple):
    name: str
    revision: int


_ENTRIES = TypeAdapter(dict[int, _Entry])


class FixedIndexes:
    """Records of one instant, by the bundle's key."""

    def __init__(self, entries: dict[int, _Entry], forget: Callable[[int, _Entry], None]) -> None:
        self._entries = entries
        self._forget = forget

    def fix(self) -> "FixedIndexes":
        return self

    def stamp(self) -> int:
        return 0

    def apply(self, bundle: BundleRow, revision: int) -> BundleRow:
        entry = self._entries.get(bundle.key)
        if entry and entry.revision > revision:
            # The server has lost the last writes: what was built of them must not be used, nor extended later.
            self._forget(bundle.key, entry)
            entry = None
        name, built = entry if entry else (None, 0)
        return bundle._replace(index_name=name, index_revision=built)


class LocalIndexes:
    """A file in the cache folder that the processes of one machine share."""

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
            self._read = stamp, FixedIndexes(self._load(), self._forget)
        return self._read[1]

    def _load(self) -> dict[int, _Entry]:
        try:
            return _ENTRIES.validate_json(self._path.read_bytes())
        except (FileNotFoundError, ValidationError):  # whatever is not recorded is built again
            return {}

    def record(self, bundle: int, name: str | None, revision: int) -> None:
        """Records a build; without a name, that there is none."""
        with exclusive_lock(self._path.with_suffix(".lock")):
            entries = {key: entry for key, entry in self._load().items() if key != bundle}
            if name is not None:
                entries[bundle] = _Entry(name, revision)
            atomic_write_text(self._path, json.dumps(entries))

    def _forget(self, bundle: int, entry: _Entry) -> None:
        log.error("the index %s is newer than the store, which has lost writes; it is built again", entry.name)
        if self._load().get(bundle) == entry:
            self.record(bundle, None, 0)
