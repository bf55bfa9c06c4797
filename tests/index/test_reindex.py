"""Re-indexing: everything usable is found afterwards, and nothing is embedded twice."""

import csv
from pathlib import Path

import pytest

from index.bundle import Bundle
from index.embedder import Embedder
from index.errors import LookalikeError
from index.gallery import open_gallery
from index.images import decode
from index.sources import Source
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, index_source, tiny_photo, write_tiny_folder, write_tiny_source


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_tiny_bundle(tmp_path / "bundle")


def first(gallery: Path, bundle: Path, photo: bytes) -> str:
    embedder = Embedder(Bundle.load(bundle), threads=1)
    opened = open_gallery(gallery)
    pixels = embedder.bundle.preprocessing.apply(decode(photo))
    found = opened.search(embedder.embed(pixels[None]), bundle_id=embedder.bundle.id, top=1)
    opened.close()
    return found.hits[0][0].item.id


def test_a_new_photo_of_every_product_finds_it(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.unchanged, summary.rejected) == (16, 0, 0)
    for number, colour in enumerate(COLOURS):
        assert first(tmp_path / "gallery", bundle, tiny_photo(number, 3)) == f"ball-{colour}"


def test_a_second_run_embeds_only_what_changed(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    (source.parent / "red-1.jpg").write_bytes(tiny_photo(0, 5))
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.unchanged) == (1, 15)


def test_changed_attributes_are_stored_without_embedding(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    source.write_text(source.read_text().replace("Tiny", "Huge"))
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle).embedded == 0
    gallery = open_gallery(tmp_path / "gallery")
    item = gallery.get("ball-red")
    gallery.close()
    assert item is not None
    assert item.attributes == {"category": "ball", "colour": "red", "brand": "Huge", "price": 4.5}


def test_bad_photos_are_listed_and_do_not_stop_the_job(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (source.parent / "red-0.jpg").write_bytes(b"no photo")
    (source.parent / "blue-1.jpg").unlink()
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert (summary.embedded, summary.rejected) == (14, 2)
    with (tmp_path / "rejects.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["item_id"]: "No such file" in row["problem"] for row in rows} == {"ball-red": False, "ball-blue": True}
    write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    assert not (tmp_path / "rejects.csv").exists(), "the file tells of the last run only"


def test_a_source_without_a_usable_photo_fails(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "source.csv").write_text("item_id,image\n1,missing.jpg\n")
    with pytest.raises(LookalikeError, match="None of the 1 images"):
        index_source(tmp_path / "source.csv", gallery=tmp_path / "gallery", bundle=bundle)


def test_a_folder_of_folders_is_a_source(tmp_path: Path, bundle: Path) -> None:
    images = list(Source([write_tiny_folder(tmp_path / "photos", views=2)]))
    assert len(images) == 16 and images[0].item.id == "blue" and images[0].image_id == "0.jpg"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sku,photo\n1,a.jpg\n", "no column 'item_id' and no 'image'; it has sku, photo"),
        ("item_id,image\n", "names no images"),
        ("item_id,image\n1,\n", "line 2"),
        ("item_id,image\n1,a.jpg,surplus\n", "line 2"),
    ],
)
def test_a_wrong_table_is_refused_before_any_work(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "table.csv"
    table.write_text(text)
    with pytest.raises(LookalikeError, match=message):
        Source([table]).check()
