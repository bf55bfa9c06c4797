"""A team's own photos as folders: one folder per class at any depth, or such folders under `train/` and `test/`."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from index.ingest.folders import IMAGE_SUFFIXES, product_folders
from training.data.dataset import DataSet, Photo, count_noun, list_counts, list_names, split_by_class
from training.errors import TrainingError


def load_folder(directory: Path) -> DataSet:
    """Uses the split of `train/` and `test/` if they exist; else about a third of the classes is held out."""
    return _read_split(directory) or split_by_class(directory.resolve().name, *_read_classes(directory))


def read_folder(directory: Path) -> tuple[tuple[Photo, ...], tuple[str, ...]]:
    """Returns all photos of a folder whatever their split, and remarks."""
    data = _read_split(directory)
    if data is None:
        photos, remarks = _read_classes(directory)
        return tuple(photos), tuple(remarks)
    return (*data.train, *data.test), data.remarks


def _read_split(directory: Path) -> DataSet | None:
    """Returns the data set of the folders `train` and `test`, or None if they do not exist."""
    if not directory.is_dir():
        raise TrainingError(f"No folder at {directory}.", "Name a folder that holds one folder per product.")
    train, test = directory / "train", directory / "test"
    if not (_has_folders(train) and _has_folders(test)):
        return None
    learned, learned_remarks = _read_classes(train)
    measured, measured_remarks = _read_classes(test)
    remarks = [*learned_remarks, *measured_remarks]
    if others := [folder.name for folder in _folders(directory) if folder.name not in ("train", "test")]:
        remarks.append(f"{directory} has train and test folders; other folders are not used: {list_names(others)}.")
    return DataSet(directory.resolve().name, tuple(learned), tuple(measured), tuple(remarks))


def _read_classes(directory: Path) -> tuple[list[Photo], list[str]]:
    """Returns all photos of the class folders, and remarks on files and folders without photos."""
    photos: list[Photo] = []
    empty: list[str] = []
    others: Counter[str] = Counter()
    for folder in product_folders(directory):
        if folder.error:
            raise TrainingError(f"{folder.path} cannot be read: {folder.error.strerror}.", "Check its permissions.")
        photos += [Photo(file, folder.id) for file in folder.photos]
        others.update(file.suffix or file.name for file in folder.others)
        if not folder.photos:
            empty.append(folder.id)
    if not photos:
        raise TrainingError(
            f"{directory} holds no class folders with photos.",
            f"Put {', '.join(sorted(IMAGE_SUFFIXES))} files into {directory}/PRODUCT/, one folder per product.",
        )
    remarks = []
    if empty:
        remarks.append(f"{count_noun(len(empty), 'folder holds', 'folders hold')} no photos: {list_names(empty)}.")
    if others:
        files_ = count_noun(others.total(), "file is", "files are")
        remarks.append(f"{files_} not images of a known type and left out: {list_counts(others)}.")
    return photos, remarks


def _has_folders(directory: Path) -> bool:
    return directory.is_dir() and any(_folders(directory))


def _folders(directory: Path) -> Iterator[Path]:
    with os.scandir(directory) as entries:
        yield from (Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
