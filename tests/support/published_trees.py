"""Small trees in the layouts of the published data sets: the lists and files that their authors distribute."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.io import savemat

from tests.support.tiny_gallery import COLOURS, tiny_photo

LEARNED, MEASURED, VIEWS = len(COLOURS), 4, 3
"""Classes to learn and to measure on, and photos per class."""


class TreePhoto(NamedTuple):
    """One photo of a tree; `number` counts all of them from 1, and a measured class looks like a learned one."""

    number: int
    class_number: int
    learned: bool
    view: int

    def write(self, file: Path) -> None:
        """Writes the JPEG, with its folders."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tiny_photo(self.class_number % len(COLOURS), self.view))


def tree_photos() -> Iterator[TreePhoto]:
    """Yields the photos of every tree: classes from 0, the learned ones first."""
    for number in range((LEARNED + MEASURED) * VIEWS):
        class_number, view = divmod(number, VIEWS)
        yield TreePhoto(number + 1, class_number, class_number < LEARNED, view)


def write_cub(root: Path) -> None:
    """Writes CUB-200-2011: classes 1 to 100 are learned."""
    images, labels = "", ""
    for photo in tree_photos():
        bird = photo.class_number + (1 if photo.learned else 101)
        name = f"{bird:03d}.Bird/{photo.number:04d}.jpg"
        photo.write(root / "images" / name)
        images += f"{photo.number} {name}\n"
        labels += f"{photo.number} {bird}\n"
    (root / "images.txt").write_text(images)
    (root / "image_class_labels.txt").write_text(labels)


def write_cars(root: Path) -> None:
    """Writes Cars-196 in one folder: classes 1 to 98 are learned."""
    rows = []
    for photo in tree_photos():
        name = f"car_ims/{photo.number:06d}.jpg"
        photo.write(root / name)
        car = photo.class_number + (1 if photo.learned else 99)
        rows.append(annotation("relative_im_path", name, car))
    save_annotations(root / "cars_annos.mat", rows)


def write_sop(root: Path) -> None:
    """Writes Stanford Online Products: one list per half."""
    lists = dict.fromkeys((True, False), "image_id class_id super_class_id path\n")
    for photo in tree_photos():
        name = f"mug_final/{photo.class_number}_{photo.view}.JPG"
        photo.write(root / name)
        lists[photo.learned] += f"{photo.number} {photo.class_number + 1} 1 {name}\n"
    (root / "Ebay_train.txt").write_text(lists[True])
    (root / "Ebay_test.txt").write_text(lists[False])


def write_inshop(root: Path) -> None:
    """Writes In-Shop Clothes Retrieval: the first photo of a measured class is a query, the others are the gallery."""
    rows = []
    for photo in tree_photos():
        item = f"id_{photo.class_number:08d}"
        name = f"img/WOMEN/Dresses/{item}/{photo.view:02d}_front.jpg"
        photo.write(root / name)
        rows.append((name, item, "train" if photo.learned else "gallery" if photo.view else "query"))
    (root / "list_eval_partition.txt").write_text(partition(rows))


TREES: dict[str, Callable[[Path], None]] = {
    "cub": write_cub,
    "cars": write_cars,
    "sop": write_sop,
    "inshop": write_inshop,
}


def save_annotations(file: Path, rows: list[dict[str, Any]]) -> None:
    """Saves a struct array as MATLAB does."""
    records = np.empty((1, len(rows)), dtype=[(name, object) for name in rows[0]])
    for place, row in enumerate(rows):
        records[0, place] = tuple(row.values())
    file.parent.mkdir(parents=True, exist_ok=True)
    savemat(file, {"annotations": records})


def annotation(name: str, value: str, number: int | None) -> dict[str, Any]:
    """Returns one row of Cars-196: a box, the class if it is given, and the photo under the key `name`."""
    box = {f"bbox_{side}": 7 for side in ("x1", "y1", "x2", "y2")}
    return box | ({} if number is None else {"class": np.uint8(number)}) | {name: value}


def partition(rows: list[tuple[str, str, str]], count: int | None = None) -> str:
    """Returns the list of In-Shop, with a declared number of photos that may be wrong."""
    lines = [f"{image:<70}{item:<14}{status}\n" for image, item, status in rows]
    return f"{len(rows) if count is None else count}\nimage_name item_id evaluation_status\n" + "".join(lines)
