"""The CSV of Product Search: lines of one product are one item, with its sets, labels and regions of images."""

from pathlib import Path

import pytest

from index.embedding.images import Region
from index.ingest.feeds.google_product_search import read_csv
from index.ingest.tables import Row

LINES = """\
"gs://shop/shoes/1.jpg","shoe-1-front","winter","shoe-1","apparel-v2","Boot","colour=brown,colour=black,size=42","0.1,0.2,0.9,0.2,0.9,0.8,0.1,0.8"
gs://shop/shoes/2.jpg,,winter,shoe-2,apparel-v2,,,
"gs://shop/shoes/1b.jpg",,"sale","shoe-1","apparel-v2","another name","colour=red","10,20,110,20,110,220,10,220"
"gs://shop/shoes/1.jpg","shoe-1-front","sale","shoe-1","apparel-v2","Boot","colour=brown","0.1,0.2,0.9,0.2,0.9,0.8,0.1,0.8"
gs://shop/shoes/2.jpg,,winter,shoe-2,apparel-v2
"""


def read(tmp_path: Path, text: str) -> list[Row]:
    (tmp_path / "import.csv").write_text(text)
    return list(read_csv(tmp_path / "import.csv", "import.csv").rows)


def test_a_product_has_the_images_and_sets_of_all_its_lines(tmp_path: Path) -> None:
    assert read(tmp_path, LINES) == [
        Row(
            "line 1",
            {
                "item_id": "shoe-1",
                "title": "Boot",
                "product_sets": ["winter", "sale"],
                "product_category": "apparel-v2",
                "colour": ["brown", "black"],
                "size": 42,
                "image": ["gs://shop/shoes/1.jpg", "gs://shop/shoes/1b.jpg"],
                "image_id": ["shoe-1-front", "gs://shop/shoes/1b.jpg#10,20,110,20,110,220,10,220"],
            },
            regions=[Region(0.1, 0.2, 0.9, 0.8), Region(10, 20, 110, 220, in_pixels=True)],
        ),
        Row(
            "line 2",
            {
                "item_id": "shoe-2",
                "title": None,
                "product_sets": ["winter"],
                "product_category": "apparel-v2",
                "image": ["gs://shop/shoes/2.jpg"],
                "image_id": ["gs://shop/shoes/2.jpg"],
            },
            regions=[None],
        ),
    ]


def test_names_of_columns_above_the_images_are_not_an_image(tmp_path: Path) -> None:
    names = "image-uri,image-id,product-set-id,product-id,product-category,product-display-name,labels,bounding-poly\n"
    assert [row.values["item_id"] for row in read(tmp_path, names + LINES)] == ["shoe-1", "shoe-2"]


def test_a_label_never_takes_the_name_of_a_field(tmp_path: Path) -> None:
    (row,) = read(tmp_path, 'gs://a/1.jpg,,,p,toys-v2,,"title=a,product_sets=b,1=c",\n')
    assert {name: row.values[name] for name in ("label_title", "label_product_sets", "1", "title")} == {
        "label_title": "a",
        "label_product_sets": "b",
        "1": "c",
        "title": None,
    }


@pytest.mark.parametrize(
    ("line", "item_id", "problem"),
    [
        ("gs://a/1.jpg,,s,,toys-v2", "", "no value for 'product-id'"),
        (",,s,p,toys-v2", "p", "no value for 'image-uri'"),
        ('gs://a/1.jpg,,s,p,toys-v2,,"colour"', "p", "labels: 'colour' is not of the form key=value"),
        ('gs://a/1.jpg,,s,p,toys-v2,,,"1,2,3"', "p", "bounding-poly: 3 numbers are not two or more points"),
        ('gs://a/1.jpg,,s,p,toys-v2,,,"1,2"', "p", "bounding-poly: 2 numbers are not two or more points"),
        ('gs://a/1.jpg,,s,p,toys-v2,,,"a,b,c,d"', "p", "bounding-poly: 'a,b,c,d' is not a list of numbers"),
        ('gs://a/1.jpg,,s,p,toys-v2,,,"0.1,0.1,1.5,0.9"', "p", "'0.1,0.1,1.5,0.9' is neither pixels nor shares"),
        ('gs://a/1.jpg,,s,p,toys-v2,,,"0.1,nan,0.5,0.9"', "p", "'0.1,nan,0.5,0.9' is neither pixels nor shares"),
        (f'gs://a/1.jpg,,s,p,toys-v2,,,"0,0,5,{"9" * 400}"', "p", "is neither pixels nor shares"),
        ('gs://a/1.jpg,,s,p,toys-v2,,,"-1,0,5,5"', "p", "'-1,0,5,5' is neither pixels nor shares"),
        ('gs://a/1.jpg,,s,p,toys-v2,,,"5,0,5,9"', "p", "'5,0,5,9' has no area"),
        ("gs://a/1.jpg,,s,p,toys-v2,,,,more", "p", "9 fields under 8 columns"),
    ],
)
def test_a_line_that_cannot_be_read_is_a_bad_row(tmp_path: Path, line: str, item_id: str, problem: str) -> None:
    bad, good = read(tmp_path, f"{line}\ngs://a/2.jpg,,s,q,toys-v2\n")
    assert bad.where == "line 1"
    assert problem in bad.problem
    assert (bad.values.get("item_id") or "", good.values["item_id"]) == (item_id, "q")


def test_the_corners_of_a_normalised_photo_are_not_pixels(tmp_path: Path) -> None:
    (row,) = read(tmp_path, 'gs://a/1.jpg,,s,p,toys-v2,,,"0,0,1,0,1,1,0,1"\n')
    assert row.regions == [Region(0, 0, 1, 1)]
