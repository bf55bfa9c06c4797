"""A team's own photos as a table: the catalogue that `reindex` reads, or the columns of open-metric-learning.

The columns `label` and `path` are also read from `item_id` and `image`, and from others that the specification maps:
`table:catalogue.csv,item_id=sku,image=photo`. A run keeps its specification, so later commands read the same columns.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from index.ingest.feeds import open_catalogue
from index.ingest.places import local_path, url_scheme
from training.data.dataset import Box, DataSet, Photo, count_noun, data_from_lists, drop_missing, split_by_class
from training.errors import TrainingError

_REQUIRED = ("label", "path")
_SYNONYMS = {"label": "item_id", "path": "image"}
"""Columns of the tables that a gallery is built from, read where the own column is missing."""
_BOX = ("x_1", "y_1", "x_2", "y_2")
_KNOWN = (*_REQUIRED, "split", "is_query", "is_gallery", *_BOX)
_TEST_SPLITS = ("validation", "test")
_EMPTY = ("", "none", "nan", "null")
_EXAMPLES = 3

_IMAGES = "images"
"""Key of the specification for the folder that image paths are relative to."""
_KEYS = (*_KNOWN, *_SYNONYMS.values(), _IMAGES)
_MAPPING = re.compile(rf",({'|'.join(_KEYS)})=([^,]+)$")

Row = dict[str, str]


class TableSpec(NamedTuple):
    file: Path
    columns: dict[str, str]
    folder: Path


def extend_spec(spec: str, columns: Sequence[str], images: str | None) -> str:
    """Returns the specification of a table with NAME=COLUMN pairs and a folder of images added to it."""
    pairs = [*columns, *([f"{_IMAGES}={images}"] if images else [])]
    if pairs and not spec.startswith("table:"):
        raise TrainingError(f"--column and --images belong to a table, not to {spec!r}.", "Use --data table:FILE.")
    for pair in pairs:
        if not _MAPPING.fullmatch(f",{pair}"):
            raise TrainingError(f"--column {pair!r} is unknown.", f"Give NAME=COLUMN; names are {', '.join(_KEYS)}.")
    return ",".join([spec, *pairs])


def parse_spec(spec: Path) -> TableSpec:
    """Splits `FILE,item_id=sku,...` into the file, its columns and the folder of the images."""
    text, columns = str(spec), dict[str, str]()
    while not Path(text).exists() and (found := _MAPPING.search(text)):
        columns.setdefault(found[1], found[2])
        text = text[: found.start()]
    images = columns.pop(_IMAGES, None)
    return TableSpec(Path(text), columns, Path(images).expanduser() if images else Path(text).parent)


def load_table(spec: Path) -> DataSet:
    """Reads a CSV, Parquet or JSON-lines table; without a `split` column a third of the classes is held out."""
    table = parse_spec(spec)
    file = table.file
    photos, left_out = _read_rows(table)
    splits = {split for split, _ in photos}
    if splits == {None}:
        found, missing = drop_missing(file.stem, [photo for _, photo in photos])
        return split_by_class(file.stem, found, (*left_out, *missing))
    train = [photo for split, photo in photos if split == "train"]
    both = "split has validation and test rows: all of them are measured, and none chooses the epoch."
    remarks = [*left_out, *([both] if splits.issuperset(_TEST_SPLITS) else [])]
    return data_from_lists(file.stem, train, [photo for split, photo in photos if split != "train"], remarks)


def read_table(spec: Path) -> tuple[tuple[Photo, ...], tuple[str, ...]]:
    """Returns all photos of a table whatever their split, and remarks on bad rows and missing files."""
    table = parse_spec(spec)
    photos, left_out = _read_rows(table)
    found, missing = drop_missing(table.file.stem, [photo for _, photo in photos])
    return found, (*left_out, *missing)


def _read_rows(spec: TableSpec) -> tuple[list[tuple[str | None, Photo]], tuple[str, ...]]:
    """Returns the split and the photo of each image, and a remark on bad rows.

    The splits are None without such a column. A row without a product or photo is left out, as `reindex` does; a wrong
    split or box changes what is measured, so it is an error.
    """
    file = spec.file
    if not file.is_file():
        raise TrainingError(f"No table at {file}.", f"Name a CSV or Parquet file with columns {', '.join(_KNOWN)}.")
    mapped = [(spec.columns.get(name) or spec.columns.get(other), name, other) for name, other in _SYNONYMS.items()]
    required = [[column] if column else [name, other] for column, name, other in mapped]
    table = open_catalogue(file, file.name, str(file), columns=required)
    rows = list(table.rows)
    columns = list(dict.fromkeys(table.columns or (column for row in rows for column in row.values)))
    named = _find_columns(spec, columns)
    photos: list[tuple[str | None, Photo]] = []
    bad: list[str] = []
    for row in rows:
        values = {name: row.values[column] for name, column in named.items() if column in row.values}
        try:
            if problem := row.problem or _find_gap(values, named):
                bad.append(f"{row.where} ({problem})")
                continue
            photos += [(split if "split" in named else None, photo) for split, photo in _photos(values, spec.folder)]
        except ValueError as error:
            raise TrainingError(f"{file}, {row.where}: {error}.", "Correct the row.") from None
    if not rows:
        raise TrainingError(f"{file} has no rows.", "Give one row per photo.")
    if not photos:
        raise TrainingError(f"{file} has no usable row, such as {bad[0]}.", "Correct the rows.")
    return photos, (_describe_bad(file, bad),) if bad else ()


def _find_gap(values: dict[str, Any], named: dict[str, str]) -> str | None:
    """Returns what a row lacks: its product, or one of its photos."""
    paths = values.get("path")
    given = {"label": [values.get("label")], "path": (paths or [None]) if isinstance(paths, list) else [paths]}
    for name in _REQUIRED:
        if any(_is_empty(value, name) for value in given[name]):
            return f"no value for {named[name]!r}"
    return None


def _is_empty(value: Any, name: str) -> bool:
    text = "" if value is None else str(value).strip()
    return text.lower() in _EMPTY if name == "label" else not text


def _describe_bad(file: Path, bad: list[str]) -> str:
    more = f" and {len(bad) - _EXAMPLES:,} more" if len(bad) > _EXAMPLES else ""
    return f"{count_noun(len(bad), 'row is', 'rows are')} left out of {file.name}: {', '.join(bad[:_EXAMPLES])}{more}."


def _find_columns(spec: TableSpec, columns: list[str]) -> dict[str, str]:
    """Returns the column of each known name that the table has; raises an error if a required one is missing."""
    mapped = {name: spec.columns.get(name, spec.columns.get(_SYNONYMS.get(name, ""))) for name in _KNOWN}
    named = {
        name: column or (_SYNONYMS[name] if name in _SYNONYMS and name not in columns else name)
        for name, column in mapped.items()
    }
    boxed = any(named[name] in columns for name in _BOX)
    wanted = [name for name in _KNOWN if name in _REQUIRED or mapped[name] or (boxed and name in _BOX)]
    if missing := [mapped[name] or name for name in wanted if named[name] not in columns]:
        raise TrainingError(
            f"{spec.file} has no column {' and no '.join(map(repr, missing))}; it has {', '.join(columns) or 'none'}.",
            "Give `item_id` and `image`, or `label` and `path`, or map other names: --column item_id=sku. `split`, "
            "`is_query`, `is_gallery` and `x_1`, `y_1`, `x_2`, `y_2` are optional.",
        )
    return {name: column for name, column in named.items() if column in columns}


def _photos(values: dict[str, Any], folder: Path) -> list[tuple[str, Photo]]:
    """Returns the split and the photo of each image of a row, whose `path` may be a list."""
    value = values.get("path")
    paths = value if isinstance(value, list) else [value]
    row = {name: "" if value is None else str(value).strip() for name, value in values.items()}
    box = _box(row)
    if len(paths) > 1 and box:
        raise ValueError(f"a box belongs to one image, not to {len(paths)}")
    return [(_split(row), _photo(row, folder, str(path or "").strip(), box)) for path in paths or [""]]


def _photo(row: Row, folder: Path, path: str, box: Box | None) -> Photo:
    label = row["label"]
    if url_scheme(path):
        raise ValueError(f"{path[:200]} is an address; training reads files: download the photos, and name their paths")
    photo = Photo(folder / local_path(path), label, box)
    if _split(row) == "train":
        return photo
    return photo._replace(is_query=_flag(row, "is_query"), is_gallery=_flag(row, "is_gallery"))


def _split(row: Row) -> str:
    split = row.get("split", "validation")
    if split not in ("train", *_TEST_SPLITS):
        raise ValueError(f"split is {split!r}, not 'train', 'validation' or 'test'")
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
