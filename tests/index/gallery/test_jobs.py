"""Jobs of a gallery on every engine: their records, exclusiveness and cancellation."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.gallery.errors import JobMissing, JobRunning
from index.gallery.types import NeededBundles
from index.jobs import JobState
from tests.support.tiny_bundle import make_tiny_bundle

from .conftest import OpenEngine
from .reference import BUNDLE, MUG, photo, unit


def test_a_job_is_recorded_from_its_start_to_its_end(gallery: Gallery, open_engine: OpenEngine) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE)
    job.hold()
    job.update(stage="embedding", total=10, done=4)
    seen = open_engine().jobs.get(job.record.id)
    assert (seen.source, seen.state, seen.stage, seen.done) == ("shop.csv", "running", "embedding", 4)
    job.update(state="done", done=10)
    assert [(record.state, record.done) for record in gallery.jobs.newest()] == [("done", 10)]
    with pytest.raises(JobMissing, match="no job 77"):
        gallery.jobs.get(77)


def test_an_exclusive_job_is_refused_while_another_runs(gallery: Gallery, open_engine: OpenEngine) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE, exclusive=True)
    job.hold()
    with pytest.raises(JobRunning, match=f"Job {job.record.id} is running") as refused:
        open_engine().jobs.begin("shop.csv", BUNDLE, exclusive=True)
    assert refused.value.job_id == job.record.id
    job.update(state="done")
    assert open_engine().jobs.begin("shop.csv", BUNDLE, exclusive=True).record.id > job.record.id


def test_a_job_sees_that_it_was_cancelled_through_another_handle(gallery: Gallery, open_engine: OpenEngine) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE)
    job.hold()
    assert not job.stopping
    open_engine().jobs.cancel(job.record.id)
    assert job.stopping and not job.was_stopped
    job.update(state="cancelled")
    with pytest.raises(LookalikeError, match="not running: it is cancelled"):
        gallery.jobs.cancel(job.record.id)


def test_the_newest_jobs_are_listed_first(gallery: Gallery) -> None:
    for source in ("monday.csv", "tuesday.csv", "wednesday.csv"):
        gallery.jobs.begin(source, BUNDLE).update(state="done")
    assert [record.source for record in gallery.jobs.newest(2)] == ["wednesday.csv", "tuesday.csv"]


def test_a_job_can_be_stopped_from_within_its_process(gallery: Gallery) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE)
    assert not job.was_stopped
    job.stop()
    assert job.was_stopped and job.stopping


def test_progress_is_saved_at_intervals_but_a_new_stage_immediately(gallery: Gallery) -> None:
    job = gallery.jobs.begin("shop.csv", BUNDLE)
    job.update(done=1)
    job.update(done=2)
    assert gallery.jobs.get(job.record.id).done == 1
    job.update(stage="building")
    assert (gallery.jobs.get(job.record.id).done, gallery.jobs.get(job.record.id).stage) == (2, "building")


# The bundles that jobs prepare


@pytest.fixture
def new(trio: Gallery, tmp_path: Path) -> str:
    """Returns the id of a bundle that is not active, of which the gallery has a copy."""
    return keep_bundle(trio, tmp_path / "new", grid=2)


def keep_bundle(gallery: Gallery, path: Path, *, grid: int) -> str:
    bundle = Bundle.load(make_tiny_bundle(path, grid=grid))
    gallery.keep_bundle(bundle)
    return bundle.id


def end_job(gallery: Gallery, bundle_id: str, state: JobState, done: int = 0) -> None:
    gallery.jobs.begin("shop.csv", bundle_id).update(state=state, done=done)


def test_a_new_image_needs_the_active_bundle_and_those_that_running_jobs_prepare(
    trio: Gallery, new: str, tmp_path: Path, open_engine: OpenEngine
) -> None:
    assert trio.needed_bundles() == NeededBundles(BUNDLE, ())
    third = keep_bundle(trio, tmp_path / "third", grid=8)
    jobs = [trio.jobs.begin("shop.csv", bundle_id) for bundle_id in (new, third, BUNDLE)]
    assert open_engine().needed_bundles() == NeededBundles(BUNDLE, (third, new))
    jobs[1].update(state="done")
    assert trio.needed_bundles().prepared == (new,), "the newest job of a new bundle is done, another one still runs"
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], new)
    trio.activate(new)
    assert trio.needed_bundles() == NeededBundles(new, ()), "its job has not recorded its end yet"


@pytest.mark.parametrize("state", ["interrupted", "cancelled", "failed"])
def test_a_bundle_is_prepared_until_its_job_is_repeated(trio: Gallery, new: str, state: JobState) -> None:
    end_job(trio, new, state, done=3)
    end_job(trio, BUNDLE, "done")
    end_job(trio, new, "failed")
    assert trio.needed_bundles() == NeededBundles(BUNDLE, (new,))
    end_job(trio, new, "partial", done=3)
    assert trio.needed_bundles() == NeededBundles(BUNDLE, ())


def test_a_job_that_failed_at_its_start_prepares_nothing(trio: Gallery, new: str) -> None:
    end_job(trio, new, "failed")
    assert trio.needed_bundles() == NeededBundles(BUNDLE, ())


def test_only_a_bundle_with_a_copy_is_prepared_and_dropping_it_ends_that(trio: Gallery, new: str) -> None:
    end_job(trio, new, "interrupted")
    trio.jobs.begin("shop.csv", "d" * 16)
    assert trio.needed_bundles() == NeededBundles(BUNDLE, ()), "of the newest one there is no copy yet"
    trio.jobs.begin("shop.csv", new)
    assert trio.needed_bundles() == NeededBundles(BUNDLE, (new,))
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], new)
    trio.drop_bundle(new)
    assert trio.needed_bundles() == NeededBundles(BUNDLE, ())


def test_a_job_that_ends_while_the_bundles_are_read_leaves_none_out(
    trio: Gallery, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, active_bundle = trio.jobs.begin("shop.csv", new), trio.active_bundle
    trio.upsert([(MUG, [photo("front", unit(0, 1), 1)])], new)

    def activate_before() -> str | None:
        trio.activate(new)
        job.update(state="done")
        return active_bundle()

    monkeypatch.setattr(trio, "active_bundle", activate_before)
    assert trio.needed_bundles() == NeededBundles(new, ())


def test_a_history_that_cannot_be_read_does_not_stop_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        gallery.upsert([(MUG, [photo("front", unit(0, 1), 1)])], BUNDLE)
        end_job(gallery, BUNDLE, "done")
        with closing(sqlite3.connect(tmp_path / "gallery" / "jobs.sqlite")) as damaged:
            damaged.execute("DROP TABLE jobs")
        assert gallery.needed_bundles() == NeededBundles(BUNDLE, ())
    assert "history cannot be read" in caplog.text
