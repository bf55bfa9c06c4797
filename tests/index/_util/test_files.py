"""Tests of atomic writes, of what killed processes leave, and of digests."""

import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from index._util.files import (
    atomic_directory,
    atomic_write,
    atomic_write_text,
    chunked_digest,
    create_directory,
    file_digest,
    remove_leftovers,
    temporary_directory,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_write_replaces_a_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    for text in ("old", "new, with Möbel"):
        atomic_write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert names(tmp_path) == ["file.txt"]


def test_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_failed_write_keeps_the_old_file_and_removes_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="disk full"), atomic_write(path) as temporary:
        temporary.write_bytes(b"half of it")
        raise RuntimeError("disk full")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file.bin"]


def test_atomic_directory_replaces_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for content in ("old", "new"):
        with atomic_directory(path) as temporary:
            (temporary / content).touch()
    assert names(path) == ["new"] and names(tmp_path) == ["folder"]


def test_failed_directory_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with atomic_directory(path) as temporary:
        (temporary / "old").touch()
    with pytest.raises(RuntimeError, match="disk full"), atomic_directory(path) as temporary:
        (temporary / "new").touch()
        raise RuntimeError("disk full")
    assert names(path) == ["old"] and names(tmp_path) == ["folder"]


def test_old_directory_returns_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    with atomic_directory(path) as temporary:
        (temporary / "old").touch()
    rename = Path.rename

    def fail_for_the_new_one(source: Path, target: Path) -> Path:
        if source.suffix == ".lookalike-tmp":
            raise OSError("disk full")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="disk full"), atomic_directory(path) as temporary:
        (temporary / "new").touch()
    assert names(path) == ["old"] and names(tmp_path) == ["folder"]


def test_new_folders_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    create_directory(tmp_path / "gallery" / "bundles")
    assert synced == [tmp_path, tmp_path / "gallery"]
    create_directory(tmp_path / "gallery" / "bundles")
    assert len(synced) == 2, "nothing is new"


def test_file_digest_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some bytes")
    assert file_digest(tmp_path / "file") == hashlib.sha256(b"some bytes").hexdigest()


@pytest.mark.parametrize("data", [b"", b"abc", b"abcdefgh", b"abcdefghi"])
def test_chunked_digest_is_the_digest_of_the_digests_of_chunks(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    chunks = [data[start : start + 4] for start in range(0, len(data), 4)] or [b""]
    expected = xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, chunks)))
    assert chunked_digest(tmp_path / "file", chunk_bytes=4) == expected


# Left-overs of killed processes

KILLED = """
import os, signal, sys
from pathlib import Path
from index._util.files import atomic_directory, atomic_write, temporary_directory
from index._util import files

path = Path(sys.argv[2])
if sys.argv[1] == "file":
    with atomic_write(path) as temporary:
        temporary.write_text("half of it")
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "folder":
    with temporary_directory(path) as temporary:
        (temporary / "file").write_text("half of it")
        os.kill(os.getpid(), signal.SIGKILL)
rename = Path.rename
def kill_after(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = kill_after
with atomic_directory(path) as temporary:
    (temporary / "new").touch()
"""


def run_killed(kind: str, path: Path) -> None:
    """Runs a process that is killed while it writes a file or a folder, or between the renames that replace one."""
    killed = subprocess.run([sys.executable, "-c", KILLED, kind, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_is_removed_by_the_next_write_into_the_folder(tmp_path: Path, kind: str) -> None:
    run_killed(kind, tmp_path / "yesterday")
    assert len(names(tmp_path)) == 1 and names(tmp_path)[0].startswith(".yesterday.")
    atomic_write_text(tmp_path / "today", "complete")
    assert names(tmp_path) == ["today"]


def test_a_folder_whose_replacement_was_killed_gets_its_name_back(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    run_killed("replace", path)
    assert not path.exists() and len(names(tmp_path)) == 2
    remove_leftovers(tmp_path)
    assert names(path) == ["old"] and names(tmp_path) == ["folder"]


def test_temporary_files_and_folders_in_use_are_kept(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "file") as file, temporary_directory(tmp_path / "folder") as folder:
        file.write_text("half of it")
        remove_leftovers(tmp_path)
        assert file.read_text() == "half of it" and folder.is_dir()
    assert names(tmp_path) == ["file"]


def test_files_of_other_programs_are_kept(tmp_path: Path) -> None:
    others = [".file.0a1b2c3d.tmp", ".file.swp", "file.lookalike-tmp", ".nfs0000000000000001"]
    for name in others:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted(others)


def test_where_locks_do_not_work_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_killed("file", tmp_path / "file")

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    atomic_write_text(tmp_path / "file", "complete")
    assert (tmp_path / "file").read_text() == "complete"
    assert len(names(tmp_path)) == 2


def test_a_temporary_file_that_was_taken_for_a_leftover_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[Path] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    atomic_write_text(tmp_path / "file", "complete")
    assert len(removed) == 1 and names(tmp_path) == ["file"]
