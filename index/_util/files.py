"""Whole files or none: writing so that a crash never leaves half of one."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from index._util.system import usable_cores

_PIECE = 1 << 24


def beside(path: Path, end: str = "tmp") -> Path:
    """A hidden name beside `path` that nobody else has: in each of two containers on one volume the pid is 1."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{end}")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to; on success it is fsynced and takes the place of `path`, else it goes."""
    temporary = beside(path)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a small text file as a whole."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def fsync_directory(directory: Path) -> None:
    """Makes renames in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pieces_digest(path: Path) -> str:
    """SHA-256 over those of the file's pieces of 16 MiB: all cores share the work, so a large file opens sooner."""
    starts = range(0, max(path.stat().st_size, 1), _PIECE)
    with ThreadPoolExecutor(usable_cores()) as pool:
        return hashlib.sha256(b"".join(pool.map(partial(_piece_digest, path), starts))).hexdigest()


def _piece_digest(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(_PIECE)).digest()
