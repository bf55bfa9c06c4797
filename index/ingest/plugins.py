"""Sources of other packages: functions that yield the rows of a catalogue."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from index._util.plugins import PluginError, load_plugin, plugin_names
from index.ingest.tables import to_attribute

PLUGIN_TABLE = "rows.jsonl"
"""The name, and so the format, of the table that a plug-in's rows are written to."""


class SourcePlugin(NamedTuple):
    """A function from a text to rows, and that text."""

    address: str
    read: Callable[[str], Iterable[Mapping[str, Any]]]
    argument: str

    def write(self, path: Path) -> None:
        """Writes all rows as JSON lines, so that a job reads the same rows however long it takes."""
        with path.open("w", encoding="utf-8") as file:
            file.writelines(self._lines())

    def _lines(self) -> Iterator[str]:
        done = 0
        try:
            for row in self.read(self.argument):
                line = json.dumps(dict(row), default=to_attribute, allow_nan=False)
                done += 1
                yield f"{line}\n"
        except Exception as error:  # whatever the function raises, and rows that are not JSON
            raise PluginError(
                f"The source {self.address} failed after {done} rows ({type(error).__name__}: {error}).",
                "Correct it: it must yield mappings such as {'item_id': ..., 'image': ...}.",
            ) from error


@lru_cache
def find_plugin(address: str) -> SourcePlugin | None:
    """Returns the source of an address `MODULE:FUNCTION[:ARGUMENT]` or `NAME[:ARGUMENT]`, of an entry point.

    Paths that exist and URLs are never plug-ins.
    """
    name, _, rest = address.partition(":")
    if rest.startswith("//") or Path(address).exists():
        return None
    if name in plugin_names("lookalike.sources"):
        return SourcePlugin(address, load_plugin("lookalike.sources", name), rest)  # type: ignore[arg-type]
    function, _, argument = rest.partition(":")
    if not (all(part.isidentifier() for part in name.split(".")) and function.isidentifier()):
        return None
    return SourcePlugin(address, load_plugin("lookalike.sources", f"{name}:{function}"), argument)  # type: ignore[arg-type]
