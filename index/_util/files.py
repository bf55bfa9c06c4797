"""Atomic writes of files and directories, temporary files, and digests of files.

What is being written has a hidden name in the folder of its target, and is locked. When a process is killed, the next
one that writes into the folder removes what was left.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_hexdigest

from index._util.system import usable_cores

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_disk_full(error: BaseException) -> bool:
    """Returns whether a write failed because the disk, a quota or a limit of the file's size is reached."""
    return isinstance(error, OSError) and error.errno in _FULL


_IN_USE, _REPLACED = ".lookalike-tmp", ".lookalike-old"
_LEFTOVER = re.compile(rf"\.(.+)\.[0-9a-f]{{8}}({re.escape(_IN_USE)}|{re.escape(_REPLACED)})")
"""The names of temporary files and folders: no other program uses them, so they can be removed when nobody does."""


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yields an empty hidden file in the folder of `path`; it is removed at the end unless it was renamed."""
    with _temporary(path, _create_file) as temporary:
        yield temporary


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """Yields an empty hidden folder in the folder of `path`; it is removed at the end unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(path, _create_directory) as temporary:
        yield temporary


@contextmanager
def _temporary(path: Path, create: Callable[[Path], int]) -> Iterator[Path]:
    """Creates something that is locked while it is in use, after removing what killed processes left.

    The lock ends with its process, also in another container that shares the volume.
    """
    remove_leftovers(path.parent)
    while True:
        temporary = _sibling(path, _IN_USE)
        descriptor = create(temporary)
        if _try_lock(descriptor, otherwise=True) and _has_name(descriptor, temporary):
            break
        os.close(descriptor)  # another process took it for a leftover before it was locked
    try:
        yield temporary
    finally:
        _remove(temporary)
        os.close(descriptor)


def _sibling(path: Path, suffix: str) -> Path:
    """Returns an unused name. It is random: in each of two containers that share a volume the process id is 1."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def _create_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _create_directory(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY)


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files and folders that killed processes left in a folder.

    A folder that was being replaced by another one when its process was killed gets its name back.
    """
    for path in folder.iterdir():
        if found := _LEFTOVER.fullmatch(path.name):
            with _unused(path) as is_unused:
                if is_unused and found[2] == _REPLACED and not path.with_name(found[1]).exists():
                    path.rename(path.with_name(found[1]))
                elif is_unused:
                    _remove(path)


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Yields whether no process uses a file or a folder, and keeps others from using it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # somebody else has removed it
        yield False
        return
    try:
        yield _try_lock(descriptor, otherwise=False) and _has_name(descriptor, path)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, *, otherwise: bool) -> bool:
    """Returns whether the lock was free; `otherwise` where locks do not work."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return otherwise
    return True


def _has_name(descriptor: int, path: Path) -> bool:
    """Returns whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary file to write to; on success it is fsynced and replaces `path`, else it is removed."""
    with temporary_file(path) as temporary:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """Replaces a small text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill; on success it replaces `path`, on failure it is removed.

    The caller fsyncs the files. After a kill between the two renames, the next call gives the old folder its name back.
    """
    replaced = _sibling(path, _REPLACED)
    with temporary_directory(path) as temporary:
        yield temporary
        with _unused(path):  # locks the old folder, so that nobody takes it for a leftover
            if path.exists():
                path.rename(replaced)
            try:
                temporary.rename(path)
                fsync_directory(path.parent)
            finally:
                if replaced.exists() and not path.exists():
                    replaced.rename(path)
                _remove(replaced)


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
    """Returns the XXH3 digest of the digests of the file's chunks (16 MiB), which all cores compute in parallel.

    It finds damage, not forgery, in a third of the time of SHA-256: large files are checked whenever they are opened.
    """
    starts = range(0, max(path.stat().st_size, 1), chunk_bytes)
    with ThreadPoolExecutor(usable_cores()) as pool:
        digests = pool.map(partial(_chunk_digest, path, chunk_bytes), starts)
        return xxh3_128_hexdigest(b"".join(digests))


def _chunk_digest(path: Path, chunk_bytes: int, start: int) -> bytes:
    digest, left = xxh3_128(), chunk_bytes
    buffer = memoryview(bytearray(min(chunk_bytes, 1 << 20)))  # fits the caches of a core
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (size := file.readinto(buffer[:left])):
            digest.update(buffer[:size])
            left -= size
    return digest.digest()
