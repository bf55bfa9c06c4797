"""Deletion of what is no longer in the source: only if requested, and nothing if it is suspiciously much."""

import csv
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import open_gallery
from index.gallery.jobs import Job
from index.ingest.pipeline import Cancelled, PipelineSettings, ReindexError
from index.items import Item
from index.jobs import JobRecord
from tests.index.ingest.test_pipeline import active_bundle, contents, last_job, remove_rows, run
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, index_source, write_tiny_source


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_tiny_bundle(tmp_path / "bundle")


def items(gallery: Path) -> set[str]:
    opened = open_gallery(gallery)
    found = {item.id for item in opened.scan().items}
    opened.close()
    return found


def store_empty_items(gallery: Path, *item_ids: str) -> None:
    """Stores items without photos, as the API does."""
    opened = open_gallery(gallery)
    opened.upsert([(Item(id=item_id), []) for item_id in item_ids], "b" * 16)
    opened.close()


def test_deletion_has_to_be_requested(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    remove_rows(source, "ball-red", "blue-1.jpg")
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle).deleted == 0
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle, delete_missing=True)
    assert (summary.deleted, summary.embedded) == (3, 0)
    left = contents(tmp_path / "gallery")
    assert len(left) == 13 and ("ball-blue", "blue-0.jpg") in left and ("ball-blue", "blue-1.jpg") not in left
    opened = open_gallery(tmp_path / "gallery")
    assert opened.get_item("ball-red") is None
    opened.close()


def test_a_suspicious_source_deletes_nothing(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    remove_rows(source, "red", "green")
    with pytest.raises(ReindexError, match=r"4 of 16 images are not in the source, more than 20%.*--max-delete"):
        index_source(source, gallery=tmp_path / "gallery", bundle=bundle, delete_missing=True)
    assert len(contents(tmp_path / "gallery")) == 16
    assert last_job(tmp_path / "gallery").state == "failed"
    assert run([source], tmp_path / "gallery", bundle, delete_missing=True, max_delete=0.25).deleted == 4
    remove_rows(source, "blue", "cyan", "purple", "orange")
    assert run([source], tmp_path / "gallery", bundle, delete_missing=True, max_delete=1).deleted == 8


def test_a_suspicious_source_activates_no_new_bundle(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    remove_rows(source, "red", "green")
    with pytest.raises(ReindexError, match="nothing was deleted"):
        index_source(source, gallery=tmp_path / "gallery", bundle=other, delete_missing=True)
    assert len(contents(tmp_path / "gallery")) == 16 and active_bundle(tmp_path / "gallery") == Bundle.load(bundle).id


def test_a_photo_that_is_temporarily_unreadable_is_not_deleted(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    (source.parent / "red-0.jpg").unlink()
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle, delete_missing=True)
    assert (summary.deleted, summary.rejected, summary.state) == (0, 1, "partial")
    assert ("ball-red", "red-0.jpg") in contents(tmp_path / "gallery")


def test_an_item_without_photos_is_deleted_too(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    complete = source.read_text()
    source.write_text(complete.replace("red-", "lost-"))
    assert index_source(source, gallery=gallery, bundle=bundle, delete_missing=True).rejected == 2
    assert "ball-red" in items(gallery), "the source still names it, without a usable photo"
    store_empty_items(gallery, "over-the-api")
    source.write_text(complete)
    remove_rows(source, "red")
    assert index_source(source, gallery=gallery, bundle=bundle, delete_missing=True).deleted == 2
    assert items(gallery) == {f"ball-{colour}" for colour in COLOURS[1:]}


def test_many_items_without_photos_are_suspicious_too(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    store_empty_items(gallery, *(f"empty-{number}" for number in range(5)))
    with pytest.raises(
        ReindexError, match=r"5 of 21 images and items without images are not in the source, more than 20%"
    ):
        index_source(source, gallery=gallery, bundle=bundle, delete_missing=True)
    assert len(items(gallery)) == 13
    assert run([source], gallery, bundle, delete_missing=True, max_delete=1).deleted == 5
    assert len(items(gallery)) == 8


def test_items_are_deleted_in_batches_between_which_a_job_can_be_stopped(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    remove_rows(source, "red", "-1.jpg")
    options = {"delete_missing": True, "max_delete": 1, "settings": PipelineSettings(chunk_size=3)}
    started: list[Job] = []

    def stop_while_deleting(record: JobRecord) -> None:
        if record.deleted:
            started[0].stop()

    with pytest.raises(Cancelled):
        run([source], gallery, bundle, on_start=started.append, on_progress=stop_while_deleting, **options)
    stopped = last_job(gallery)
    assert (stopped.state, stopped.deleted) == ("cancelled", 3) and len(contents(gallery)) == 13
    assert run([source], gallery, bundle, **options).deleted == 6
    assert contents(gallery) == {(f"ball-{colour}", f"{colour}-0.jpg") for colour in COLOURS[1:]}


def test_a_bad_row_is_a_reject_and_its_item_stays(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    before = items(gallery)
    lines = source.read_text().splitlines()
    good = [line for line in lines if "red" not in line and "green" not in line]
    source.write_text("\n".join([*good, f"ball-red,{'x' * 600}{',' * (lines[0].count(',') - 1)}"]) + "\n")
    record = index_source(source, gallery=gallery, bundle=bundle, delete_missing=True)
    assert (record.state, record.total, record.rejected, record.deleted) == ("partial", len(good), 1, 2)
    assert items(gallery) == before - {"ball-green"}
    (reject,) = csv.DictReader((tmp_path / "rejects.csv").open())
    assert (reject["item_id"], reject["reason"]) == ("ball-red", "row")
    assert reject["place"] == f"{source}, line {len(good) + 1}" and "600 characters" in reject["problem"]
    with pytest.raises(LookalikeError, match=f"line {len(good) + 1}: image_id"):
        index_source(source, gallery=gallery, bundle=bundle, max_rejects=0.01)


def test_a_row_that_does_not_name_its_item_keeps_all_items(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    before = items(gallery)
    source.write_text(
        "".join(line for line in source.read_text().splitlines(True) if "red" not in line) + "x,y,z,1,2\n"
    )
    record = index_source(source, gallery=gallery, bundle=bundle, delete_missing=True)
    assert items(gallery) == before and (record.rejected, record.deleted) == (1, 0)
    assert "Nothing was deleted, because a row of the source does not name its item." in record.message
