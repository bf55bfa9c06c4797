"""Outputs of the frozen part of a backbone, computed once: the remaining layers then train in a fraction of the time.

Every photo is run in a few augmented views, the pixels of the first epochs; an epoch of training then reads one view
of each from a memory-mapped file. A row is what the caller's network returns for a photo: pooled features, a feature
map or tokens. The file name is a digest of everything that its values depend on, so it is never stale.
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
from typing import BinaryIO

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from index._util.files import fsync_directory
from training.callbacks import Progress
from training.config import AugmentationSettings
from training.data.dataset import Photo
from training.data.torch_datasets import TrainingPhotos, number_classes
from training.errors import TrainingError

_LAYOUT = 2
"""Increased whenever the same description would give other values."""
_BATCH = 64
_FLOAT16 = np.dtype("<f2")


@dataclass(frozen=True)
class FeatureCache:
    """A file of outputs of a frozen network, mapped rather than read."""

    path: Path
    photos: tuple[Photo, ...]
    features: NDArray[np.float16]
    """Views x photos x the shape of a row."""


class CachedFeatures(Dataset[tuple[torch.Tensor, int]]):
    """Cached rows with class numbers, addressed by (epoch, index): they take the place of `TrainingPhotos`.

    Rows are float16, as they are stored: half of float32 to gather, to collate and to copy to a GPU. The model converts
    a whole batch in one pass.
    """

    def __init__(self, cache: FeatureCache) -> None:
        self._features = cache.features
        self.classes, self.labels = number_classes(cache.photos)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[tuple[torch.Tensor, int]]:
        """Returns a batch, gathered from the file in one call; a DataLoader prefers this to single rows."""
        epochs, indices = zip(*keys, strict=True)
        rows = torch.from_numpy(self._features[np.remainder(epochs, len(self._features)), list(indices)])
        return [(row, self.labels[index]) for row, index in zip(rows.unbind(), indices, strict=True)]


def cache_bytes(photos: int, views: int, row_shape: Sequence[int]) -> int:
    """Returns the size on disk of a cache with rows of this shape."""
    return photos * views * math.prod(row_shape) * _FLOAT16.itemsize


def cache_features(
    photos: Sequence[Photo],
    embed_features: Callable[[torch.Tensor], torch.Tensor],
    *,
    views: int,
    side: int,
    settings: AugmentationSettings,
    seed: int,
    directory: Path,
    key: str,
    workers: int = 0,
    min_free_bytes: int = 2**30,
    on_progress: Progress | None = None,
) -> FeatureCache:
    """Runs `views` augmented views of every photo through a network, or opens the file of an earlier run.

    `embed_features` takes uint8 pixels (NHWC) to one row of any shape each; `key` describes it: backbone, weights,
    stage and pooling. A killed run's file is continued; of several runs that need the same file, one computes it.
    Nothing is written when the file would leave less than `min_free_bytes` on the disk.
    """
    if views < 1:
        raise TrainingError(f"{views} views cannot be cached.", "Give one view or more.")
    description = {
        "layout": _LAYOUT,
        "key": key,
        "views": views,
        "side": side,
        "settings": settings.model_dump(mode="json"),
        "seed": seed,
        "pillow": PIL.__version__,
        "photos": [_fingerprint(photo) for photo in photos],
    }
    name = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"features-{name}.npy"
    with _lock_file(directory / f".{path.name}.lock"):
        try:
            features = np.load(path, mmap_mode="r")
        except (FileNotFoundError, ValueError, EOFError):  # missing or truncated
            partial = path.with_name(f".{path.name}.partial")
            with partial.open("r+b" if partial.exists() else "w+b") as file:
                writer = _Writer(file, directory, (views, len(photos)), min_free_bytes)
                dataset = TrainingPhotos(photos, side, settings, seed)
                _write_rows(writer, dataset, embed_features, workers, on_progress)
            partial.replace(path)
            fsync_directory(directory)
            features = np.load(path, mmap_mode="r")
    return FeatureCache(path, tuple(photos), features)


def _write_rows(
    writer: "_Writer",
    photos: TrainingPhotos,
    embed_features: Callable[[torch.Tensor], torch.Tensor],
    workers: int,
    on_progress: Progress | None,
) -> None:
    batches = (
        [divmod(row, len(photos)) for row in range(start, min(start + _BATCH, writer.total))]
        for start in range(writer.done, writer.total, _BATCH)
    )
    for pixels, _ in DataLoader(photos, batch_sampler=batches, num_workers=workers):
        with torch.inference_mode():
            rows = embed_features(pixels).float().cpu()
        writer.write(rows)
        if on_progress:
            on_progress(writer.done, writer.total)


class _Writer:
    """A file in NumPy's format that grows batch by batch and continues where an earlier run ended."""

    def __init__(self, file: BinaryIO, directory: Path, shape: tuple[int, int], min_free_bytes: int) -> None:
        self._file, self._directory, self._shape, self._min_free_bytes = file, directory, shape, min_free_bytes
        self.total = math.prod(shape)
        self.done = self._rows_to_keep()

    def _rows_to_keep(self) -> int:
        """Returns how many rows of an earlier run are kept, and truncates the file after them.

        Batches are synced one by one, so that all but the last are safe even after a power cut.
        """
        try:
            np.lib.format.read_magic(self._file)
            shape, _, _ = np.lib.format.read_array_header_1_0(self._file)
        except ValueError:  # no header yet
            self._file.seek(0)
            self._file.truncate()
            return 0
        header, row = self._file.tell(), cache_bytes(1, 1, shape[2:])
        written = (self._file.seek(0, os.SEEK_END) - header) // row
        keep = max(0, written // _BATCH - 1) * _BATCH
        self._file.seek(header + keep * row)
        self._file.truncate()
        return keep

    def write(self, rows: torch.Tensor) -> None:
        values = rows.to(torch.float16).numpy().astype(_FLOAT16, copy=False)
        if not np.isfinite(values).all():
            raise TrainingError(
                f"The values to cache reach {rows.abs().max():.3g}; 16 bits hold up to {np.finfo(_FLOAT16).max:.0f}.",
                "Cache at another stage (cached_stage), or train without cached_views.",
            )
        self._check_room(values.shape[1:])
        if self.done == 0:
            self._file.seek(0)
            self._file.truncate()
            header = {"descr": _FLOAT16.str, "fortran_order": False, "shape": (*self._shape, *values.shape[1:])}
            np.lib.format.write_array_header_1_0(self._file, header)
        self._file.write(values.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done += len(values)

    def _check_room(self, row_shape: tuple[int, ...]) -> None:
        views, photos = self._shape
        missing = cache_bytes(self.total - self.done, 1, row_shape)
        free = shutil.disk_usage(self._directory).free
        if missing > free - self._min_free_bytes:
            raise TrainingError(
                f"The cache of {photos} photos in {views} views of {'x'.join(map(str, row_shape))} values needs"
                f" {missing / 1e9:.1f} GB more, and {self._directory} has {free / 1e9:.1f} GB free.",
                "Use fewer views (cached_views) or a later stage (cached_stage), or free space: "
                f"{self._min_free_bytes / 1e9:.1f} GB must remain.",
            )


def _fingerprint(photo: Photo) -> list[object]:
    try:
        facts = photo.path.stat()
    except OSError as error:
        raise TrainingError(f"{photo.path} (class {photo.label}) cannot be used: {error}") from error
    return [str(photo.path.absolute()), photo.box, facts.st_size, facts.st_mtime_ns]


@contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        # A process that still waits for the lock finds the finished file.
        file.unlink(missing_ok=True)
