"""A data set: photos with their classes, splits by class, and remarks for the user."""

import hashlib
import os
import random
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from training.errors import TrainingError

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels of the upright image."""

_MAX_NAMES = 5


class Photo(NamedTuple):
    """One image of a class, or the part of it that shows the class."""

    path: Path
    label: str
    box: Box | None = None
    is_query: bool = True
    """Whether a test photo is a query, and whether it is in the gallery."""
    is_gallery: bool = True


@dataclass(frozen=True)
class DataSet:
    """Training photos, and test photos of other classes, on which recall is measured; either may be empty."""

    name: str
    train: tuple[Photo, ...]
    test: tuple[Photo, ...]
    remarks: tuple[str, ...] = ()
    """Sentences for the user about what was left out or looks odd."""

    def __post_init__(self) -> None:
        shared = {photo.label for photo in self.train} & {photo.label for photo in self.test}
        if shared:
            raise TrainingError(
                f"{self.name}: {len(shared)} classes are in both splits, such as {min(shared)}.",
                "Recall is measured on classes that were never learned: keep each class in one split.",
            )


def check_learnable(data: DataSet) -> None:
    """Raises an error for a data set that is only for measuring."""
    classes = len({photo.label for photo in data.train})
    if classes < 2:
        raise TrainingError(
            f"{data.name} has {count_noun(classes, 'class', 'classes')} to learn.",
            "Give at least two; in a table these are the rows whose split is train.",
        )


def check_usable(data: DataSet) -> DataSet:
    """Adds remarks on thin classes, and raises an error when there is nothing to measure on."""
    searchable = Counter(photo.label for photo in data.test if photo.is_gallery)
    # A photo never finds itself, so a query that is in the gallery needs a second photo there.
    lonely = [p.label for p in data.test if p.is_query and searchable[p.label] <= p.is_gallery]
    if len(lonely) == sum(photo.is_query for photo in data.test):
        raise TrainingError(
            f"{data.name} cannot be measured: none of its {len(lonely)} query photos has another of its class to find.",
            "Give two or more photos of each class that is kept for measuring.",
        )
    thin = []
    single = [label for label, count in Counter(photo.label for photo in data.train).items() if count == 1]
    if single:
        thin.append(
            f"{count_noun(len(single), 'class', 'classes')} to learn with one photo only: {list_names(single)}."
        )
    if lonely:
        queries = count_noun(len(lonely), "test photo has", "test photos have")
        thin.append(f"{queries} no other photo of the class to find: {list_counts(Counter(lonely))}.")
    return replace(data, remarks=tuple(dict.fromkeys((*data.remarks, *thin))))


def split_by_class(name: str, photos: Sequence[Photo], remarks: Iterable[str] = ()) -> DataSet:
    """Keeps about a third of the classes for measuring, chosen by their names, and none with a single photo."""
    counts = Counter(photo.label for photo in photos)
    single = [label for label, count in counts.items() if count == 1]
    notes = list(remarks)
    if single:
        left_out = count_noun(len(single), "class with one photo only is", "classes with one photo only are")
        notes.append(f"{left_out} left out: {list_names(single)}.")
    train, test = _hold_out([photo for photo in photos if counts[photo.label] > 1], 1 / 3, "test", name)
    return DataSet(name, tuple(train), tuple(test), tuple(notes))


def hold_out(photos: Sequence[Photo], share: float, seed: int) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """Splits photos into training and validation by whole classes: about the given share of them, by name and seed."""
    if not 0 < share < 1:
        raise TrainingError(f"A share of {share} cannot be held out.", "Give a number between 0 and 1, such as 0.1.")
    return _hold_out(photos, share, f"validation {seed}", "The training set")


def _hold_out(
    photos: Sequence[Photo], share: float, purpose: str, name: str
) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """Holds out the classes whose hash is in the lowest `share`, among those with two or more photos.

    A class does not change sides when others are added or removed. Only where that would leave fewer than two classes
    on a side (with one class, every result is correct), or hold out more than half of them for a smaller share, the
    classes with the next hashes fill up.
    """
    counts = Counter(photo.label for photo in photos)
    places = {label: _position(label, purpose) for label, count in counts.items() if count > 1}
    if len(places) < 2 or len(counts) < 4:
        raise TrainingError(
            f"{name} has {len(counts)} classes, {len(places)} of them with two or more photos: too few to hold "
            "some out.",
            "Give at least four classes with two or more photos each.",
        )
    wanted = sum(place < share for place in places.values())
    limit = min(len(counts) - 2, max(2, len(counts) // 2, round(len(counts) * share)))
    return _split_off(photos, sorted(places, key=places.__getitem__)[: min(limit, max(2, wanted))])


def _position(label: str, purpose: str) -> float:
    """Returns a number from 0 to 1 that depends on the label alone; file systems differ in how they write accents."""
    text = f"{purpose}\n{unicodedata.normalize('NFC', label)}"
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8]) / 2**64


def fold_out(photos: Sequence[Photo], fold: int, folds: int, seed: int) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """Splits off one fold for validation; over all folds each class of two or more photos is held out once.

    Folds are of equal size, so another class changes them.
    """
    counts = Counter(photo.label for photo in photos)
    labels = sorted(label for label, count in counts.items() if count > 1)
    if len(labels) < 2 * folds:
        raise TrainingError(
            f"The training set has {len(labels)} classes with two or more photos: too few for {folds} folds.",
            f"Give at least {2 * folds}: with one class in a fold, every result is correct.",
        )
    random.Random(seed).shuffle(labels)
    return _split_off(photos, labels[fold::folds])


def _split_off(photos: Sequence[Photo], labels: Iterable[str]) -> tuple[tuple[Photo, ...], tuple[Photo, ...]]:
    """Returns the photos of other classes, and those of the given classes."""
    held = set(labels)
    return (
        tuple(photo for photo in photos if photo.label not in held),
        tuple(photo for photo in photos if photo.label in held),
    )


def data_from_lists(name: str, train: Sequence[Photo], test: Sequence[Photo], remarks: Iterable[str] = ()) -> DataSet:
    """Returns a data set whose split is given by lists; missing files are left out with a remark."""
    kept, missing = drop_missing(name, [*train, *test])
    existing = set(kept)
    return DataSet(
        name,
        tuple(photo for photo in train if photo in existing),
        tuple(photo for photo in test if photo in existing),
        (*remarks, *missing),
    )


def drop_missing(name: str, photos: Sequence[Photo]) -> tuple[tuple[Photo, ...], tuple[str, ...]]:
    """Returns the photos whose files exist, and a remark on the others.

    Folders are listed once each: a stat call per file takes minutes for a hundred thousand files on a network disk.
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
            f"{name}: none of the {len(photos)} listed image files exists ({example}).",
            "Unpack the images where the list expects them.",
        )
    if not missing:
        return tuple(kept), ()
    files = count_noun(missing.total(), "listed image file is", "listed image files are")
    return tuple(kept), (
        f"{files} missing, of {count_noun(len(missing), 'class', 'classes')}: {list_counts(missing)}.",
    )


def _names(folder: str) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def count_noun(number: int, one: str, many: str) -> str:
    """Formats a number with its noun."""
    return f"{number:,} {one if number == 1 else many}"


def list_names(names: Sequence[str]) -> str:
    """Formats a few names and how many more there are."""
    shown = ", ".join(sorted(names)[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES:,} more"


def list_counts(counts: Mapping[str, int]) -> str:
    """Formats a few names with their counts, the largest first, and how many more there are."""
    largest = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(f"{name} ({count:,})" for name, count in largest[:_MAX_NAMES])
    return shown if len(largest) <= _MAX_NAMES else f"{shown} and {len(largest) - _MAX_NAMES:,} more"


def visible_part(box: Box, size: tuple[int, int]) -> Box | None:
    """Returns the part of a box inside an image of this width and height, or None."""
    left, top, right, bottom = max(0, box[0]), max(0, box[1]), min(size[0], box[2]), min(size[1], box[3])
    return (left, top, right, bottom) if left < right and top < bottom else None
