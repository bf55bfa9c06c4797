"""Atomic writes of files and directories, and digests of files."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from index._util.system import usable_cores


def temporary_sibling(path: Path, suffix: str = "tmp") -> Path:
    """Returns a hidden, unused name in the folder of `path`.

    The name is random: in each of two containers that share a volume the process id is 1.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{suffix}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary file name to write to; on success it is fsynced and replaces `path`, else it is removed."""
    temporary = temporary_sibling(path)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Replaces a small text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill; on success it replaces `path`, on failure it is removed.

    The caller fsyncs the files. A kill between the two renames leaves the old and the new folder next to `path`.
    """
    temporary, replaced = temporary_sibling(path), temporary_sibling(path, "old")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        fsync_directory(path.parent)
    finally:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        for folder in (temporary, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def create_directory(path: Path) -> None:
    """Creates a folder and its parents, each fsynced into its parent, so that a power cut does not lose them."""
    if not path.is_dir():
        create_directory(path.parent)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Makes renames in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Returns the folder of files that can always be made again, under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lookalike"


def file_digest(path: Path) -> str:
    """Returns the SHA-256 digest of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunked_digest(path: Path, chunk_bytes: int = 1 << 24) -> str:
    """Returns the SHA-256 digest of the digests of the file's chunks (16 MiB), which all cores compute in parallel."""
    starts = range(0, max(path.stat().st_size, 1), chunk_bytes)
    with ThreadPoolExecutor(usable_cores()) as pool:
        digests = pool.map(partial(_chunk_digest, path, chunk_bytes), starts)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _chunk_digest(path: Path, chunk_bytes: int, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(chunk_bytes)).digest()
