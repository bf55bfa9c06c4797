"""Re-indexing with another bundle while a service stores images in the gallery."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.embedding.bundle import Bundle
from index.gallery import BuildReport, Gallery, open_gallery, verify_gallery
from index.gallery.types import Item, NeededBundles, NewImage
from index.ingest.options import ReindexOptions
from index.ingest.pipeline import DEFAULT_SETTINGS, PipelineSettings, ReindexError, run_reindex
from index.jobs import JobRecord
from tests.index.ingest.test_pipeline import active_bundle, run
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import index_source, write_tiny_source


class Writer:
    """A service that stores an image with the active bundle's vector when a job begins to build its index."""

    def __init__(self, gallery: Path, bundle: Path, other: Path) -> None:
        self._gallery = open_gallery(gallery)
        self._bundles = [Bundle.load(bundle).id, Bundle.load(other).id]
        self.later: threading.Timer | None = None

    def store(self, name: str, *, number: int = 0) -> None:
        size = 48 if number == 0 else 192
        image = NewImage("front", f"{len(name):064x}", np.ones(size, np.float32) / np.sqrt(size), b"jpeg")
        self._gallery.upsert([(Item(id=name), [image])], self._bundles[number])

    def store_while_building(self, record: JobRecord) -> None:
        if record.stage == "building" and self.later is None:
            self.store("mug")
            self.later = threading.Timer(0.3, self.store, ["mug"], {"number": 1})
            self.later.start()

    def close(self) -> None:
        if self.later:
            self.later.join()
        self._gallery.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """Indexes the tiny source with the first bundle, and makes a second one."""
    bundle = make_tiny_bundle(tmp_path / "bundle")
    index_source(write_tiny_source(tmp_path / "source"), gallery=tmp_path / "gallery", bundle=bundle)
    with closing(Writer(tmp_path / "gallery", bundle, make_tiny_bundle(tmp_path / "other", grid=8))) as opened:
        yield opened


def run_other(tmp_path: Path, **options: Any) -> JobRecord:
    return run([tmp_path / "source" / "catalogue.csv"], tmp_path / "gallery", tmp_path / "other", **options)


def test_a_new_bundle_waits_for_the_vector_of_an_image_that_a_service_is_storing(
    tmp_path: Path, writer: Writer
) -> None:
    summary = run_other(tmp_path, on_progress=writer.store_while_building)
    assert (summary.state, summary.missing, summary.message) == ("done", 0, "")
    assert verify_gallery(tmp_path / "gallery") == []


def test_an_image_that_never_gets_a_vector_does_not_keep_a_new_bundle_from_its_activation(
    tmp_path: Path, writer: Writer
) -> None:
    def store(record: JobRecord) -> None:
        if record.stage == "building":
            writer.store("mug")

    summary = run_other(tmp_path, on_progress=store, settings=DEFAULT_SETTINGS._replace(grace_seconds=0.2))
    assert (summary.state, summary.missing) == ("partial", 1)
    assert "1 images have no vector of bundle" in summary.message
    (fault,) = verify_gallery(tmp_path / "gallery")
    assert "mug/front" in fault.problem


def test_images_from_before_the_job_are_not_waited_for(tmp_path: Path, writer: Writer) -> None:
    writer.store("mug")
    summary = run_other(tmp_path, settings=DEFAULT_SETTINGS._replace(grace_seconds=3600))
    assert (summary.state, summary.missing) == ("partial", 1)


def test_many_images_that_are_stored_during_the_build_fail_the_job(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Gallery.prepare

    def store_before(self: Gallery, bundle_id: str, **options: Any) -> BuildReport:
        for number in range(1, 5):
            writer.store("m" * number)
        return prepare(self, bundle_id, **options)

    monkeypatch.setattr(Gallery, "prepare", store_before)
    with pytest.raises(ReindexError, match=r"4 of the gallery's 20 images .* disappear from searches"):
        run_other(tmp_path, max_delete=0.19, settings=DEFAULT_SETTINGS._replace(grace_seconds=0.1))
    assert active_bundle(tmp_path / "gallery") == Bundle.load(tmp_path / "bundle").id


def test_the_copy_of_a_bundle_is_kept_before_the_source_is_read(tmp_path: Path, writer: Writer) -> None:
    kept: list[NeededBundles] = []

    def look(record: JobRecord) -> None:
        if not record.total:
            with open_gallery(tmp_path / "gallery") as opened:
                kept.append(opened.needed_bundles())

    run_other(tmp_path, on_progress=look)
    assert kept[0].prepared == (Bundle.load(tmp_path / "other").id,)


def test_a_first_bundle_that_fails_its_expectation_is_not_active(tmp_path: Path) -> None:
    source, bundle = write_tiny_source(tmp_path / "source"), make_tiny_bundle(tmp_path / "bundle")
    wrong = source.with_name("wrong.csv")
    wrong.write_text("item_id,image\nnot-there,red-0.jpg\n")
    expected = {"queries": str(wrong), "expect_recall": 1.0}
    with pytest.raises(ReindexError, match=r"is 0.0000, below 1.0000; the bundle was not activated"):
        index_source(source, gallery=tmp_path / "gallery", bundle=bundle, **expected)
    with open_gallery(tmp_path / "gallery") as gallery:
        assert gallery.active_bundle() is None
        assert gallery.stats().bundle_id is None and gallery.compact() is None
        (found,) = gallery.bundles()
        assert (found.state, found.vectors, found.backbone) == ("prepared", 16, Bundle.load(bundle).card.backbone)
        assert gallery.search(np.ones((1, found.dimension), np.float32), bundle_id=found.id).hits == [[]]
    record = index_source(source, gallery=tmp_path / "gallery", bundle=bundle, queries=str(wrong))
    assert (record.embedded, record.message) == (0, "Recall@1 of the labelled queries is 0.0000.")
    with open_gallery(tmp_path / "gallery") as gallery:
        assert [(bundle.state, bundle.vectors) for bundle in gallery.bundles()] == [("active", 16)]


def test_a_second_job_of_a_gallery_is_refused_or_waits(tmp_path: Path) -> None:
    source, bundle = write_tiny_source(tmp_path / "source"), make_tiny_bundle(tmp_path / "bundle")
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        running = gallery.jobs.begin("other.csv", "0" * 16)
        running.hold()
        with pytest.raises(ReindexError, match=rf"Job {running.record.id} is running on .*gallery. .*--wait"):
            index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
        assert [job.source for job in gallery.jobs.newest()] == ["other.csv"], "the refused job has no record"
        end = threading.Timer(0.3, running.update, kwargs={"state": "done"})
        end.start()
        options = ReindexOptions(
            source=[str(source)], gallery=str(tmp_path / "gallery"), bundle=bundle, rejects=tmp_path / "rejects.csv"
        )
        record = run_reindex(options, wait=True, settings=PipelineSettings(wait_seconds=0.05))
        end.join()
        assert (record.state, record.embedded) == ("done", 16)
