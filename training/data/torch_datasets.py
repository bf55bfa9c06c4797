"""Photos to tensors: decoding and augmentation, reproducible from the seed alone.

Every photo's augmentation depends only on (seed, view, index), so a
resumed run sees the same pixels as one that was never stopped, with any number of worker processes.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from index._util.system import usable_cores
from index.embedding.images import EncodedImage, Fit, ImageError, Preprocessing, load_pixels, read_file
from training.config import AugmentationSettings
from training.data.augmentation import augment
from training.data.dataset import Box, Photo, visible_part
from training.errors import TrainingError

_MAX_WORKERS = 8
"""More rarely help a GPU, and each holds two batches in memory."""


def decoding_workers(wanted: int | None, device_type: str, local_processes: int = 1) -> int:
    """Returns how many processes decode photos for one of `local_processes` training processes on this machine.

    By default one per core, up to 8; on a CPU with a single core none. The network needs the cores of a CPU too, but
    large photos take longer to decode than to train on, and an idle process costs nothing.
    """
    if wanted is not None:
        return wanted
    cores = max(1, usable_cores() // local_processes)
    return 0 if device_type == "cpu" and cores == 1 else min(cores, _MAX_WORKERS)


def read_photo(photo: Photo, side: int | None = None) -> Image.Image:
    """Returns an upright RGB image, cropped to the photo's box if it has one, by the code that serves.

    With `side`, a large JPEG has only the pixels that it needs when its short side is resized to that.
    """
    with _photo_errors(photo):
        image, part = _open_photo(photo)
        return image.read(part, side)[0]


def _open_photo(photo: Photo) -> tuple[EncodedImage, Box]:
    """Returns the undecoded image, and the part of it that is the photo."""
    image = EncodedImage(read_file(photo.path))
    part = visible_part(photo.box or (0, 0, *image.size), image.size)
    if part is None:
        raise TrainingError(
            f"{photo.path} (class {photo.label}): the box {photo.box} is outside its {image.size} pixels.",
            "Correct the box, in pixels of the upright image.",
        )
    return image, part


@contextmanager
def _photo_errors(photo: Photo) -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise TrainingError(f"{photo.path} (class {photo.label}) cannot be used: {error}") from error


def number_classes(photos: Sequence[Photo]) -> tuple[list[str], list[int]]:
    """Returns the sorted classes, and each photo's place among them."""
    classes = sorted({photo.label for photo in photos})
    places = {label: number for number, label in enumerate(classes)}
    return classes, [places[photo.label] for photo in photos]


class TrainingPhotos(Dataset[tuple[torch.Tensor, int]]):
    """Augmented photos with class numbers, addressed by the (view, index) keys of `Batches`; the view is the epoch."""

    def __init__(
        self, photos: Sequence[Photo], side: int, settings: AugmentationSettings, seed: int, fit: Fit = "crop"
    ) -> None:
        self._photos = photos
        self._side = side
        self._fit: Fit = fit
        self._settings = settings
        self._seed = seed
        self.classes, self.labels = number_classes(photos)

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        view, index = key
        photo, rng = self._photos[index], self._generator(view, index)
        with _photo_errors(photo):
            picture = augment(*_open_photo(photo), self._side, self._settings, rng, self._fit)
        return torch.from_numpy(np.array(picture)), self.labels[index]

    def _generator(self, view: int, index: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, view, index))


class SeedlessPhotos(TrainingPhotos):
    """Augmented photos whose views depend on the photo alone: equal in every list of photos and for every seed.

    A photo is known by its file name, size and box, so that a moved folder gives the same views.
    """

    def __init__(self, photos: Sequence[Photo], side: int, settings: AugmentationSettings, fit: Fit = "crop") -> None:
        super().__init__(photos, side, settings, 0, fit)

    def _generator(self, view: int, index: int) -> np.random.Generator:
        photo = self._photos[index]
        name = f"{photo.path.name} {photo.path.stat().st_size} {photo.box}".encode(errors="surrogateescape")
        return np.random.default_rng((zlib.crc32(name), view))


class MeasuredPhotos(Dataset[torch.Tensor]):
    """Photos through the bundle's preprocessing: what is measured is what is served."""

    def __init__(self, photos: Sequence[Photo], preprocessing: Preprocessing) -> None:
        self._photos = photos
        self._preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> torch.Tensor:
        photo, rule = self._photos[index], self._preprocessing
        with _photo_errors(photo):
            if photo.box is None:
                return torch.from_numpy(load_pixels(read_file(photo.path), rule).copy())
            image, part = _open_photo(photo)
            return torch.from_numpy(rule.apply(*image.read(part, rule.decoded_side)).copy())
