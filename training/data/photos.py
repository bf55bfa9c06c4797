"""A data set as a plain table of photos, and the specifications that name one: `sample`, `folder:PATH`."""

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from index.sources import IMAGE_SUFFIXES
from training.data.sample_shop import read_shop, write_shop
from training.errors import TrainingError

Progress = Callable[[int, int], None]


class Photo(NamedTuple):
    """One image of a class."""

    path: Path
    label: str


@dataclass(frozen=True)
class DataSet:
    """Photos to learn from and photos of classes never learned, on which recall is measured."""

    name: str
    train: tuple[Photo, ...]
    test: tuple[Photo, ...]

    def __post_init__(self) -> None:
        shared = {photo.label for photo in self.train} & {photo.label for photo in self.test}
        if shared:
            raise TrainingError(f"{self.name}: {len(shared)} classes are in both splits, such as {min(shared)}.")
        if len({photo.label for photo in self.train}) < 2:
            raise TrainingError(f"{self.name} has fewer than two classes to learn.", "Give at least two.")


def load_data(spec: str, *, on_progress: Progress | None = None) -> DataSet:
    """The data set that a specification names."""
    kind, _, rest = spec.partition(":")
    if kind == "sample":
        return shop_data(write_shop(Path(rest) if rest else default_shop(), on_progress=on_progress))
    if kind == "folder" and rest:
        return _folder(Path(rest))
    raise TrainingError(f"Unknown data {spec!r}.", "Use sample, sample:DIR or folder:DIR (one folder a product).")


def default_shop() -> Path:
    """Where the sample shop lies when nobody says where: it is the same for every run."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lookalike" / "sample-shop"


def shop_data(directory: Path) -> DataSet:
    """Learns from the gallery photos of a sample shop's trained products; their query photos stay new to the model."""
    photos = read_shop(directory)
    train = [photo for photo in photos if photo.split == "train" and photo.role == "gallery"]
    test = [photo for photo in photos if photo.split == "unseen"]
    return DataSet(
        "sample",
        tuple(Photo(directory / photo.image, photo.item_id) for photo in train),
        tuple(Photo(directory / photo.image, photo.item_id) for photo in test),
    )


def _folder(directory: Path, test_share: float = 1 / 3) -> DataSet:
    """One folder a class; a third of the classes, drawn with a fixed seed, is kept for measuring."""
    if not directory.is_dir():
        raise TrainingError(f"No folder at {directory}.", "Name a folder that holds one folder a product.")
    photos = [
        Photo(path, path.parent.name) for path in sorted(directory.glob("*/*")) if path.suffix.lower() in IMAGE_SUFFIXES
    ]
    counts = Counter(photo.label for photo in photos)
    labels = sorted(label for label, count in counts.items() if count >= 2)
    if len(labels) < 3:
        raise TrainingError(
            f"{directory} has {len(labels)} classes with two or more photos.",
            "Give at least three such folders.",
        )
    random.Random(0).shuffle(labels)
    cut = max(1, round(len(labels) * test_share))
    test, train = set(labels[:cut]), set(labels[cut:])
    return DataSet(
        directory.name,
        tuple(photo for photo in photos if photo.label in train),
        tuple(photo for photo in photos if photo.label in test),
    )
