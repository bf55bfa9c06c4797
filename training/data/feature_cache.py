"""Outputs of the frozen part of a backbone, computed once per photo: the other layers train in a fraction of the time.

Photos to learn from are run in a few augmented views, of which an epoch of training reads one; photos to measure on
are run as they are served. A row is what the caller's network returns for a photo: pooled features, a feature map or
tokens. The rows of one network and one way to show photos form a table of two files: `rows` holds the values and is
memory-mapped, `keys` holds a digest of photo and view for each row. Both only grow, under a lock, so that runs with
other photos, losses, folds or seeds share what they have in common, and a killed run continues. The name of a table is
a digest of everything else that its values depend on, so it is never stale.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from index.embedding.images import Fit, Preprocessing
from training.callbacks import Progress
from training.config import AugmentationSettings
from training.data.dataset import Photo
from training.data.torch_datasets import MeasuredPhotos, SeedlessPhotos, number_classes
from training.errors import TrainingError

_LAYOUT = 3
"""Increased whenever the same description would give other values."""
_BATCH = 64
_KEY_BYTES = 16

Rows = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class FeatureCache:
    """The rows of some photos in a table."""

    path: Path
    """The file of the table's values."""
    photos: tuple[Photo, ...]
    table: Rows
    """All rows of the table, mapped rather than read."""
    places: NDArray[np.int64]
    """Views x photos: the row of each."""

    @property
    def features(self) -> Rows:
        """The rows in memory: views x photos x the shape of a row."""
        return self.table[self.places]


class CachedFeatures(Dataset[tuple[torch.Tensor, int]]):
    """Cached rows with class numbers, addressed by (epoch, index): they take the place of `TrainingPhotos`.

    Rows are float16, as they are stored: half of float32 to gather, to collate and to copy to a GPU. The model converts
    a whole batch in one pass.
    """

    def __init__(self, cache: FeatureCache) -> None:
        self._table, self._places = cache.table, cache.places
        self.classes, self.labels = number_classes(cache.photos)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[tuple[torch.Tensor, int]]:
        """Returns a batch, gathered from the file in one call; a DataLoader prefers this to single rows."""
        epochs, indices = zip(*keys, strict=True)
        places = self._places[np.remainder(epochs, len(self._places)), list(indices)]
        rows = torch.from_numpy(self._table[places])
        return [(row, self.labels[index]) for row, index in zip(rows.unbind(), indices, strict=True)]


def cache_bytes(photos: int, views: int, row_shape: Sequence[int]) -> int:
    """Returns the size on disk of the views of photos with rows of this shape."""
    return photos * views * math.prod(row_shape) * np.dtype(np.float16).itemsize


@dataclass(frozen=True)
class FeatureStore:
    """A folder of tables, and the frozen network that computes their rows."""

    directory: Path
    embed: Callable[[torch.Tensor], torch.Tensor]
    """Takes uint8 pixels (NHWC) to one row of any shape each."""
    key: str
    """Describes the network: backbone, weights, stage and pooling."""
    workers: int = 0
    min_free_bytes: int = 2**30
    """Nothing is written that would leave less than this on the disk."""

    def cache_views(
        self,
        photos: Sequence[Photo],
        views: int,
        side: int,
        settings: AugmentationSettings,
        fit: Fit = "crop",
        on_progress: Progress | None = None,
    ) -> FeatureCache:
        """Returns the rows of augmented views of every photo; those that are not in the table yet are computed."""
        if views < 1:
            raise TrainingError(f"{views} views cannot be cached.", "Give one view or more.")
        rule = {"side": side, "fit": fit, "augmentation": settings.model_dump(mode="json")}
        dataset = SeedlessPhotos(photos, side, settings, fit)
        return self._fill(photos, views, rule, "<f2", _Views(dataset), on_progress)

    def cache_measured(
        self, photos: Sequence[Photo], preprocessing: Preprocessing, on_progress: Progress | None = None
    ) -> FeatureCache:
        """Returns the rows of photos as they are measured and served, in full precision."""
        rule = {"preprocessing": preprocessing.model_dump(mode="json")}
        return self._fill(photos, 1, rule, "<f4", _Measured(MeasuredPhotos(photos, preprocessing)), on_progress)

    def size(self) -> int:
        """Returns the bytes of all tables in the folder."""
        return sum(path.stat().st_size for path in self.directory.glob("features-*"))

    def _fill(
        self,
        photos: Sequence[Photo],
        views: int,
        rule: dict[str, Any],
        dtype: str,
        pixels: "_Views | _Measured",
        on_progress: Progress | None,
    ) -> FeatureCache:
        description = {"layout": _LAYOUT, "key": self.key, "pillow": PIL.__version__, "dtype": dtype, **rule}
        name = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
        self.directory.mkdir(parents=True, exist_ok=True)
        prints = [_fingerprint(photo) for photo in photos]
        keys = [_key(fingerprint, view) for view in range(views) for fingerprint in prints]
        with _open_table(self.directory, name, np.dtype(dtype)) as table:
            places_of = dict(zip(reversed(keys), reversed(range(len(keys))), strict=True))  # each key once, its first
            missing = sorted(place for key, place in places_of.items() if key not in table.places)
            batches = [missing[start : start + _BATCH] for start in range(0, len(missing), _BATCH)]
            wanted = ([divmod(place, len(photos)) for place in batch] for batch in batches)
            loader = DataLoader(pixels, batch_sampler=wanted, num_workers=self.workers)
            left = len(missing)
            for batch, images in zip(batches, loader, strict=True):
                with torch.inference_mode():
                    rows = self.embed(images).float().cpu()
                table.append([keys[place] for place in batch], rows, left, self.min_free_bytes)
                left -= len(batch)
                if on_progress:
                    on_progress(len(missing) - left, len(missing))
            places = np.array([table.places[key] for key in keys], np.int64).reshape(views, len(photos))
            return FeatureCache(table.path, tuple(photos), table.map(), places)


@dataclass(frozen=True)
class _Views(Dataset[torch.Tensor]):
    photos: SeedlessPhotos

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        return self.photos[key][0]


@dataclass(frozen=True)
class _Measured(Dataset[torch.Tensor]):
    photos: MeasuredPhotos

    def __getitem__(self, key: tuple[int, int]) -> torch.Tensor:
        return self.photos[key[1]]


class _Table:
    """Two files that grow together; open it with `_open_table`, which holds the lock."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._dtype = path, dtype
        self._keys, self._shape_file = path.with_suffix(".keys"), path.with_suffix(".json")
        self._shape: tuple[int, ...] | None = None
        self._count = 0
        self.places: dict[bytes, int] = {}
        """The row of each key."""
        self._read()

    def _read(self) -> None:
        """Reads the keys, and drops what a killed run wrote last: values without a key, or a part of a row."""
        try:
            self._shape = tuple(json.loads(self._shape_file.read_text(encoding="ascii")))
            keys = self._keys.read_bytes()
        except (FileNotFoundError, ValueError):  # nothing was written, or only in part
            keys = b""
        rows = min(len(keys) // _KEY_BYTES, self.path.stat().st_size // self._row_bytes()) if keys else 0
        for file, size in ((self.path, rows * self._row_bytes()), (self._keys, rows * _KEY_BYTES)):
            if file.exists() and file.stat().st_size > size:
                os.truncate(file, size)
        self.places = {keys[row * _KEY_BYTES : (row + 1) * _KEY_BYTES]: row for row in range(rows)}
        self._count = rows

    def _row_bytes(self) -> int:
        return math.prod(self._shape or ()) * self._dtype.itemsize

    def append(self, keys: Sequence[bytes], rows: torch.Tensor, missing: int, min_free_bytes: int) -> None:
        """Writes rows and then their keys, each synced to the disk: a key stands for a complete row."""
        kind = torch.float16 if self._dtype.itemsize == 2 else torch.float32
        values = rows.to(kind).numpy().astype(self._dtype, copy=False)
        if not np.isfinite(values).all():
            raise TrainingError(
                f"The values to cache reach {rows.abs().max():.3g};"
                f" {8 * self._dtype.itemsize} bits hold up to {np.finfo(self._dtype).max:.0f}.",
                "Cache at another stage (cached_stage), or train without cached_views.",
            )
        if self._shape != values.shape[1:]:
            self._shape = values.shape[1:]
            self._shape_file.write_text(json.dumps(self._shape), encoding="ascii")
        self._check_room(missing, min_free_bytes)
        _append(self.path, values.tobytes())
        _append(self._keys, b"".join(keys))
        self.places |= {key: self._count + number for number, key in enumerate(keys)}
        self._count += len(keys)

    def _check_room(self, missing: int, min_free_bytes: int) -> None:
        needed, free = missing * self._row_bytes(), shutil.disk_usage(self.path.parent).free
        if needed > free - min_free_bytes:
            raise TrainingError(
                f"The cache of {missing:,} views of {'x'.join(map(str, self._shape or ()))} values needs"
                f" {needed / 1e9:.1f} GB more, and {self.path.parent} has {free / 1e9:.1f} GB free.",
                "Use fewer views (cached_views) or a later stage (cached_stage), or free space: "
                f"{min_free_bytes / 1e9:.1f} GB must remain.",
            )

    def map(self) -> Rows:
        """Returns the rows so far; they stay valid while the table grows."""
        return np.memmap(self.path, self._dtype, "r", shape=(self._count, *(self._shape or ())))


@contextmanager
def _open_table(directory: Path, name: str, dtype: np.dtype[Any]) -> Iterator[_Table]:
    """Opens a table alone: of several runs that need the same rows, one computes them."""
    path = directory / f"features-{name}.rows"
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield _Table(path, dtype)


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fingerprint(photo: Photo) -> bytes:
    try:
        facts = photo.path.stat()
    except OSError as error:
        raise TrainingError(f"{photo.path} (class {photo.label}) cannot be used: {error}") from error
    return repr([str(photo.path.absolute()), photo.box, facts.st_size, facts.st_mtime_ns]).encode()


def _key(fingerprint: bytes, view: int) -> bytes:
    return hashlib.blake2b(fingerprint + b" %d" % view, digest_size=_KEY_BYTES).digest()
