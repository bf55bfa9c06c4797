"""Features of a frozen backbone, computed once: heads and losses are then tried in seconds instead of hours.

Every photo is embedded in a few augmented views, the pixels of the first epochs; an epoch of training then reads one
view of each from a memory-mapped file. The file is named by all that its numbers depend on, so it is never stale.
"""

import fcntl
import hashlib
import json
import os
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

from index.files import fsync_directory
from training.config import AugmentationSettings
from training.data.loading import TrainingPhotos, number_classes
from training.data.records import Photo, Progress
from training.errors import TrainingError

_LAYOUT = 1
"""Raised whenever the same description would give other numbers."""
_BATCH = 64


@dataclass(frozen=True)
class FeatureCache:
    """A file of features of photos, mapped rather than read."""

    path: Path
    photos: tuple[Photo, ...]
    features: NDArray[np.float16]
    """Views x photos x dimension."""


class CachedFeatures(Dataset[tuple[torch.Tensor, int]]):
    """Cached features with class numbers, addressed by (epoch, index): they stand in the place of `TrainingPhotos`."""

    def __init__(self, cache: FeatureCache) -> None:
        self._features = cache.features
        self.classes, self.labels = number_classes(cache.photos)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        features = self._features[epoch % len(self._features), index]
        return torch.from_numpy(features.astype(np.float32)), self.labels[index]


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
    on_progress: Progress | None = None,
) -> FeatureCache:
    """Embeds `views` augmented views of every photo, or finds that this was done before.

    `embed_features` takes uint8 pixels (NHWC) to a row of features each; `key` describes it: backbone, weights and
    preprocessing. What a killed run left is gone on with; of several runs that want the same, one computes it.
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
    with _locked(directory / f".{path.name}.lock"):
        try:
            features = np.load(path, mmap_mode="r")
        except (FileNotFoundError, ValueError, EOFError):  # none yet, or cut short by somebody: made anew
            dataset = TrainingPhotos(photos, side, settings, seed)
            _write_features(path, dataset, embed_features, views, workers, on_progress)
            features = np.load(path, mmap_mode="r")
    return FeatureCache(path, tuple(photos), features)


def _write_features(
    path: Path,
    photos: TrainingPhotos,
    embed_features: Callable[[torch.Tensor], torch.Tensor],
    views: int,
    workers: int,
    on_progress: Progress | None,
) -> None:
    partial = path.with_name(f".{path.name}.partial")
    total = views * len(photos)
    with partial.open("r+b" if partial.exists() else "w+b") as file:
        done = _rows_to_keep(file)
        batches = (
            [divmod(row, len(photos)) for row in range(start, min(start + _BATCH, total))]
            for start in range(done, total, _BATCH)
        )
        for pixels, _ in DataLoader(photos, batch_sampler=batches, num_workers=workers):
            with torch.inference_mode():
                rows = embed_features(pixels).to(torch.float16).cpu().numpy()
            if not np.isfinite(rows).all():
                raise TrainingError("The backbone's features do not fit into 16 bits.", "Train without the cache.")
            if not file.tell():
                header = {"descr": "<f2", "fortran_order": False, "shape": (views, len(photos), rows.shape[1])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(rows.astype("<f2").tobytes())
            file.flush()
            os.fsync(file.fileno())
            done += len(rows)
            if on_progress:
                on_progress(done, total)
    partial.replace(path)
    fsync_directory(path.parent)


def _rows_to_keep(file: BinaryIO) -> int:
    """How many rows an earlier run left for good; the file is cut behind them and ready to be written on.

    Batches are synced one by one, so that all but the last are sure even after a power cut.
    """
    try:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
        header, row = file.tell(), 2 * shape[2]
    except ValueError:  # no header yet
        file.seek(0)
        file.truncate()
        return 0
    written = (file.seek(0, os.SEEK_END) - header) // row
    keep = max(0, written // _BATCH - 1) * _BATCH
    file.seek(header + keep * row)
    file.truncate()
    return keep


def _fingerprint(photo: Photo) -> list[object]:
    try:
        facts = photo.path.stat()
    except OSError as error:
        raise TrainingError(f"{photo.path} (class {photo.label}) cannot be used: {error}") from error
    return [str(photo.path.absolute()), photo.box, facts.st_size, facts.st_mtime_ns]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        # Whoever still waits for it finds the features there.
        file.unlink(missing_ok=True)
