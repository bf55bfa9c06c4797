"""A team's own photos as a table, in the columns of open-metric-learning: `label`, `path`, `split`, `is_query`…"""

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from training.data.dataset import Box, DataSet, Photo, listed_data, split_by_class, without_missing
from training.errors import TrainingError

_REQUIRED = ("label", "path")
_BOX = ("x_1", "y_1", "x_2", "y_2")
_KNOWN = (*_REQUIRED, "split", "is_query", "is_gallery", *_BOX)
_EMPTY = ("", "none", "nan", "null")

Row = dict[str, str]


def load_table(file: Path) -> DataSet:
    """A CSV or Parquet table; without a `split` column a third of the classes is kept for measuring."""
    if not file.is_file():
        raise TrainingError(f"No table at {file}.", f"Name a CSV or Parquet file with columns {', '.join(_KNOWN)}.")
    columns, rows = _read_parquet(file) if file.suffix.lower() in (".parquet", ".pq") else _read_csv(file)
    missing = [column for column in _REQUIRED if column not in columns]
    partial = [column for column in _BOX if column not in columns] if set(_BOX) & set(columns) else []
    if missing or partial:
        lacking = " and no ".join(map(repr, missing + partial))
        raise TrainingError(
            f"{file} has no column {lacking}; it has {', '.join(columns) or 'none'}.",
            "Give `label` and `path`; `split`, `is_query`, `is_gallery` and `x_1`, `y_1`, `x_2`, `y_2` are optional.",
        )
    train: list[Photo] = []
    test: list[Photo] = []
    for place, row in rows:
        try:
            (train if _split(row) == "train" else test).append(_photo(row, file.parent))
        except ValueError as error:
            raise TrainingError(f"{place}: {error}.", "Mend the row.") from None
    if not train and not test:
        raise TrainingError(f"{file} has no rows.", "Give a row for each photo.")
    if "split" in columns:
        return listed_data(file.stem, train, test)
    return split_by_class(file.stem, *without_missing(file.stem, test))


def _photo(row: Row, folder: Path) -> Photo:
    label, path = row["label"].strip(), row["path"].strip()
    if label.lower() in _EMPTY or not path:
        raise ValueError("a row needs a label and a path")
    if _split(row) == "train":
        return Photo(folder / path, label, _box(row))
    return Photo(folder / path, label, _box(row), _flag(row, "is_query"), _flag(row, "is_gallery"))


def _split(row: Row) -> str:
    split = row.get("split", "validation").strip()
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}, not 'train' or 'validation'")
    return split


def _flag(row: Row, column: str) -> bool:
    text = row.get(column, "true").strip().lower()
    if text in ("true", "1", "1.0"):
        return True
    if text in ("false", "0", "0.0"):
        return False
    raise ValueError(f"{column} is {row[column]!r}, not True or False")


def _box(row: Row) -> Box | None:
    texts = [row.get(column, "").strip() for column in _BOX]
    if all(text.lower() in _EMPTY for text in texts):
        return None
    try:
        left, top, right, bottom = (float(text) for text in texts)
    except ValueError:
        raise ValueError(f"the box {', '.join(texts)} is not four numbers") from None
    if not (0 <= left < right < math.inf and 0 <= top < bottom < math.inf):
        raise ValueError(f"the box {', '.join(texts)} must have 0 <= x_1 < x_2 and 0 <= y_1 < y_2")
    # Outwards, so that a thin box never becomes empty.
    return math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)


def _read_csv(file: Path) -> tuple[list[str], Iterator[tuple[str, Row]]]:
    rows = _csv_rows(file)
    _, header = next(rows, ("", []))
    columns = [column.strip() for column in header]
    return columns, _as_rows(columns, rows)


def _csv_rows(file: Path) -> Iterator[tuple[str, list[str]]]:
    with file.open(newline="", encoding="utf-8-sig") as text:
        reader = csv.reader(text)
        try:
            for fields in reader:
                if fields:
                    yield f"{file}, line {reader.line_num}", fields
        except (csv.Error, UnicodeDecodeError) as error:
            raise TrainingError(f"{file}, after line {reader.line_num}: {error}.", "Save it as UTF-8 CSV.") from None


def _as_rows(columns: list[str], rows: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[str, Row]]:
    for place, fields in rows:
        if len(fields) != len(columns):
            raise TrainingError(f"{place}: {len(fields)} fields under {len(columns)} columns.", "Mend the row.")
        yield place, dict(zip(columns, fields, strict=True))


def _read_parquet(file: Path) -> tuple[list[str], Iterator[tuple[str, Row]]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise TrainingError(
            f"{file} is a Parquet table, which needs pyarrow.", "Run `pip install pyarrow`, or save the table as CSV."
        ) from None
    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise TrainingError(f"{file} is no Parquet table: {error}", "Write it anew.") from None
    columns = [column for column in table.column_names if column in _KNOWN]
    values = table.select(columns).to_pylist()
    rows = ({column: "" if value is None else str(value) for column, value in row.items()} for row in values)
    return list(table.column_names), ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))
