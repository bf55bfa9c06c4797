"""The history of jobs: what each came to, seen and stopped from other processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from index.cli.job_progress import line_of
from index.errors import LookalikeError
from index.gallery.errors import JobMissing
from index.gallery.store.sqlite_jobs import SQLiteJobs

RUN_ONE = """
import sys, time
from pathlib import Path
from index.gallery.store.sqlite_jobs import SQLiteJobs
log = SQLiteJobs(Path(sys.argv[1]))
job = log.begin("shop.csv", "b" * 16) if len(sys.argv) == 2 else log.adopt(int(sys.argv[2]))
job.hold()
job.update(stage="embedding", total=10, done=4, embedded=4)
print(job.record.id, flush=True)
while not job.stopping:
    time.sleep(0.02)
job.update(state="cancelled")
"""


def start_one(directory: Path, *arguments: int) -> tuple[subprocess.Popen[str], int]:
    """A process that runs a job until it is stopped, and the job's number."""
    command = [sys.executable, "-c", RUN_ONE, str(directory), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def end(process: subprocess.Popen[str]) -> int:
    assert process.stdout
    process.stdout.close()
    return process.wait(20)


def test_every_process_sees_a_job_and_how_it_ended(tmp_path: Path) -> None:
    process, number = start_one(tmp_path)
    with closing(SQLiteJobs(tmp_path)) as log:
        seen = log.get(number)
        assert (seen.state, seen.stage, seen.done, seen.total) == ("running", "embedding", 4, 10)
        log.cancel(number)
        assert end(process) == 0, "it saw that it was to stop"
        assert log.get(number).state == "cancelled"
        with pytest.raises(LookalikeError, match=r"not running: it is cancelled"):
            log.cancel(number)


def test_a_killed_job_is_interrupted_even_while_nobody_waited_for_its_process(tmp_path: Path) -> None:
    process, number = start_one(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    with closing(SQLiteJobs(tmp_path)) as log:
        while (state := log.get(number).state) == "running":
            pass  # the kernel takes a moment
        assert state == "interrupted"
        assert "run it again" in line_of(log.get(number))
    end(process)


def test_a_killed_job_of_another_container_is_interrupted_too(tmp_path: Path) -> None:
    process, number = start_one(tmp_path)
    with closing(SQLiteJobs(tmp_path)) as log:
        log._db.execute("UPDATE jobs SET host = 'another', process = 1")  # number 1 is alive everywhere
        assert log.get(number).state == "running"
        process.kill()
        end(process)
        assert log.get(number).state == "interrupted"
        log.begin("shop.csv", "b" * 16)
        assert log.get(number).state == "interrupted" and not list(tmp_path.glob("*.lock")), "which the next one notes"


def test_a_job_begun_for_another_process_runs_until_that_one_ends(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as log:
        begun = log.begin("shop.csv", "b" * 16).record.id
        assert log.get(begun).state == "running", "its process is still starting"
        process, number = start_one(tmp_path, begun)
        assert number == begun
        process.kill()
        end(process)
        assert log.get(begun).state == "interrupted", "although this process is alive"


@pytest.mark.parametrize("host", ["another", "this"])
def test_a_job_killed_before_it_was_held_is_soon_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Also when its container was started again, where the same number runs again."""
    with closing(SQLiteJobs(tmp_path)) as log:
        begun = log.begin("shop.csv", "b" * 16).record
        monkeypatch.setattr("socket.gethostname", lambda: host)
        log._db.execute("UPDATE jobs SET host = 'this'")
        monkeypatch.setattr("time.time", lambda: begun.updated + 30)
        assert log.get(begun.id).state == "running", "its process may still be starting"
        monkeypatch.setattr("time.time", lambda: begun.updated + 61)
        assert log.get(begun.id).state == "interrupted"


def test_the_newest_jobs_come_first(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as log:
        for name in ("monday.csv", "tuesday.csv", "wednesday.csv"):
            job = log.begin(name, "b" * 16)
            job.update(state="done")
        assert [record.source for record in log.newest(2)] == ["wednesday.csv", "tuesday.csv"]
        with pytest.raises(JobMissing, match="no job 4"):
            log.get(4)


def test_the_rate_counts_the_time_that_passed(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as log:
        job = log.begin("shop.csv", "b" * 16)
        job.record = job.record.model_copy(update={"started": job.record.started - 10})
        job.update(total=400, done=100)
        assert job.record.rate == pytest.approx(10, rel=0.1)
        assert job.record.seconds_left == pytest.approx(30, rel=0.1)
        job.update(done=200)
        assert job.record.rate == pytest.approx(20, rel=0.1), "also when it was saved just before"
        job.update(state="done", done=400)
        assert job.record.seconds_left is None


def _open_and_begin(directory: Path, together: "multiprocessing.synchronize.Barrier") -> None:
    together.wait()
    log = SQLiteJobs(directory)
    log.begin("shop.csv", "b" * 16).update(state="done")
    log.close()


def test_processes_may_make_the_history_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(20):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        together = context.Barrier(4)
        processes = [context.Process(target=_open_and_begin, args=(directory, together)) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 4
        with closing(SQLiteJobs(directory)) as log:
            assert sorted(record.id for record in log.newest()) == [1, 2, 3, 4]
