"""A team's own photos as folders: one folder per class, or such folders under `train/` and `test/`."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from index.ingest.sources import IMAGE_SUFFIXES
from training.data.dataset import DataSet, Photo, count_noun, list_counts, list_names, split_by_class
from training.errors import TrainingError


def load_folder(directory: Path) -> DataSet:
    """Uses the split of `train/` and `test/` if they exist; else a third of the classes is held out for testing."""
    if not directory.is_dir():
        raise TrainingError(f"No folder at {directory}.", "Name a folder that holds one folder per product.")
    name = directory.resolve().name
    train, test = directory / "train", directory / "test"
    if not (_has_folders(train) and _has_folders(test)):
        photos, remarks = _read_classes(directory)
        return split_by_class(name, photos, remarks)
    learned, learned_remarks = _read_classes(train)
    measured, measured_remarks = _read_classes(test)
    remarks = [*learned_remarks, *measured_remarks]
    if others := [folder.name for folder in _folders(directory) if folder.name not in ("train", "test")]:
        remarks.append(f"{directory} has train and test folders; other folders are not used: {list_names(others)}.")
    return DataSet(name, tuple(learned), tuple(measured), tuple(remarks))


def _read_classes(directory: Path) -> tuple[list[Photo], list[str]]:
    """Returns all photos of the class folders, and remarks on files and folders without photos."""
    photos: list[Photo] = []
    empty: list[str] = []
    others: Counter[str] = Counter()
    for folder in _folders(directory):
        files = [Path(entry.path) for entry in _list_entries(folder) if not entry.is_dir()]
        images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        photos += [Photo(file, folder.name) for file in images]
        others.update(file.suffix or file.name for file in files if file.suffix.lower() not in IMAGE_SUFFIXES)
        if not images:
            empty.append(folder.name)
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
    return (Path(entry.path) for entry in _list_entries(directory) if entry.is_dir())


def _list_entries(directory: Path) -> list[os.DirEntry[str]]:
    """Lists a folder by name without hidden files: macOS leaves a `._` twin of each file on other disks."""
    with os.scandir(directory) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
