"""A data set as a plain table: photos with their classes, how classes are kept apart, and what to tell about them."""

import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from training.errors import TrainingError

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels of the upright image."""

_NAMED = 5


class Photo(NamedTuple):
    """One image of a class, or the part of it that shows the class."""

    path: Path
    label: str
    box: Box | None = None
    is_query: bool = True
    """Whether a photo to measure on is searched with; likewise, whether it can be found."""
    is_gallery: bool = True


@dataclass(frozen=True)
class DataSet:
    """Photos to learn from and photos of classes never learned, on which recall is measured."""

    name: str
    train: tuple[Photo, ...]
    test: tuple[Photo, ...]
    remarks: tuple[str, ...] = ()
    """What was left out or looks odd, a sentence each, for whoever trains."""

    def __post_init__(self) -> None:
        shared = {photo.label for photo in self.train} & {photo.label for photo in self.test}
        if shared:
            raise TrainingError(
                f"{self.name}: {len(shared)} classes are in both splits, such as {min(shared)}.",
                "Recall is measured on classes that were never learned: keep each class in one split.",
            )
        if len({photo.label for photo in self.train}) < 2:
            raise TrainingError(f"{self.name} has fewer than two classes to learn.", "Give at least two.")


def usable(data: DataSet) -> DataSet:
    """The data set with remarks on thin classes, or an error when there is nothing to measure on."""
    searchable = Counter(photo.label for photo in data.test if photo.is_gallery)
    # A photo never finds itself, so a query that is in the gallery needs a second photo there.
    lonely = [p.label for p in data.test if p.is_query and searchable[p.label] <= p.is_gallery]
    if len(lonely) == sum(photo.is_query for photo in data.test):
        raise TrainingError(
            f"{data.name} has nothing to measure: none of its {len(data.test)} test photos has another of its class.",
            "Give two or more photos of each class that is kept for measuring.",
        )
    thin = []
    single = [label for label, count in Counter(photo.label for photo in data.train).items() if count == 1]
    if single:
        thin.append(f"{counted(len(single), 'class', 'classes')} to learn with one photo only: {named(single)}.")
    if lonely:
        queries = counted(len(lonely), "test photo has", "test photos have")
        thin.append(f"{queries} no other photo of the class to find: {tallied(Counter(lonely))}.")
    return replace(data, remarks=tuple(dict.fromkeys((*data.remarks, *thin))))


def split_by_class(name: str, photos: Sequence[Photo], remarks: Iterable[str] = ()) -> DataSet:
    """Keeps a third of the classes for measuring: always the same ones, and none with a single photo."""
    counts = Counter(photo.label for photo in photos)
    single = [label for label, count in counts.items() if count == 1]
    told = list(remarks)
    if single:
        left_out = counted(len(single), "class with one photo only is", "classes with one photo only are")
        told.append(f"{left_out} left out: {named(single)}.")
    train, test = hold_out([photo for photo in photos if counts[photo.label] > 1], 1 / 3, seed=0, name=name)
    return DataSet(name, tuple(train), tuple(test), tuple(told))


def hold_out(
    photos: Sequence[Photo], share: float, seed: int, *, name: str = "The training set"
) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """Training photos and validation photos: whole classes of two or more photos are drawn with the seed.

    Two classes at least stay on each side: with one class, every search is right.
    """
    if not 0 < share < 1:
        raise TrainingError(f"A share of {share} cannot be held out.", "Give a number between 0 and 1, such as 0.1.")
    counts = Counter(photo.label for photo in photos)
    labels = sorted(label for label, count in counts.items() if count > 1)
    if len(labels) < 2 or len(counts) < 4:
        raise TrainingError(
            f"{name} has {len(counts)} classes, {len(labels)} of them with two or more photos: too few to keep some "
            "for measuring.",
            "Give at least four classes with two or more photos each.",
        )
    random.Random(seed).shuffle(labels)
    return _parted(photos, labels[: min(len(counts) - 2, max(2, round(len(counts) * share)))])


def fold_out(photos: Sequence[Photo], fold: int, folds: int, seed: int) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """Training photos and one fold's validation photos; over all folds each class of two or more is held out once."""
    counts = Counter(photo.label for photo in photos)
    labels = sorted(label for label, count in counts.items() if count > 1)
    if len(labels) < 2 * folds:
        raise TrainingError(
            f"The training set has {len(labels)} classes with two or more photos: too few for {folds} folds.",
            f"Give at least {2 * folds}: with one class in a fold, every search is right.",
        )
    random.Random(seed).shuffle(labels)
    return _parted(photos, labels[fold::folds])


def _parted(photos: Sequence[Photo], labels: Iterable[str]) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """The photos of other classes, and those of the given ones."""
    held = set(labels)
    return (
        tuple(photo for photo in photos if photo.label not in held),
        tuple(photo for photo in photos if photo.label in held),
    )


def listed_data(name: str, train: Sequence[Photo], test: Sequence[Photo], remarks: Iterable[str] = ()) -> DataSet:
    """A data set whose split is given by lists; files that are not there are remarked and left out."""
    kept, missing = without_missing(name, [*train, *test])
    there = set(kept)
    return DataSet(
        name,
        tuple(photo for photo in train if photo in there),
        tuple(photo for photo in test if photo in there),
        (*remarks, *missing),
    )


def without_missing(name: str, photos: Sequence[Photo]) -> tuple[tuple[Photo, ...], tuple[str, ...]]:
    """The photos whose files are there, and a remark on the others.

    Folders are listed once each, for asking after a hundred thousand files one by one takes minutes on a network disk.
    """
    listed: dict[str, set[str]] = {}
    kept, missing = [], Counter[str]()
    for photo in photos:
        folder, file = os.path.split(photo.path)
        if folder not in listed:
            listed[folder] = _names(folder)
        if file in listed[folder]:
            kept.append(photo)
        else:
            missing[photo.label] += 1
    if not kept:
        example = photos[0].path if photos else "no photo is listed"
        raise TrainingError(
            f"{name}: none of the {len(photos)} listed image files is there ({example}).",
            "Check that the images are unpacked where the list says.",
        )
    if not missing:
        return tuple(kept), ()
    files = counted(missing.total(), "listed image file is", "listed image files are")
    return tuple(kept), (f"{files} missing, of {counted(len(missing), 'class', 'classes')}: {tallied(missing)}.",)


def _names(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def counted(number: int, one: str, many: str) -> str:
    """A number with its noun, for remarks."""
    return f"{number:,} {one if number == 1 else many}"


def named(names: Sequence[str]) -> str:
    """A handful of names and how many more there are."""
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED:,} more"


def tallied(counts: Mapping[str, int]) -> str:
    """A handful of names with their counts, the largest first, and how many more there are."""
    largest = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{name} ({count:,})" for name, count in largest[:_NAMED])
    return shown if len(largest) <= _NAMED else f"{shown} and {len(largest) - _NAMED:,} more"


def visible_part(box: Box, size: tuple[int, int]) -> Box | None:
    """What an image of this width and height shows of a box, if anything."""
    left, top, right, bottom = max(0, box[0]), max(0, box[1]), min(size[0], box[2]), min(size[1], box[3])
    return (left, top, right, bottom) if left < right and top < bottom else None
