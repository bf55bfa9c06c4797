"""Deleting what left a source: all of it when asked, nothing of it when that is suspiciously much."""

from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from index.gallery import open_gallery
from index.gallery.jobs import Job, JobRecord
from index.gallery.types import Item
from index.ingest import pipeline
from index.ingest.pipeline import Cancelled, ReindexError, Rules
from tests.index.ingest.test_pipeline import contents, last_job, live, run, without
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


def store_bare(gallery: Path, *item_ids: str) -> None:
    """Stores items without photos, as the API does."""
    opened = open_gallery(gallery)
    opened.upsert([(Item(id=item_id), []) for item_id in item_ids], "b" * 16)
    opened.close()


def test_what_left_the_source_stays_unless_asked(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    without(source, "ball-red", "blue-1.jpg")
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle).deleted == 0
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=Rules(delete_missing=True))
    assert (summary.deleted, summary.embedded) == (3, 0)
    left = contents(tmp_path / "gallery")
    assert len(left) == 13 and ("ball-blue", "blue-0.jpg") in left and ("ball-blue", "blue-1.jpg") not in left
    opened = open_gallery(tmp_path / "gallery")
    assert opened.get("ball-red") is None
    opened.close()


def test_a_suspicious_source_deletes_nothing(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    without(source, "red", "green")
    with pytest.raises(ReindexError, match=r"4 of 16 images left the source, more than 20%.*--force"):
        index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=Rules(delete_missing=True))
    assert len(contents(tmp_path / "gallery")) == 16
    assert last_job(tmp_path / "gallery").state == "failed"
    rules = Rules(delete_missing=True, most_deleted=0.25)
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=rules).deleted == 4
    without(source, "blue", "cyan", "purple", "orange")
    rules = Rules(delete_missing=True, force=True)
    assert index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=rules).deleted == 8


def test_a_suspicious_source_lets_no_new_bundle_go_live(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    other = make_tiny_bundle(tmp_path / "other", grid=8)
    without(source, "red", "green")
    with pytest.raises(ReindexError, match="nothing was deleted"):
        index_source(source, gallery=tmp_path / "gallery", bundle=other, rules=Rules(delete_missing=True))
    assert len(contents(tmp_path / "gallery")) == 16 and live(tmp_path / "gallery") == Bundle.load(bundle).id


def test_a_photo_that_cannot_be_read_tonight_is_not_deleted(tmp_path: Path, bundle: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    (source.parent / "red-0.jpg").unlink()
    summary = index_source(source, gallery=tmp_path / "gallery", bundle=bundle, rules=Rules(delete_missing=True))
    assert (summary.deleted, summary.rejected, summary.state) == (0, 1, "partial")
    assert ("ball-red", "red-0.jpg") in contents(tmp_path / "gallery")


def test_an_item_without_photos_goes_with_the_source_too(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    whole = source.read_text()
    source.write_text(whole.replace("red-", "lost-"))
    rules = Rules(delete_missing=True)
    assert index_source(source, gallery=gallery, bundle=bundle, rules=rules).rejected == 2
    assert "ball-red" in items(gallery), "the source names it, if without a usable photo"
    store_bare(gallery, "over-the-api")
    source.write_text(whole)
    without(source, "red")
    assert index_source(source, gallery=gallery, bundle=bundle, rules=rules).deleted == 2
    assert items(gallery) == {f"ball-{colour}" for colour in COLOURS[1:]}


def test_many_items_without_photos_are_suspicious_too(tmp_path: Path, bundle: Path) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    store_bare(gallery, *(f"bare-{number}" for number in range(5)))
    with pytest.raises(ReindexError, match=r"5 of 21 images and items without any left the source, more than 20%"):
        index_source(source, gallery=gallery, bundle=bundle, rules=Rules(delete_missing=True))
    assert len(items(gallery)) == 13
    rules = Rules(delete_missing=True, force=True)
    assert index_source(source, gallery=gallery, bundle=bundle, rules=rules).deleted == 5
    assert len(items(gallery)) == 8


def test_deleting_is_done_in_batches_between_which_it_can_be_stopped(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    index_source(source, gallery=gallery, bundle=bundle)
    without(source, "red", "-1.jpg")
    monkeypatch.setattr(pipeline, "_CHUNK", 3)
    begun: list[Job] = []

    def stop_while_deleting(record: JobRecord) -> None:
        if record.deleted:
            begun[0].stop()

    rules = Rules(delete_missing=True, force=True)
    with pytest.raises(Cancelled):
        run([source], gallery, bundle, rules=rules, on_start=begun.append, on_progress=stop_while_deleting)
    stopped = last_job(gallery)
    assert (stopped.state, stopped.deleted) == ("cancelled", 3) and len(contents(gallery)) == 13
    assert run([source], gallery, bundle, rules=rules).deleted == 6
    assert contents(gallery) == {(f"ball-{colour}", f"{colour}-0.jpg") for colour in COLOURS[1:]}
