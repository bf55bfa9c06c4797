"""Lines of fields, separated by tabs, commas or semicolons, of which a bad one does not end the file."""

import csv
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from index.ingest.tables import READ_ERRORS, open_text, read_error

_DELIMITERS = "\t,;"
_MAX_HEADER = 1 << 16
_MAX_BLANK_LINES = 100
_MAX_FIELD = 1 << 20
"""Characters of a field; a quote that is not closed makes one of all lines that follow, up to this length."""
csv.field_size_limit(_MAX_FIELD)  # of the process: the default is less than some descriptions have


class Header(NamedTuple):
    """The first line of a text: as written, and its fields."""

    text: str
    delimiter: str
    columns: list[str]


class Line(NamedTuple):
    """The fields of a line, or the problem with it."""

    where: str
    fields: list[str]
    problem: str = ""


def read_header(file: Path) -> Header:
    """Returns the first line that is not blank; empty if the file is not a text."""
    try:
        with open_text(file) as text:
            lines = (text.readline(_MAX_HEADER) for _ in range(_MAX_BLANK_LINES))
            line = next((stripped for line in lines if (stripped := line.strip("\ufeff \r\n"))), "")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        line = ""
    delimiter = max(_DELIMITERS, key=line.count)
    columns = next(csv.reader([line], delimiter=delimiter), []) if "\0" not in line else []
    return Header(line, delimiter, [column.strip() for column in columns])


def read_lines(file: Path, title: str, delimiter: str) -> Iterator[Line]:
    """Yields the lines that are not blank, also the header.

    A quote within a field must be doubled: otherwise a single one could silently swallow the lines that follow.
    """
    number = 0
    try:
        with open_text(file) as text:
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            while True:
                try:
                    fields = next(reader, None)
                except csv.Error as error:
                    where, number = f"lines {number + 1} to {reader.line_num}", reader.line_num
                    yield Line(where, [], f"{error}; is a quote not closed, or not doubled?")
                    continue
                if fields is None:
                    return
                number = reader.line_num
                if any(fields):
                    yield Line(f"line {number}", fields)
    except READ_ERRORS as error:
        raise read_error(title, f"after line {number}", error) from None


def check_width(line: Line, columns: int, *, may_be_shorter: bool = False) -> str:
    """Returns the problem of a line whose fields do not fit the columns, or an empty text."""
    found = len(line.fields)
    if line.problem or found == columns or (found < columns and may_be_shorter):
        return line.problem
    return f"{found} fields under {columns} columns"
