"""Finds damage in SQLite's write-ahead log that SQLite does not report.

After a crash SQLite reads the log up to the first frame whose checksum is wrong, and drops the rest silently, because
the end of a log is expected to be incomplete. But complete transactions after that frame had been acknowledged: the
log was damaged on disk. Its format: https://sqlite.org/fileformat2.html#the_write_ahead_log
"""

import logging
import shutil
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.files import atomic_write
from index.gallery.store.sqlite_connection import is_read_only, log_of

log = logging.getLogger(__name__)

_HEADER = struct.Struct(">8I")
_FRAME_HEADER_BYTES = 24
_BIG_ENDIAN_SUMS = 0x377F0683
_BLOCK_FRAMES = 1024
_WORD = 0xFFFFFFFF
_Sums = tuple[int, int]


class Damage(NamedTuple):
    """A damaged log."""

    salts: tuple[int, int]
    """Identify the log: SQLite draws others when it starts the file again."""
    commits: int
    """Complete transactions after the damage. A power failure may have interrupted the last one."""


def keep_damaged_log(path: Path, page_bytes: int) -> bool:
    """Copies a log whose last transactions SQLite is about to drop; returns whether it did so now."""
    file = log_of(path)
    damage = find_damage(file, page_bytes)
    # Read twice: another process may have been writing it.
    if damage is None or damage != find_damage(file, page_bytes):
        return False
    copy = file.with_name(f"{file.name}.damaged-{damage.salts[0]:08x}{damage.salts[1]:08x}")
    if copy.exists():
        return False
    log.error("%s is damaged: up to %d acknowledged writes are lost", file, damage.commits)
    if is_read_only(path):
        return False
    with atomic_write(copy) as temporary:
        shutil.copyfile(file, temporary)
    return True


def kept_logs(path: Path) -> list[Path]:
    """Returns the copies of damaged logs of a store."""
    return sorted(path.parent.glob(f"{log_of(path).name}.damaged-*"))


def find_damage(file: Path, page_bytes: int) -> Damage | None:
    """Returns the damage of a log; None if nothing complete follows where SQLite stops to read it."""
    try:
        with file.open("rb") as stream:
            return _find_damage(stream, page_bytes)
    except FileNotFoundError:
        return None


def _find_damage(stream: BinaryIO, page_bytes: int) -> Damage | None:
    header = stream.read(_HEADER.size).ljust(_HEADER.size, b"\0")
    magic, _, _, _, *salts, first_sum, second_sum = _HEADER.unpack(header)
    words = ">u4" if magic == _BIG_ENDIAN_SUMS else "<u4"
    sums: _Sums | None = (first_sum, second_sum)
    if _sums(np.frombuffer(header[:24], words)[None])[0] != sums:
        sums, salts = None, []  # SQLite reads nothing of it
    commits, frame_bytes = 0, _FRAME_HEADER_BYTES + page_bytes
    while len(block := stream.read(_BLOCK_FRAMES * frame_bytes)) >= frame_bytes:
        frames = np.frombuffer(block, np.uint8, len(block) // frame_bytes * frame_bytes).reshape(-1, frame_bytes)
        heads = frames[:, :_FRAME_HEADER_BYTES].copy().view(">u4")
        salts = salts or heads[0, 2:4].tolist()
        is_current = (heads[:, 2:4] == salts).all(axis=1)  # others are left from before the file was started again
        valid = 0
        if sums is not None:
            expected = [pair if own else None for pair, own in zip(heads[:, 4:].tolist(), is_current, strict=True)]
            body = np.concatenate((frames[:, :8], frames[:, _FRAME_HEADER_BYTES:]), axis=1).view(words)
            valid, sums = _follow(body, expected, sums)
        commits += int(np.count_nonzero(is_current[valid:] & (heads[valid:, 1] > 0)))
    return Damage((salts[0], salts[1]), commits) if commits else None


def _follow(body: NDArray[np.uint32], expected: list[list[int] | None], sums: _Sums) -> tuple[int, _Sums | None]:
    """Returns the number of valid frames at the start, and the checksums after them; None if there are others."""
    # Checksums are linear: those of a frame are its own, plus those before it times a power of a matrix.
    first, second = (1, 0), (0, 1)
    for _ in range(body.shape[1] // 2):
        first = (first[0] + second[0]) & _WORD, (first[1] + second[1]) & _WORD
        second = (second[0] + first[0]) & _WORD, (second[1] + first[1]) & _WORD
    for number, (own, wanted) in enumerate(zip(_sums(body), expected, strict=True)):
        sums = (
            (first[0] * sums[0] + first[1] * sums[1] + own[0]) & _WORD,
            (second[0] * sums[0] + second[1] * sums[1] + own[1]) & _WORD,
        )
        if wanted != [*sums]:
            return number, None
    return len(expected), sums


def _sums(rows: NDArray[np.uint32]) -> list[_Sums]:
    """Returns the checksums of each row of words, without what is before it."""
    columns = np.ascontiguousarray(rows.T, np.uint32)
    first, second = np.zeros((2, len(rows)), np.uint32)
    for column in range(0, len(columns), 2):
        first += columns[column] + second
        second += columns[column + 1] + first
    return list(zip(first.tolist(), second.tolist(), strict=True))
