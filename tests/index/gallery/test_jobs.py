"""Jobs of a gallery on every engine: their records, exclusiveness and cancellation."""

import pytest

from index.errors import LookalikeError
from index.gallery import Gallery
from index.gallery.errors import JobMissing, JobRunning

from .conftest import OpenEngine
from .reference import BUNDLE


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
