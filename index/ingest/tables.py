"""Tables: reads CSV, JSON lines and Parquet as a stream of rows, each with its position for messages."""

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from index._util.imports import require
from index.embedding.images import Region
from index.errors import LookalikeError
from index.items import MAX_INTEGER

FORMATS = ".csv, .jsonl, .ndjson, .csv.gz, .jsonl.gz, .ndjson.gz, .parquet, .pq"
_GZIP = b"\x1f\x8b"
_BATCH_ROWS = 1024
# A text with a leading zero is a code, not a number, and must keep the zero.
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
READ_ERRORS = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error)


class Row(NamedTuple):
    """The values of a row, None where absent, or the problem with it."""

    where: str
    values: dict[str, Any]
    problem: str = ""
    regions: Sequence[Region | None] | None = None
    """The part of each image to index, where that is not the entire photo."""


class Table(NamedTuple):
    """A table on this machine; `columns` is None for a format whose rows name their own."""

    columns: list[str] | None
    rows: Iterator[Row]
    is_text: bool = False
    """All values are texts, whose types are those that they look like."""
    notes: Sequence[str] = ()
    """Remarks on the entire table, complete once all rows were read."""


def open_table(file: Path, name: str, title: str) -> Table:
    """Opens the table in `file`; the ending of `name` is its format, and messages call it `title`."""
    lowered = name.lower()
    reader = _READERS.get(Path(lowered.removesuffix(".gz")).suffix)
    if reader is None or (reader is _read_parquet and lowered.endswith(".gz")):
        raise LookalikeError(
            f"{title} is not a table of a known format.",
            f"Its name must end in one of {FORMATS}, unless it is a feed of a shop; a folder of photos must be on this "
            "machine.",
        )
    return reader(file, title)


def to_attribute(value: Any) -> Any:
    """Converts a value of a typed table: dates to ISO texts, decimals to numbers; returns None for NaN.

    Of a list it converts each value, and leaves out those that are null or NaN.
    """
    if isinstance(value, list):
        return [found for one in value if (found := to_attribute(one)) is not None]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def parse_cell(text: str) -> Any:
    """Converts a CSV cell to a number, a boolean or a list in JSON; everything else stays a text."""
    if text.startswith("[") and text.endswith("]"):
        with suppress(ValueError, RecursionError):
            values = json.loads(text)
            return values if all(isinstance(value, str | int | float) for value in values) else text
    return parse_value(text)


def split_cell(text: str, separator: str) -> list[str]:
    """Returns the parts of a cell that lists several values, without those that are empty."""
    return [part for value in text.split(separator) if (part := value.strip())]


def parse_value(text: str) -> str | int | float | bool:
    """Converts a text to a number or a boolean where nothing is lost; everything else stays a text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not _NUMBER.fullmatch(text):
        return text
    digits = text.removeprefix("-").isdigit()
    if digits and len(text) > 17:
        return text
    number = int(text) if digits else float(text)
    return number if math.isfinite(number) and abs(number) <= MAX_INTEGER else text


def open_binary(file: Path) -> IO[bytes]:
    """Opens a file, decompressed if its content is gzip: a server may have unpacked a .gz in transit."""
    with file.open("rb") as start:
        compressed = start.read(2) == _GZIP
    return cast(IO[bytes], gzip.open(file)) if compressed else file.open("rb")


def open_text(file: Path) -> IO[str]:
    """Opens a text file, decompressed as by `open_binary`."""
    return io.TextIOWrapper(open_binary(file), newline="", encoding="utf-8-sig")


def read_error(title: str, where: str, error: Exception) -> LookalikeError:
    return LookalikeError(f"{title}, {where}: {error}.", "Write the complete table again, as UTF-8.")


def _read_csv(file: Path, title: str) -> Table:
    lines = _csv_lines(file, title)
    _, columns = next(lines, (0, []))
    if repeated := sorted({column for column in columns if columns.count(column) > 1}):
        raise LookalikeError(f"{title} has two columns {repeated[0]!r}.", "Give every column its own name.")
    return Table(columns, _csv_rows(columns, lines), is_text=True)


def _csv_lines(file: Path, title: str) -> Iterator[tuple[int, list[str]]]:
    number = 0
    try:
        with open_text(file) as text:
            reader = csv.reader(text)
            for fields in reader:
                number = reader.line_num
                if fields:
                    yield number, fields
    except READ_ERRORS as error:
        raise read_error(title, f"after line {number}", error) from None


def _csv_rows(columns: list[str], lines: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    for number, fields in lines:
        where = f"line {number}"
        if len(fields) == len(columns):
            yield Row(where, {column: cell or None for column, cell in zip(columns, fields, strict=True)})
        else:
            yield Row(where, {}, f"{count(len(fields), 'field')} under {count(len(columns), 'column')}")


def count(number: int, name: str) -> str:
    """Returns `1 field` or `2 fields`."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _read_json_lines(file: Path, title: str) -> Table:
    return Table(None, _json_rows(file, title))


def _json_rows(file: Path, title: str) -> Iterator[Row]:
    number = 0
    try:
        with open_text(file) as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield _json_row(f"line {number}", line)
    except READ_ERRORS as error:
        raise read_error(title, f"after line {number}", error) from None


def _json_row(where: str, line: str) -> Row:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(where, {}, f"not valid JSON: {error}")
    if not isinstance(values, dict):
        return Row(where, {}, "not a JSON object")
    return Row(where, values)


def _read_parquet(file: Path, title: str) -> Table:
    pyarrow, parquet = require("pyarrow", extra="parquet"), require("pyarrow.parquet", extra="parquet")
    try:
        table = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise LookalikeError(f"{title} is not a Parquet table: {error}", "Write it again.") from None
    return Table(list(table.schema_arrow.names), _parquet_rows(table, title))


def _parquet_rows(table: Any, title: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    with table:
        try:
            for batch in table.iter_batches(_BATCH_ROWS):
                for values in _without_nanoseconds(batch).to_pylist():
                    number += 1
                    yield Row(f"row {number}", values)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise read_error(title, f"after row {number}", error) from None


def _without_nanoseconds(batch: Any) -> Any:
    """Casts times to microseconds, the finest that Python has: pyarrow refuses to convert nanoseconds."""
    import pyarrow

    for position, field in enumerate(batch.schema):
        if pyarrow.types.is_timestamp(field.type) and field.type.unit == "ns":
            coarse = pyarrow.timestamp("us", field.type.tz)
        elif pyarrow.types.is_time64(field.type) and field.type.unit == "ns":
            coarse = pyarrow.time64("us")
        else:
            continue
        batch = batch.set_column(position, field.name, batch.column(position).cast(coarse, safe=False))
    return batch


_READERS: dict[str, Callable[[Path, str], Table]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
}
