"""Checks every photo before a long run: what cannot be decoded is reported and left out.

Good photos are cached by path, size and modification time, so that the next run checks only new ones.
"""

import io
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from PIL import ExifTags, Image, ImageOps

from index._util.files import cache_folder
from index._util.system import usable_cores
from index.embedding.images import DEFAULT_LIMITS, ImageError, decode
from training.callbacks import Progress
from training.data.dataset import DataSet, Photo, check_usable, count_noun, list_counts, visible_part
from training.errors import TrainingError

_PART = 512
_MAX_THREADS = 8
_EXAMPLES = 3
_SCHEMA = """
CREATE TABLE IF NOT EXISTS good (
    path TEXT, box TEXT, size INTEGER NOT NULL, changed INTEGER NOT NULL, PRIMARY KEY (path, box)
) WITHOUT ROWID
"""


def check_photos(data: DataSet, *, cache: Path | None = None, on_progress: Progress | None = None) -> DataSet:
    """Leaves out the photos that cannot be read; remarks name them by class and reason."""
    photos = list(dict.fromkeys((*data.train, *data.test)))
    bad: dict[Photo, str] = {}
    file = cache or cache_folder() / "checked-photos.sqlite"
    with closing(_open_record(file)) as record, ThreadPoolExecutor(min(_MAX_THREADS, usable_cores())) as pool:
        for start in range(0, len(photos), _PART):
            part = photos[start : start + _PART]
            bad |= _check_part(part, record, pool)
            if on_progress:
                on_progress(start + len(part), len(photos))
    if not bad:
        return data
    remarks = _remarks(bad)
    try:
        kept = replace(
            data,
            train=tuple(photo for photo in data.train if photo not in bad),
            test=tuple(photo for photo in data.test if photo not in bad),
            remarks=(*data.remarks, *remarks),
        )
        return check_usable(kept) if data.test else kept
    except TrainingError as error:
        raise TrainingError(f"{error.problem} {' '.join(remarks)}", error.remedy) from None


def _check_part(photos: list[Photo], record: sqlite3.Connection, pool: ThreadPoolExecutor) -> dict[Photo, str]:
    known = "SELECT 1 FROM good WHERE path = ? AND box = ? AND size = ? AND changed = ?"
    bad, new = {}, []
    for photo in photos:
        try:
            facts = photo.path.stat()
        except OSError as error:
            bad[photo] = f"The file cannot be read: {error.strerror}."
            continue
        fingerprint = (str(photo.path.absolute()), str(photo.box or ""), facts.st_size, facts.st_mtime_ns)
        if not record.execute(known, fingerprint).fetchone():
            new.append((photo, fingerprint))
    problems = pool.map(photo_problem, [photo for photo, _ in new])
    good = []
    for (photo, fingerprint), problem in zip(new, problems, strict=True):
        if problem:
            bad[photo] = problem
        else:
            good.append(fingerprint)
    if good:
        # One transaction per part: a killed check continues from there.
        with record:
            record.executemany("INSERT OR REPLACE INTO good VALUES (?, ?, ?, ?)", good)
    return bad


def photo_problem(photo: Photo) -> str | None:
    """Returns why a photo cannot be used, or None."""
    try:
        size = _upright_size(photo.path.read_bytes())
    except ImageError as error:
        return error.problem
    except OSError as error:
        return f"The file cannot be read: {error.strerror}."
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
