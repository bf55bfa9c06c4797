"""A team's own photos as a table, in the columns of open-metric-learning: `label`, `path`, `split`, `is_query`…"""

import math
from pathlib import Path

from index.ingest.tables import open_table
from training.data.dataset import Box, DataSet, Photo, data_from_lists, drop_missing, split_by_class
from training.errors import TrainingError

_REQUIRED = ("label", "path")
_BOX = ("x_1", "y_1", "x_2", "y_2")
_KNOWN = (*_REQUIRED, "split", "is_query", "is_gallery", *_BOX)
_EMPTY = ("", "none", "nan", "null")

Row = dict[str, str]


def load_table(file: Path) -> DataSet:
    """Reads a CSV, Parquet or JSON-lines table; without a `split` column a third of the classes is held out."""
    if not file.is_file():
        raise TrainingError(f"No table at {file}.", f"Name a CSV or Parquet file with columns {', '.join(_KNOWN)}.")
    table = open_table(file, file.name, str(file))
    rows = list(table.rows)
    columns = list(dict.fromkeys(table.columns or (column for row in rows for column in row.values)))
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
    for row in rows:
        texts = {column: "" if value is None else str(value).strip() for column, value in row.values.items()}
        try:
            if row.problem:
                raise ValueError(row.problem)
            (train if _split(texts) == "train" else test).append(_photo(texts, file.parent))
        except ValueError as error:
            raise TrainingError(f"{file}, {row.where}: {error}.", "Correct the row.") from None
    if not rows:
        raise TrainingError(f"{file} has no rows.", "Give one row per photo.")
    if "split" in columns:
        return data_from_lists(file.stem, train, test)
    return split_by_class(file.stem, *drop_missing(file.stem, test))


def _photo(row: Row, folder: Path) -> Photo:
    label, path = row.get("label", ""), row.get("path", "")
    if label.lower() in _EMPTY or not path:
        raise ValueError("a row needs a label and a path")
    if _split(row) == "train":
        return Photo(folder / path, label, _box(row))
    return Photo(folder / path, label, _box(row), _flag(row, "is_query"), _flag(row, "is_gallery"))


def _split(row: Row) -> str:
    split = row.get("split", "validation")
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}, not 'train' or 'validation'")
    return split


def _flag(row: Row, column: str) -> bool:
    text = row.get(column, "true").lower()
    if text in ("true", "1", "1.0"):
        return True
    if text in ("false", "0", "0.0"):
        return False
    raise ValueError(f"{column} is {row[column]!r}, not True or False")


def _box(row: Row) -> Box | None:
    texts = [row.get(column, "") for column in _BOX]
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
