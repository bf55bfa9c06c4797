"""The four public benchmarks of the field, in their published folder layouts, with the usual splits.

The first half of the classes is learned and the second half measured (CUB, Cars), or the published lists
decide which
(Stanford Online Products, In-Shop). Whole images are used: the usual protocol does not crop to the boxes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from training.data.dataset import DataSet, Photo, data_from_lists
from training.errors import TrainingError

_SIZES = {"cub": (5_864, 5_924), "cars": (8_054, 8_131), "sop": (59_551, 60_502), "inshop": (25_882, 26_830)}
"""Photos to learn from and to measure on, as published."""


def load_cub(path: Path) -> DataSet:
    """Reads CUB-200-2011: classes 1 to 100 are learned, 101 to 200 measured."""
    root = _root(path, "images.txt", "CUB-200-2011 (images.txt, image_class_labels.txt, images/)")
    places = {_number(image, where): name for where, (image, name) in _lines(root / "images.txt", 2)}
    train: list[Photo] = []
    test: list[Photo] = []
    for where, (image, number) in _lines(root / "image_class_labels.txt", 2):
        name = places.pop(_number(image, where), None)
        if name is None:
            raise TrainingError(f"{where}: image {image} is not in images.txt.", "Unpack the archive again.")
        # Folders are named by class number and bird, which makes a readable label.
        photo = Photo(root / "images" / name, name.partition("/")[0])
        (train if _number(number, where) <= 100 else test).append(photo)
    if places:
        raise TrainingError(
            f"{root / 'image_class_labels.txt'} lacks {len(places)} images of images.txt, such as {min(places)}.",
            "Unpack the archive again.",
        )
    return _check_size("cub", train, test)


def load_cars(path: Path) -> DataSet:
    """Reads Cars-196: classes 1 to 98 are learned, 99 to 196 measured, in whichever half of the archive they are."""
    layout = "Cars-196 (car_ims/ and cars_annos.mat, or cars_train/, cars_test/ and devkit/)"
    root = _root(path, ("cars_annos.mat", "devkit/cars_train_annos.mat"), layout)
    if (root / "cars_annos.mat").is_file():
        images = list(_annotations(root / "cars_annos.mat", "relative_im_path", root))
    else:
        images = list(_annotations(root / "devkit" / "cars_train_annos.mat", "fname", root / "cars_train"))
        images += _annotations(_test_annotations(root), "fname", root / "cars_test")
    photos = [(Photo(image, f"{number:03d}"), number) for image, number in images]
    train = [photo for photo, number in photos if number <= 98]
    return _check_size("cars", train, [photo for photo, number in photos if number > 98])


def load_sop(path: Path) -> DataSet:
    """Reads Stanford Online Products: `Ebay_train.txt` is learned, `Ebay_test.txt` measured."""
    root = _root(path, "Ebay_train.txt", "Stanford Online Products (Ebay_train.txt, Ebay_test.txt, *_final/)")
    splits = []
    for name in ("Ebay_train.txt", "Ebay_test.txt"):
        lines = _skip_header(root / name, _lines(root / name, 4), "image_id class_id super_class_id path")
        splits.append([Photo(root / image, str(_number(label, where))) for where, (_, label, _, image) in lines])
    return _check_size("sop", *splits)


def load_inshop(path: Path) -> DataSet:
    """Reads In-Shop clothes of DeepFashion: its list has the training, query and gallery photos."""
    lists = ("Eval/list_eval_partition.txt", "list_eval_partition.txt")
    root = _root(path, lists, "In-Shop (Eval/list_eval_partition.txt, Img/img/)")
    partition = next(root / name for name in lists if (root / name).is_file())
    numbered = _numbered_lines(partition)
    where, first = next(numbered, (str(partition), ""))
    count = _number(first.strip(), where)
    rows = ((where, _fields(where, line, 3)) for where, line in numbered)
    lines = list(_skip_header(partition, rows, "image_name item_id evaluation_status"))
    if len(lines) != count:
        raise TrainingError(f"{partition} declares {count} images but lists {len(lines)}.", "Download the file again.")
    images = _image_root(root, [image for _, (image, _, _) in lines])
    train, test = [], []
    for where, (image, item, status) in lines:
        place = images / image.removeprefix("img/")
        if status == "train":
            train.append(Photo(place, item))
        elif status in ("query", "gallery"):
            test.append(Photo(place, item, None, status == "query", status == "gallery"))
        else:
            raise TrainingError(
                f"{where}: status {status!r} is not train, query or gallery.", "Download the file again."
            )
    return _check_size("inshop", train, test)


def _check_size(name: str, train: list[Photo], test: list[Photo]) -> DataSet:
    data = data_from_lists(name, train, test)
    found = (len(data.train), len(data.test))
    if found == _SIZES[name]:
        return data
    remark = "{:,} training and {:,} test photos, published are {:,} and {:,}: recall cannot be compared."
    return DataSet(name, data.train, data.test, (*data.remarks, remark.format(*found, *_SIZES[name])))


def _root(path: Path, markers: str | tuple[str, ...], layout: str) -> Path:
    """Returns the folder that holds one of the marker files: the path itself, or a folder in it."""
    markers = (markers,) if isinstance(markers, str) else markers
    folders = [path, *sorted(folder for folder in path.iterdir() if folder.is_dir())] if path.is_dir() else []
    for folder in folders:
        if any((folder / marker).is_file() for marker in markers):
            return folder
    raise TrainingError(f"No {' or '.join(markers)} in {path} or a folder of it.", f"Name the folder of {layout}.")


def _image_root(root: Path, images: list[str]) -> Path:
    """Returns the folder that the list calls `img/`: archives are unpacked next to `Eval/`, or into `Img/`."""
    top = images[0].removeprefix("img/").partition("/")[0] if images else ""
    candidates = (root / "img", root / "Img" / "img", root / "Img")
    for folder in candidates:
        if (folder / top).is_dir():
            return folder
    raise TrainingError(
        f"The folder {top} is in none of {', '.join(map(str, candidates))}.", "Unpack img.zip of In-Shop into Img/."
    )


def _numbered_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a list that are not blank, each with its place for error messages."""
    try:
        with file.open(encoding="utf-8") as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield f"{file}, line {number}", line
    except FileNotFoundError:
        raise TrainingError(f"No list at {file}.", "Unpack the archive again.") from None
    except UnicodeDecodeError as error:
        raise TrainingError(f"{file} is not text: {error}.", "Download the file again.") from None


def _lines(file: Path, fields: int) -> Iterator[tuple[str, list[str]]]:
    return ((where, _fields(where, line, fields)) for where, line in _numbered_lines(file))


def _fields(where: str, line: str, count: int) -> list[str]:
    fields = line.split()
    if len(fields) != count:
        raise TrainingError(f"{where}: expected {count} fields, found {line.strip()!r}.", "Download the file again.")
    return fields


def _skip_header(file: Path, lines: Iterator[tuple[str, list[str]]], header: str) -> Iterator[tuple[str, list[str]]]:
    where, found = next(lines, (str(file), []))
    if found != header.split():
        raise TrainingError(f"{where}: expected {header!r}, found {' '.join(found)!r}.", "Download the file again.")
    return lines


def _number(text: str, where: str) -> int:
    if not text.isdecimal():
        raise TrainingError(f"{where}: {text!r} is not a number.", "Download the file again.")
    return int(text)


def _test_annotations(root: Path) -> Path:
    name = "cars_test_annos_withlabels.mat"
    for file in (root / "devkit" / name, root / name):
        if file.is_file():
            return file
    raise TrainingError(
        f"{root} lacks {name}; cars_test_annos.mat of the devkit has no classes.", f"Put {name} into {root / 'devkit'}."
    )


def _annotations(file: Path, name_field: str, images: Path) -> Iterator[tuple[Path, int]]:
    """Yields the image and class of each record of a MATLAB file."""
    from scipy.io import loadmat

    read: Callable[..., dict[str, Any]] = loadmat
    try:
        content = read(file, squeeze_me=True, variable_names=["annotations"])
    except Exception as error:  # MATLAB's format fails in many ways: ValueError, TypeError, zlib.error…
        raise TrainingError(f"{file} is not a MATLAB file: {error}.", "Download the file again.") from error
    records = np.atleast_1d(content.get("annotations", np.empty(0)))
    fields = records.dtype.names or ()
    if name_field not in fields or "class" not in fields:
        raise TrainingError(
            f"{file} has no annotations with {name_field} and class, but {', '.join(fields) or 'none'}.",
            "Download the file again.",
        )
    for record in records:
        yield images / str(record[name_field]), int(record["class"])
