"""Photos to tensors: decoding, augmentation and batching, reproducible from the seed alone.

Every photo's augmentation follows from (seed, epoch, index), not from a generator that is passed along, so a
resumed run sees the same pixels as one that was never stopped, however many processes decode.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler

from index.images import ImageError, Preprocessing, decode
from training.config import AugmentationSettings
from training.data.photos import Photo
from training.errors import TrainingError


def read_photo(photo: Photo) -> Image.Image:
    """An upright RGB image, by the same code that serves."""
    try:
        return decode(photo.path.read_bytes())
    except (OSError, ImageError) as error:
        raise TrainingError(f"{photo.path} (class {photo.label}) cannot be used: {error}") from error


def augment(image: Image.Image, side: int, settings: AugmentationSettings, rng: np.random.Generator) -> Image.Image:
    """A random part of the image, of random area and aspect ratio, resized to a square and maybe mirrored."""
    width, height = image.size
    area = width * height * rng.uniform(*settings.crop_scale)
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width = min(width, max(1, round(math.sqrt(area * ratio))))
    crop_height = min(height, max(1, round(math.sqrt(area / ratio))))
    left, top = rng.integers(width - crop_width + 1), rng.integers(height - crop_height + 1)
    box = (int(left), int(top), int(left) + crop_width, int(top) + crop_height)
    image = image.resize((side, side), Image.Resampling.BICUBIC, box=box)
    if settings.flip and rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


class TrainingPhotos(Dataset[tuple[torch.Tensor, int]]):
    """Augmented photos with class numbers, addressed by (epoch, index)."""

    def __init__(self, photos: Sequence[Photo], side: int, settings: AugmentationSettings, seed: int) -> None:
        self._photos = photos
        self._side = side
        self._settings = settings
        self._seed = seed
        self.classes = sorted({photo.label for photo in photos})
        self._numbers = {label: number for number, label in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        photo = self._photos[index]
        rng = np.random.default_rng((self._seed, epoch, index))
        image = augment(read_photo(photo), self._side, self._settings, rng)
        return torch.from_numpy(np.array(image)), self._numbers[photo.label]


class EpochSampler(Sampler[list[tuple[int, int]]]):
    """Batches of a shuffled epoch; the short rest is dropped, for a tiny batch would teach noise."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self._count = count
        self._batch_size = min(batch_size, count)
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self._count // self._batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = np.random.default_rng((self._seed, self.epoch)).permutation(self._count)
        for start in range(0, len(self) * self._batch_size, self._batch_size):
            yield [(self.epoch, int(index)) for index in order[start : start + self._batch_size]]


class MeasuredPhotos(Dataset[torch.Tensor]):
    """Photos through the bundle's own preprocessing: what is measured is what will be served."""

    def __init__(self, photos: Sequence[Photo], preprocessing: Preprocessing) -> None:
        self._photos = photos
        self._preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._preprocessing.apply(read_photo(self._photos[index])).copy())
