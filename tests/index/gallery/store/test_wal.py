"""The write-ahead log: complete transactions that SQLite would drop silently are found."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from index.gallery.store.wal import find_damage, keep_damaged_log, kept_logs

PAGE_BYTES = 4096
FRAME_BYTES = 24 + PAGE_BYTES
HEADER_BYTES = 32
WRITES = 20


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A database with a log of 20 transactions, as a crash leaves it."""
    path = tmp_path / "open.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE writes (number INTEGER, data BLOB)")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for number in range(WRITES):
            database.execute("INSERT INTO writes VALUES (?, zeroblob(3000))", (number,))
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", tmp_path / f"crashed.sqlite{suffix}")
    return tmp_path / "crashed.sqlite"


def log_file(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def count_writes(path: Path) -> int:
    """Opens a copy of the database, as SQLite recovers it."""
    copy = path.with_name("recovered.sqlite")
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    with closing(sqlite3.connect(copy)) as database:
        count: int = database.execute("SELECT count(*) FROM writes").fetchone()[0]
    return count


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_an_intact_log_is_not_damaged(crashed: Path) -> None:
    assert find_damage(log_file(crashed), PAGE_BYTES) is None
    assert not keep_damaged_log(crashed, PAGE_BYTES)
    assert find_damage(crashed.with_name("missing-wal"), PAGE_BYTES) is None


@pytest.mark.parametrize("share", [0, 0.0001, 0.1, 0.33, 0.7, 0.97])
def test_the_transactions_that_a_changed_byte_makes_unreadable_are_counted(crashed: Path, share: float) -> None:
    log = log_file(crashed)
    assert count_writes(crashed) == WRITES
    flip(log, int(share * log.stat().st_size))
    damage = find_damage(log, PAGE_BYTES)
    assert damage and damage.commits == WRITES - count_writes(crashed) > 0


def test_an_incomplete_last_transaction_is_not_damage(crashed: Path) -> None:
    log = log_file(crashed)
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - FRAME_BYTES - 100)
    assert find_damage(log, PAGE_BYTES) is None
    flip(log, log.stat().st_size - 100)  # of the last, incomplete frame
    assert find_damage(log, PAGE_BYTES) is None


def test_frames_from_before_the_log_was_started_again_are_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "restarted.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE writes (data BLOB)")
        for _ in range(WRITES):
            database.execute("INSERT INTO writes VALUES (zeroblob(3000))")
        database.execute("PRAGMA wal_checkpoint(RESTART)")
        database.execute("INSERT INTO writes VALUES (zeroblob(3000))")
        assert log_file(path).stat().st_size > 10 * FRAME_BYTES, "most frames are old"
        assert find_damage(log_file(path), PAGE_BYTES) is None
        flip(log_file(path), HEADER_BYTES + 100)
        damage = find_damage(log_file(path), PAGE_BYTES)
        assert damage and damage.commits == 1


def test_a_damaged_log_is_kept_once(crashed: Path) -> None:
    log = log_file(crashed)
    flip(log, log.stat().st_size // 2)
    content = log.read_bytes()
    assert keep_damaged_log(crashed, PAGE_BYTES)
    assert not keep_damaged_log(crashed, PAGE_BYTES)
    (copy,) = kept_logs(crashed)
    assert copy.read_bytes() == content
