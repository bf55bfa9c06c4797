"""Lines of fields: a bad line is reported, and the others are read."""

from pathlib import Path

import pytest

from index.errors import LookalikeError
from index.ingest.feeds.delimited import Line, check_width, read_header, read_lines


@pytest.mark.parametrize(
    ("text", "delimiter", "columns"),
    [
        ("id\ttitle\timage, link\n1\t2\t3", "\t", ["id", "title", "image, link"]),
        ("\ufeff\n\nID,Name\n", ",", ["ID", "Name"]),
        ('ID;"Name; full"; Type\n', ";", ["ID", "Name; full", "Type"]),
        ("", "\t", []),
        ("\0\0", "\t", []),
    ],
)
def test_the_first_line_decides_the_delimiter(tmp_path: Path, text: str, delimiter: str, columns: list[str]) -> None:
    (tmp_path / "t.csv").write_text(text)
    header = read_header(tmp_path / "t.csv")
    assert (header.delimiter, header.columns) == (delimiter, columns)


def test_a_file_that_is_not_a_text_has_no_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\x89PNG\xff\xfe")
    assert read_header(tmp_path / "t.csv").columns == []
    (tmp_path / "t.csv").write_bytes(b"\x1f\x8bnot gzip")
    assert read_header(tmp_path / "t.csv").columns == []


def test_a_quote_that_is_not_closed_costs_the_lines_after_it_only(tmp_path: Path) -> None:
    rows = [f"{number},chair {number}\n" for number in range(200_000)]
    rows[2] = '2,"a chair\n'
    (tmp_path / "t.csv").write_text("".join(rows))
    lines = list(read_lines(tmp_path / "t.csv", "t.csv", ","))
    bad = [line for line in lines if line.problem]
    assert [line.problem for line in bad] == [
        "field larger than field limit (1048576); is a quote not closed, or not doubled?"
    ]
    assert bad[0].where.startswith("lines 3 to ")
    last = int(bad[0].where.rpartition(" ")[2])
    assert lines[3] == Line(f"line {last + 1}", [str(last), f"chair {last}"])
    assert lines[-1] == Line("line 200000", ["199999", "chair 199999"])


@pytest.mark.parametrize(
    ("text", "bad", "good"),
    [
        ('1,"a chair\n2,b\n3,c\n', ["lines 1 to 3"], []),
        ('1,"a chair\n2,"b"\n3,c\n', ["lines 1 to 2"], ["3"]),
        ('1,"Retro" chair\n2,b\n', ["lines 1 to 1"], ["2"]),
        ('1,"a ""retro""\nchair"\n2,b\n', [], ["1", "2"]),
    ],
)
def test_a_quote_never_swallows_lines_silently(tmp_path: Path, text: str, bad: list[str], good: list[str]) -> None:
    (tmp_path / "t.csv").write_text(text)
    lines = list(read_lines(tmp_path / "t.csv", "t.csv", ","))
    assert [line.where for line in lines if line.problem] == bad
    assert [line.fields[0] for line in lines if not line.problem] == good


def test_text_that_is_not_utf8_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"id,title\n1,M\xf6bel\n")
    with pytest.raises(LookalikeError, match=r"t.csv, after line .*as UTF-8"):
        list(read_lines(tmp_path / "t.csv", "t.csv", ","))


def test_the_fields_must_fit_the_columns() -> None:
    assert check_width(Line("line 1", ["a", "b"]), 2) == ""
    assert check_width(Line("line 1", ["a"]), 2, may_be_shorter=True) == ""
    assert check_width(Line("line 1", ["a"]), 2) == "1 fields under 2 columns"
    assert check_width(Line("line 1", ["a", "b", "c"]), 2, may_be_shorter=True) == "3 fields under 2 columns"
    assert check_width(Line("line 1", [], "a quote"), 2) == "a quote"
