"""The file of rejects: nothing else is replaced by it, and a spreadsheet opens it without running anything."""

import csv
from pathlib import Path

import pytest

from index.errors import LookalikeError
from index.ingest.embedding_plan import Reject
from index.ingest.rejects import RejectsFile

HEADER = ",".join(Reject._fields)


def reject(*cells: str) -> Reject:
    return Reject(*(*cells, *["x"] * (len(Reject._fields) - len(cells))))


def test_the_rejects_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rejects.csv"
    RejectsFile(path, []).write([reject("old")])
    rejects = RejectsFile(path, [])
    assert not path.exists()
    rejects.write([reject("1")])
    rejects.write([])
    rejects.write([reject("2")])
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["item_id", "1", "2"]


@pytest.mark.parametrize("content", ["item_id,image\n1,a.jpg\n", f"{HEADER},more\n", "\n\nnotes\n", " \n", "\x00"])
def test_another_file_is_neither_replaced_nor_extended(tmp_path: Path, content: str) -> None:
    path, link = tmp_path / "catalogue.csv", tmp_path / "link.csv"
    path.write_text(content)
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(LookalikeError, match=r"exists and is not a file of rejects\. .*--rejects"):
            RejectsFile(name, [])
    assert path.read_text() == content and link.is_symlink()


def test_a_source_is_not_replaced_even_if_it_is_a_file_of_rejects(tmp_path: Path) -> None:
    path = tmp_path / "rejects.csv"
    path.write_text(f"{HEADER}\n1,a,a.jpg,truncated,x\n")
    (tmp_path / "other.csv").hardlink_to(path)
    for source in (str(path), f"file://{path}", str(tmp_path / "other.csv")):
        with pytest.raises(LookalikeError, match=r"is a source of this job\. .*--rejects"):
            RejectsFile(path, ["https://example.com/t.csv", str(tmp_path / "gone.csv"), source])
    assert path.read_text().startswith(HEADER)


def test_an_empty_file_and_a_link_are_kept(tmp_path: Path) -> None:
    empty, link, target = tmp_path / "reindex.lock", tmp_path / "link", tmp_path / "target"
    empty.touch()
    link.symlink_to(target)
    RejectsFile(empty, [])
    RejectsFile(link, []).write([reject("1")])
    assert empty.exists() and link.is_symlink()
    assert target.read_text().startswith(HEADER)


def test_a_full_disk_is_named() -> None:
    with pytest.raises(LookalikeError, match=r"cannot be written to /dev/full: No space left on device\. Free space"):
        RejectsFile(Path("/dev/full"), []).write([reject("1")])


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=cmd|x", "'=cmd|x"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("  =1", "  '=1"),
        ("\t=1", "\t'=1"),
        ("\r\n=1", "\r\n'=1"),
        ("\xa0\u200b\ufeff=1", "\xa0\u200b\ufeff'=1"),
        ("\uff1d1", "'\uff1d1"),
        ("a;=1;b; +2", "a;'=1;b; '+2"),
        ("a\n=1", "a\n'=1"),
        ("a\t@x", "a\t'@x"),
        ("photos/a-1=2.jpg?x=1&y=+2@3", "photos/a-1=2.jpg?x=1&y=+2@3"),
        ("", ""),
    ],
)
def test_no_cell_is_a_formula(tmp_path: Path, cell: str, written: str) -> None:
    path = tmp_path / "rejects.csv"
    RejectsFile(path, []).write([Reject(*[cell] * len(Reject._fields))])
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file))[1] == [written] * len(Reject._fields)
