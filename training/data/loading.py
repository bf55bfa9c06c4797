"""Photos to tensors: decoding and augmentation, reproducible from the seed alone.

Every photo's augmentation follows from (seed, epoch, index), not from a generator that is passed along, so a
resumed run sees the same pixels as one that was never stopped, however many processes decode.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from index.images import ImageError, Preprocessing, decode, load_pixels, read_file
from training.config import AugmentationSettings
from training.data.records import Photo, visible_part
from training.errors import TrainingError


def read_photo(photo: Photo) -> Image.Image:
    """An upright RGB image, by the same code that serves, cut to the photo's box if it has one."""
    with _naming(photo):
        image = decode(read_file(photo.path))
    if photo.box is None:
        return image
    part = visible_part(photo.box, image.size)
    if part is None:
        raise TrainingError(
            f"{photo.path} (class {photo.label}): the box {photo.box} lies outside its {image.size} pixels.",
            "Mend the box, in pixels of the upright image.",
        )
    return image.crop(part)


@contextmanager
def _naming(photo: Photo) -> Iterator[None]:
    try:
        yield
    except ImageError as error:
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


def number_classes(photos: Sequence[Photo]) -> tuple[list[str], list[int]]:
    """The sorted classes, and each photo's place among them."""
    classes = sorted({photo.label for photo in photos})
    places = {label: number for number, label in enumerate(classes)}
    return classes, [places[photo.label] for photo in photos]


class TrainingPhotos(Dataset[tuple[torch.Tensor, int]]):
    """Augmented photos with class numbers, addressed by (epoch, index)."""

    def __init__(self, photos: Sequence[Photo], side: int, settings: AugmentationSettings, seed: int) -> None:
        self._photos = photos
        self._side = side
        self._settings = settings
        self._seed = seed
        self.classes, self.labels = number_classes(photos)

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        rng = np.random.default_rng((self._seed, epoch, index))
        image = augment(read_photo(self._photos[index]), self._side, self._settings, rng)
        return torch.from_numpy(np.array(image)), self.labels[index]


class MeasuredPhotos(Dataset[torch.Tensor]):
    """Photos through the bundle's own preprocessing: what is measured is what will be served."""

    def __init__(self, photos: Sequence[Photo], preprocessing: Preprocessing) -> None:
        self._photos = photos
        self._preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> torch.Tensor:
        photo, rule = self._photos[index], self._preprocessing
        if photo.box is not None:
            return torch.from_numpy(rule.apply(read_photo(photo)).copy())
        with _naming(photo):
            return torch.from_numpy(load_pixels(read_file(photo.path), rule).copy())
