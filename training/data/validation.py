"""Checks every photo before a long run: what cannot be decoded is left out, what occurs twice is reported.

Good photos are cached with their digests by path, size and modification time, so that the next run checks only new
ones.
"""

import csv
import hashlib
import io
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import ExifTags, Image, ImageOps

from index._util.files import atomic_write, cache_folder
from index._util.system import usable_cores
from index.embedding.images import DEFAULT_LIMITS, ImageError, decode
from index.ingest.rejects import escape_formulas
from training.callbacks import Progress
from training.data.dataset import DataSet, Photo, check_learnable, check_usable, count_noun, list_counts, visible_part
from training.errors import TrainingError

_PART = 512
_MAX_THREADS = 8
_EXAMPLES = 3
UNREADABLE, DUPLICATES = "unreadable.csv", "duplicates.csv"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS readable (
    path TEXT, box TEXT, size INTEGER NOT NULL, changed INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (path, box)
) WITHOUT ROWID
"""


class _Checked(NamedTuple):
    """A photo after its check: either a problem, or a digest of its bytes."""

    problem: str | None
    digest: bytes = b""


def check_photos(
    data: DataSet, *, cache: Path | None = None, reports: Path | None = None, on_progress: Progress | None = None
) -> DataSet:
    """Leaves out the photos that cannot be read; remarks name them by class and reason, and describe duplicates.

    All of them are listed in the folder `reports`, in `unreadable.csv` and `duplicates.csv`.
    """
    photos = list(dict.fromkeys((*data.train, *data.test)))
    checked: dict[Photo, _Checked] = {}
    file = cache or cache_folder() / "checked-photos.sqlite"
    with closing(_open_record(file)) as record, ThreadPoolExecutor(min(_MAX_THREADS, usable_cores())) as pool:
        for start in range(0, len(photos), _PART):
            part = photos[start : start + _PART]
            checked |= _check_part(part, record, pool)
            if on_progress:
                on_progress(start + len(part), len(photos))
    bad = {photo: problem for photo in photos if (problem := checked[photo].problem)}
    data = _report_duplicates(data, {photo: checked[photo].digest for photo in photos if photo not in bad}, reports)
    if not bad:
        return data
    remarks = _remarks(bad)
    if reports:
        rows = [(str(photo.path), photo.label, problem) for photo, problem in bad.items()]
        remarks.append(f"All are listed in {_write_csv(reports / UNREADABLE, ('path', 'class', 'problem'), rows)}.")
    try:
        kept = replace(
            data,
            train=tuple(photo for photo in data.train if photo not in bad),
            test=tuple(photo for photo in data.test if photo not in bad),
            remarks=(*data.remarks, *remarks),
        )
        if data.train:
            check_learnable(kept)
        return check_usable(kept) if data.test else kept
    except TrainingError as error:
        raise TrainingError(f"{error.problem} {' '.join(remarks)}", error.remedy) from None


def _check_part(photos: list[Photo], record: sqlite3.Connection, pool: ThreadPoolExecutor) -> dict[Photo, _Checked]:
    known = "SELECT digest FROM readable WHERE path = ? AND box = ? AND size = ? AND changed = ?"
    checked, new = {}, []
    for photo in photos:
        try:
            facts = photo.path.stat()
        except OSError as error:
            checked[photo] = _Checked(f"The file cannot be read: {error.strerror}.")
            continue
        fingerprint = (str(photo.path.absolute()), str(photo.box or ""), facts.st_size, facts.st_mtime_ns)
        if row := record.execute(known, fingerprint).fetchone():
            checked[photo] = _Checked(None, row[0])
        else:
            new.append((photo, fingerprint))
    results = pool.map(_check_photo, [photo for photo, _ in new])
    good = []
    for (photo, fingerprint), result in zip(new, results, strict=True):
        checked[photo] = result
        if not result.problem:
            good.append((*fingerprint, result.digest))
    if good:
        # One transaction per part: a killed check continues from there.
        with record:
            record.executemany("INSERT OR REPLACE INTO readable VALUES (?, ?, ?, ?, ?)", good)
    return checked


def _check_photo(photo: Photo) -> _Checked:
    try:
        data = photo.path.read_bytes()
    except OSError as error:
        return _Checked(f"The file cannot be read: {error.strerror}.")
    return _Checked(photo_problem(photo, data), hashlib.blake2b(data, digest_size=16).digest())


def photo_problem(photo: Photo, data: bytes) -> str | None:
    """Returns why a photo with this file content cannot be used, or None."""
    try:
        size = _upright_size(data)
    except ImageError as error:
        return error.problem
    if photo.box and not visible_part(photo.box, size):
        return f"The box {photo.box} is outside the image of {size[0]} x {size[1]} pixels."
    return None


def _upright_size(data: bytes) -> tuple[int, int]:
    """Decodes a file, a JPEG at an eighth of its size: broken bytes show there too."""
    # If this fails, the decoder that training uses decides, and words the message.
    with suppress(Exception), Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        width, height = image.size
        if len(data) <= DEFAULT_LIMITS.max_bytes and width * height <= DEFAULT_LIMITS.max_pixels:
            image.draft(None, (max(1, width // 8), max(1, height // 8)))
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)
            ImageOps.exif_transpose(image).load()
            return (height, width) if turned else (width, height)
    return decode(data).size


def _remarks(bad: dict[Photo, str]) -> list[str]:
    classes = Counter(photo.label for photo in bad)
    photos = count_noun(len(bad), "photo cannot be read and is", "photos cannot be read and are")
    examples = [f"{photo.path} (class {photo.label}): {problem}" for photo, problem in list(bad.items())[:_EXAMPLES]]
    return [f"{photos} left out, of {count_noun(len(classes), 'class', 'classes')}: {list_counts(classes)}.", *examples]


def _report_duplicates(data: DataSet, digests: dict[Photo, bytes], reports: Path | None) -> DataSet:
    """Adds remarks on photos whose files are equal byte for byte, and lists them."""
    test = set(data.test)
    groups: dict[tuple[bytes, object], list[Photo]] = {}
    for photo, digest in digests.items():
        groups.setdefault((digest, photo.box), []).append(photo)
    equal = [group for group in groups.values() if len(group) > 1]
    mixed = [group for group in equal if len({photo.label for photo in group}) > 1]
    across = [group for group in mixed if 0 < sum(photo in test for photo in group) < len(group)]
    alike = [group for group in equal if len({p.label for p in group}) == 1 and any(p in test for p in group)]
    remarks = []
    if mixed:
        examples = [" = ".join(f"{p.path} (class {p.label})" for p in group[:2]) for group in mixed[:_EXAMPLES]]
        found = count_noun(len(mixed), "photo has", "photos have")
        remarks += [
            f"{found} two or more classes, {len(across):,} of them both to learn and to measure; the figures suffer:",
            *examples,
        ]
    if alike:
        found = count_noun(len(alike), "test photo occurs", "test photos occur")
        remarks.append(f"{found} more than once in its class, which raises recall.")
    if remarks and reports:
        rows = [
            (str(number), str(p.path), p.label, "measure" if p in test else "learn")
            for number, group in enumerate([*mixed, *alike], 1)
            for p in group
        ]
        file = _write_csv(reports / DUPLICATES, ("group", "path", "class", "use"), rows)
        remarks.append(f"All are listed in {file}.")
    return replace(data, remarks=(*data.remarks, *remarks)) if remarks else data


def _write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_write(file) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as text,
    ):
        csv.writer(text).writerows([header, *(map(escape_formulas, row) for row in rows)])
    return file


def _open_record(file: Path) -> sqlite3.Connection:
    """Opens the cache of good photos, shared by all runs of this user."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        record = sqlite3.connect(file, timeout=30)
        record.execute(_SCHEMA)
    except (sqlite3.DatabaseError, OSError) as error:
        raise TrainingError(
            f"The cache of checked photos at {file} is not usable: {error}.",
            "Delete it, or set XDG_CACHE_HOME to a folder that can be written.",
        ) from error
    return record
