"""The published benchmarks, on small trees of the same shape."""

from pathlib import Path

import pytest

from tests.support.published_trees import annotation, partition, save_annotations
from training.data import DataSet, Photo, load_data
from training.errors import TrainingError


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def classes(photos: tuple[Photo, ...]) -> list[str]:
    return sorted({photo.label for photo in photos})


def all_exist(data: DataSet) -> bool:
    return all(photo.path.is_file() for photo in data.train + data.test)


BIRDS = {1: "001.Albatross", 100: "100.Pelican", 101: "101.White_Pelican", 200: "200.Yellowthroat"}


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    root = tmp_path / "CUB_200_2011"
    images: list[str] = []
    numbers: list[str] = []
    for bird in (number for number in BIRDS for _ in range(2)):
        name = f"{BIRDS[bird]}/{len(images):04d}.jpg"
        touch(root / "images" / name)
        images.append(f"{len(images) + 1} {name}\n")
        numbers.append(f"{len(images)} {bird}\n")
    write(root / "images.txt", "".join(images))
    write(root / "image_class_labels.txt", "".join(numbers))
    return root


def test_cub_learns_its_first_hundred_classes(cub: Path) -> None:
    data = load_data(f"cub:{cub}")
    assert classes(data.train) == ["001.Albatross", "100.Pelican"]
    assert classes(data.test) == ["101.White_Pelican", "200.Yellowthroat"]
    assert all_exist(data) and len(data.train) == len(data.test) == 4
    assert data == load_data(f"cub:{cub.parent}"), "the parent will do"


def test_a_data_set_smaller_than_published_is_remarked(cub: Path) -> None:
    (cub / "images" / "001.Albatross" / "0000.jpg").unlink()
    missing, size, thin = load_data(f"cub:{cub}").remarks
    assert missing == "1 listed image file is missing, of 1 class: 001.Albatross (1)."
    assert "3 training and 4 test photos, published are 5,864 and 5,924" in size
    assert "001.Albatross" in thin


@pytest.mark.parametrize(
    ("file", "line", "problem"),
    [
        ("images.txt", "9", r"images\.txt, line 9: expected 2 fields, found '9'"),
        ("image_class_labels.txt", "9 x", r"line 9: image 9 is not in images\.txt"),
        ("image_class_labels.txt", "x 9", r"line 9: 'x' is not a number"),
        ("images.txt", "9 001.Albatross/x.jpg", r"lacks 1 images of images\.txt, such as 9"),
    ],
)
def test_a_malformed_list_of_cub_is_reported_with_its_line(cub: Path, file: str, line: str, problem: str) -> None:
    with (cub / file).open("a") as text:
        text.write(line + "\n")
    with pytest.raises(TrainingError, match=problem):
        load_data(f"cub:{cub}")


@pytest.mark.parametrize("kind", ["cub", "cars", "sop", "inshop"])
def test_a_folder_without_the_lists_is_refused_with_the_expected_layout(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TrainingError, match=r"^No .* in .* Name the folder of"):
        load_data(f"{kind}:{tmp_path}")
    with pytest.raises(TrainingError, match="Name the folder of"):
        load_data(f"{kind}:{tmp_path / 'nowhere'}")


@pytest.fixture
def split_cars(tmp_path: Path) -> Path:
    for part in ("train", "test"):
        names = [touch(tmp_path / f"cars_{part}" / f"{n:05d}.jpg").name for n in range(1, 5)]
        rows = [annotation("fname", name, n) for name, n in zip(names, (1, 98, 99, 196), strict=True)]
        file = "cars_train_annos.mat" if part == "train" else "cars_test_annos_withlabels.mat"
        save_annotations(tmp_path / "devkit" / file, rows)
    save_annotations(tmp_path / "devkit" / "cars_test_annos.mat", [annotation("fname", "00001.jpg", None)])
    return tmp_path


def test_cars_in_one_folder_are_split_by_class(tmp_path: Path) -> None:
    rows = []
    for number, car in enumerate((1, 98, 99, 99, 196, 196), 1):
        name = f"car_ims/{number:06d}.jpg"
        touch(tmp_path / name)
        rows.append(annotation("relative_im_path", name, car) | {"test": car % 2})
    save_annotations(tmp_path / "cars_annos.mat", rows)
    data = load_data(f"cars:{tmp_path}")
    assert (classes(data.train), classes(data.test)) == (["001", "098"], ["099", "196"])
    assert all_exist(data) and all(photo.box is None for photo in data.train + data.test)


def test_cars_in_two_folders_are_split_by_class_over_both(split_cars: Path) -> None:
    data = load_data(f"cars:{split_cars}")
    assert (classes(data.train), classes(data.test)) == (["001", "098"], ["099", "196"])
    assert all_exist(data) and {photo.path.parent.name for photo in data.train} == {"cars_train", "cars_test"}


def test_the_labels_of_the_test_cars_may_be_next_to_the_devkit_but_must_exist(split_cars: Path) -> None:
    name = "cars_test_annos_withlabels.mat"
    (split_cars / "devkit" / name).rename(split_cars / name)
    assert len(load_data(f"cars:{split_cars}").test) == 4
    (split_cars / name).unlink()
    with pytest.raises(TrainingError, match=rf"lacks {name}; cars_test_annos\.mat .* has no classes"):
        load_data(f"cars:{split_cars}")


def test_a_damaged_annotation_file_is_reported(split_cars: Path) -> None:
    file = split_cars / "devkit" / "cars_train_annos.mat"
    (split_cars / "devkit" / "cars_test_annos.mat").replace(file)
    with pytest.raises(
        TrainingError, match=r"cars_train_annos\.mat has no annotations with fname and class, but bbox_x1"
    ):
        load_data(f"cars:{split_cars}")
    file.write_bytes(b"no matlab")
    with pytest.raises(TrainingError, match=r"cars_train_annos\.mat is not a MATLAB file"):
        load_data(f"cars:{split_cars}")


def write_products(root: Path, name: str, rows: list[str]) -> None:
    write(root / name, "image_id class_id super_class_id path\n" + "".join(f"{row}\n" for row in rows))
    for row in rows:
        touch(root / row.split()[-1])


def test_online_products_follow_their_two_lists(tmp_path: Path) -> None:
    root = tmp_path / "Stanford_Online_Products"
    learned = ["1 1 1 bicycle_final/11_0.JPG", "2 1 1 bicycle_final/11_1.JPG", "3 2 2 mug_final/12_0.JPG"]
    write_products(root, "Ebay_train.txt", learned)
    write_products(
        root, "Ebay_test.txt", ["59552 11319 1 bicycle_final/9_0.JPG", "59553 11319 1 bicycle_final/9_1.JPG"]
    )
    for path in (root, tmp_path):
        data = load_data(f"sop:{path}")
        assert (classes(data.train), classes(data.test)) == (["1", "2"], ["11319"])
        assert all_exist(data) and (len(data.train), len(data.test)) == (3, 2)


def test_a_malformed_list_of_products_is_reported_with_its_line(tmp_path: Path) -> None:
    write_products(tmp_path, "Ebay_train.txt", ["1 1 1 a_final/1.JPG", "2 1 a_final/2.JPG"])
    with pytest.raises(TrainingError, match=r"Ebay_train\.txt, line 3: expected 4 fields, found '2 1 a_final/2\.JPG'"):
        load_data(f"sop:{tmp_path}")
    write(tmp_path / "Ebay_train.txt", "1 1 1 a_final/1.JPG\n")
    with pytest.raises(TrainingError, match=r"line 1: expected 'image_id class_id super_class_id path'"):
        load_data(f"sop:{tmp_path}")
    write_products(tmp_path, "Ebay_train.txt", ["1 1 1 a_final/1.JPG", "2 2 1 a_final/2.JPG"])
    with pytest.raises(TrainingError, match=r"No list at .*Ebay_test\.txt"):
        load_data(f"sop:{tmp_path}")


CLOTHES = [
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
    ("img/MEN/Tees/id_00000003/01_1_front.jpg", "id_00000003", "train"),
    ("img/WOMEN/Skirts/id_00000001/02_1_front.jpg", "id_00000001", "query"),
    ("img/WOMEN/Skirts/id_00000001/02_2_side.jpg", "id_00000001", "gallery"),
    ("img/WOMEN/Skirts/id_00000001/02_3_back.jpg", "id_00000001", "gallery"),
]


@pytest.mark.parametrize("images", ["img", "Img/img", "Img"])
@pytest.mark.parametrize("file", ["Eval/list_eval_partition.txt", "list_eval_partition.txt"])
def test_in_shop_knows_queries_from_gallery_wherever_its_images_lie(tmp_path: Path, file: str, images: str) -> None:
    write(tmp_path / file, partition(CLOTHES))
    for image, _, _ in CLOTHES:
        touch(tmp_path / images / image.removeprefix("img/"))
    data = load_data(f"inshop:{tmp_path}")
    assert classes(data.train) == ["id_00000002", "id_00000003"] and all_exist(data)
    assert [(photo.is_query, photo.is_gallery) for photo in data.test] == [(True, False), (False, True), (False, True)]


def test_a_malformed_list_of_in_shop_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "list_eval_partition.txt"
    touch(tmp_path / CLOTHES[0][0])
    write(file, partition(CLOTHES, count=52712))
    with pytest.raises(TrainingError, match="declares 52712 images but lists 6"):
        load_data(f"inshop:{tmp_path}")
    write(file, partition([*CLOTHES, ("img/x.jpg", "id_1", "test")]))
    with pytest.raises(TrainingError, match="line 9: status 'test' is not train, query or gallery"):
        load_data(f"inshop:{tmp_path}")
    write(file, "")
    with pytest.raises(TrainingError, match="'' is not a number"):
        load_data(f"inshop:{tmp_path}")


def test_in_shop_without_its_images_is_refused_with_their_folder(tmp_path: Path) -> None:
    write(tmp_path / "list_eval_partition.txt", partition(CLOTHES))
    with pytest.raises(TrainingError, match=r"folder WOMEN is in none of .*img\.zip"):
        load_data(f"inshop:{tmp_path}")
