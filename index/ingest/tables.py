"""Tables: CSV, JSON lines and Parquet as one stream of rows, however long, each with its place for messages."""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, NamedTuple

from index.errors import LookalikeError
from index.gallery.types import MAX_INTEGER

FORMATS = ".csv, .jsonl, .ndjson, .csv.gz, .jsonl.gz, .ndjson.gz, .parquet, .pq"
_GZIP = b"\x1f\x8b"
_BATCH = 1024
# A leading zero makes a code rather than a number, and codes must keep it.
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error)


class Row(NamedTuple):
    """A row's values, None where absent, or what is wrong with it."""

    where: str
    values: dict[str, Any]
    problem: str = ""


class Table(NamedTuple):
    """A table on this machine; `columns` is None where every row names its own."""

    columns: list[str] | None
    rows: Iterator[Row]


def open_table(file: Path, name: str, shown: str) -> Table:
    """The table in `file`, of the format that `name` ends in; messages call it `shown`."""
    lowered = name.lower()
    reader = _READERS.get(Path(lowered.removesuffix(".gz")).suffix)
    if reader is None or (reader is _read_parquet and lowered.endswith(".gz")):
        raise LookalikeError(
            f"{shown} is no table of a known format.",
            f"Its name must end in one of {FORMATS}; a folder of photos must lie on this machine.",
        )
    return reader(file, shown)


def plain(value: Any) -> Any:
    """A value of a typed table as an attribute: dates as ISO texts, decimals as numbers; None if absent."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def typed(text: str) -> str | int | float | bool:
    """A CSV cell: numbers become numbers, so that prices compare, true and false booleans; all else stays text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not _NUMBER.fullmatch(text):
        return text
    digits = text.removeprefix("-").isdigit()
    if digits and len(text) > 17:
        return text
    number = int(text) if digits else float(text)
    return number if math.isfinite(number) and abs(number) <= MAX_INTEGER else text


def _text(file: Path) -> IO[str]:
    """Decompressed by what the file is: a server may have unpacked a .gz on the way."""
    with file.open("rb") as start:
        compressed = start.read(2) == _GZIP
    if compressed:
        return gzip.open(file, "rt", newline="", encoding="utf-8-sig")
    return file.open(newline="", encoding="utf-8-sig")


def _unreadable(shown: str, where: str, error: Exception) -> LookalikeError:
    return LookalikeError(f"{shown}, {where}: {error}.", "Write the table anew, whole and as UTF-8.")


def _read_csv(file: Path, shown: str) -> Table:
    lines = _csv_lines(file, shown)
    _, columns = next(lines, (0, []))
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise LookalikeError(f"{shown} has two columns {twice[0]!r}.", "Give every column its own name.")
    return Table(columns, _csv_rows(columns, lines))


def _csv_lines(file: Path, shown: str) -> Iterator[tuple[int, list[str]]]:
    number = 0
    try:
        with _text(file) as text:
            reader = csv.reader(text)
            for fields in reader:
                number = reader.line_num
                if fields:
                    yield number, fields
    except _UNREADABLE as error:
        raise _unreadable(shown, f"after line {number}", error) from None


def _csv_rows(columns: list[str], lines: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    for number, fields in lines:
        where = f"line {number}"
        if len(fields) == len(columns):
            yield Row(where, {column: cell or None for column, cell in zip(columns, fields, strict=True)})
        else:
            yield Row(where, {}, f"{len(fields)} fields under {len(columns)} columns")


def _read_json_lines(file: Path, shown: str) -> Table:
    return Table(None, _json_rows(file, shown))


def _json_rows(file: Path, shown: str) -> Iterator[Row]:
    number = 0
    try:
        with _text(file) as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield _json_row(f"line {number}", line)
    except _UNREADABLE as error:
        raise _unreadable(shown, f"after line {number}", error) from None


def _json_row(where: str, line: str) -> Row:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(where, {}, f"no JSON: {error}")
    if not isinstance(values, dict):
        return Row(where, {}, "no JSON object")
    return Row(where, values)


def _read_parquet(file: Path, shown: str) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise LookalikeError(
            f"{shown} is a Parquet table, which needs pyarrow.", 'Run: pip install "lookalike[parquet]"'
        ) from None
    try:
        table = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise LookalikeError(f"{shown} is no Parquet table: {error}", "Write it anew.") from None
    return Table(list(table.schema_arrow.names), _parquet_rows(table, shown))


def _parquet_rows(table: Any, shown: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    with table:
        try:
            for batch in table.iter_batches(_BATCH):
                for values in _without_nanoseconds(batch).to_pylist():
                    number += 1
                    yield Row(f"row {number}", values)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _unreadable(shown, f"after row {number}", error) from None


def _without_nanoseconds(batch: Any) -> Any:
    """Python's times end at microseconds, and pyarrow refuses to convert finer ones."""
    import pyarrow

    for place, field in enumerate(batch.schema):
        if pyarrow.types.is_timestamp(field.type) and field.type.unit == "ns":
            coarse = pyarrow.timestamp("us", field.type.tz)
        elif pyarrow.types.is_time64(field.type) and field.type.unit == "ns":
            coarse = pyarrow.time64("us")
        else:
            continue
        batch = batch.set_column(place, field.name, batch.column(place).cast(coarse, safe=False))
    return batch


_READERS: dict[str, Callable[[Path, str], Table]] = {
    ".csv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
}
