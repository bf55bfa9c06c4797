"""Tests of atomic writes and of digests."""

import hashlib
from pathlib import Path

import pytest

from index._util.files import (
    atomic_directory,
    atomic_write,
    atomic_write_text,
    chunked_digest,
    file_digest,
    temporary_sibling,
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
        if source.suffix == ".tmp":
            raise OSError("disk full")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="disk full"), atomic_directory(path) as temporary:
        (temporary / "new").touch()
    assert names(path) == ["old"] and names(tmp_path) == ["folder"]


def test_temporary_names_are_hidden_and_differ(tmp_path: Path) -> None:
    siblings = {temporary_sibling(tmp_path / "file", "old") for _ in range(20)}
    assert len(siblings) == 20
    assert all(path.parent == tmp_path and path.name.startswith(".file.") for path in siblings)
    assert {path.suffix for path in siblings} == {".old"}


def test_file_digest_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"some bytes")
    assert file_digest(tmp_path / "file") == hashlib.sha256(b"some bytes").hexdigest()


@pytest.mark.parametrize("data", [b"", b"abc", b"abcdefgh", b"abcdefghi"])
def test_chunked_digest_is_the_digest_of_the_digests_of_chunks(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    chunks = [data[start : start + 4] for start in range(0, len(data), 4)] or [b""]
    expected = hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()
    assert chunked_digest(tmp_path / "file", chunk_bytes=4) == expected
