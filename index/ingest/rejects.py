"""The file of rejects: what could not be indexed, and why."""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from index.errors import LookalikeError
from index.ingest.embedding_plan import Reject
from index.ingest.places import local_path, url_scheme

_DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
_FORMULA = re.compile(r"((?:^|[;\t\r\n])[\s\x00-\x1f\u200b-\u200f\u2060\ufeff]*)([=+\-@\uff1d\uff0b\uff0d\uff20])")
"""The beginning of a cell or of a line in it, spaces and invisible characters, and what starts a formula."""


class RejectsFile:
    """A CSV file with the rejects of the last run; it is removed when there are none."""

    def __init__(self, path: Path, sources: Sequence[str]) -> None:
        """Removes the rejects of an earlier run. Any other file is refused, and so is one of the sources."""
        self.path = path
        self._header = [Reject._fields]
        with self._errors():
            is_new = not (path.exists() or path.is_symlink())
            path.open("a").close()
            if is_new:
                path.unlink()
            elif path.is_file() and path.parent not in _DEVICES:  # /dev/stdout may be a file
                _check_rejects(path, sources)
                # A link is kept, and so is an empty file, which may have another purpose.
                if not path.is_symlink() and path.stat().st_size:
                    path.unlink()

    def write(self, rejects: Sequence[Reject]) -> None:
        """Appends rejects; the header is written before the first."""
        if rejects:
            with self._errors(), self.path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([*self._header, *(map(escape_formulas, reject) for reject in rejects)])
            self._header = []

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LookalikeError(
                f"Rejects cannot be written to {self.path}: {error.strerror}.",
                "Free space on its disk, or name another file with --rejects.",
            ) from error


def _check_rejects(path: Path, sources: Sequence[str]) -> None:
    """Refuses to replace a file that is not the rejects of an earlier run, such as the catalogue."""
    for source in sources:
        if not url_scheme(source) and local_path(source).exists() and path.samefile(local_path(source)):
            raise LookalikeError(f"{path} is a source of this job.", "Name another file with --rejects.")
    with path.open("rb") as file:
        first = file.readline(1000)
    if first and first.strip() != ",".join(Reject._fields).encode():
        raise LookalikeError(f"{path} exists and is not a file of rejects.", "Name another file with --rejects.")


def escape_formulas(cell: str) -> str:
    """Quotes what a spreadsheet would run as a formula, also where it separates cells by semicolons or tabs."""
    return _FORMULA.sub(r"\1'\2", cell)
