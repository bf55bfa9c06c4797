"""The job history in SQLite: seen and cancelled by other processes, and interrupted by a kill."""

import errno
import fcntl
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import IO

import pytest

from index.cli.progress import format_job
from index.errors import LookalikeError
from index.gallery.errors import StorageFull, StoreError
from index.gallery.store.sqlite_jobs import JOBS_FILE, SQLiteJobs
from index.jobs import JobRecord
from tests.support.disk import files_up_to

RUN_JOB = """
import sys, time
from pathlib import Path
from index.gallery.store.sqlite_jobs import SQLiteJobs
jobs = SQLiteJobs(Path(sys.argv[1]))
job = jobs.begin("shop.csv", "b" * 16) if len(sys.argv) == 2 else jobs.adopt(int(sys.argv[2]))
job.hold()
job.update(stage="embedding", total=10, done=4, embedded=4)
print(job.record.id, flush=True)
while not job.stopping:
    time.sleep(0.02)
job.update(state="cancelled")
"""


def start_job(directory: Path, *arguments: int) -> tuple[subprocess.Popen[str], int]:
    """Starts a process that runs a job until it is cancelled; returns it and the job's id."""
    command = [sys.executable, "-c", RUN_JOB, str(directory), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def wait_for(process: subprocess.Popen[str]) -> int:
    assert process.stdout
    process.stdout.close()
    return process.wait(20)


def edit_jobs(directory: Path, statement: str) -> None:
    with closing(sqlite3.connect(directory / JOBS_FILE)) as database, database:
        assert database.execute(statement).rowcount == 1


def test_a_job_is_visible_to_and_cancelled_by_another_process(tmp_path: Path) -> None:
    process, number = start_job(tmp_path)
    with closing(SQLiteJobs(tmp_path)) as jobs:
        seen = jobs.get(number)
        assert (seen.state, seen.stage, seen.done, seen.total) == ("running", "embedding", 4, 10)
        jobs.cancel(number)
        assert wait_for(process) == 0, "it noticed the cancellation"
        assert jobs.get(number).state == "cancelled"
        with pytest.raises(LookalikeError, match=r"not running: it is cancelled"):
            jobs.cancel(number)


def test_a_killed_job_is_interrupted_even_while_its_process_is_a_zombie(tmp_path: Path) -> None:
    process, number = start_job(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    with closing(SQLiteJobs(tmp_path)) as jobs:
        while (state := jobs.get(number).state) == "running":
            pass  # the kernel may release the lock a moment later
        assert state == "interrupted"
        assert "run it again" in format_job(jobs.get(number))
    wait_for(process)


def test_a_killed_job_of_another_container_is_interrupted(tmp_path: Path) -> None:
    process, number = start_job(tmp_path)
    with closing(SQLiteJobs(tmp_path)) as jobs:
        edit_jobs(tmp_path, "UPDATE jobs SET host = 'another', process = 1")  # process 1 exists in every container
        assert jobs.get(number).state == "running"
        process.kill()
        wait_for(process)
        assert jobs.get(number).state == "interrupted"
        jobs.begin("shop.csv", "b" * 16)
        assert jobs.get(number).state == "interrupted" and not list(tmp_path.glob("*.lock")), "saved by the next job"


def test_a_job_begun_for_another_process_runs_until_that_process_ends(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        begun = jobs.begin("shop.csv", "b" * 16).record.id
        assert jobs.get(begun).state == "running", "its process is still starting"
        process, number = start_job(tmp_path, begun)
        assert number == begun
        process.kill()
        wait_for(process)
        assert jobs.get(begun).state == "interrupted", "although this process is alive"


@pytest.mark.parametrize("host", ["another", "this"])
def test_a_job_killed_before_its_claim_is_interrupted_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Also when its container was restarted, where another process has the same id."""
    with closing(SQLiteJobs(tmp_path)) as jobs:
        begun = jobs.begin("shop.csv", "b" * 16).record
        monkeypatch.setattr("socket.gethostname", lambda: host)
        edit_jobs(tmp_path, "UPDATE jobs SET host = 'this'")
        monkeypatch.setattr("time.time", lambda: begun.updated + 30)
        assert jobs.get(begun.id).state == "running", "its process may still be starting"
        monkeypatch.setattr("time.time", lambda: begun.updated + 61)
        assert jobs.get(begun.id).state == "interrupted"


def test_the_rate_is_computed_from_the_elapsed_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        now = [1000.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        job = jobs.begin("shop.csv", "b" * 16)
        now[0] += 10
        job.update(total=400, done=100)
        assert (job.record.seconds, job.record.rate, job.record.seconds_left) == (10, 10, 30)
        job.update(done=200)
        assert job.record.rate == 20, "also right after a save"
        job.update(state="done", done=400)
        assert job.record.seconds_left is None


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_changed_clock_neither_stops_the_progress_nor_changes_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        job, clock = jobs.begin("shop.csv", "b" * 16), [time.time()]
        job.hold()
        elapsed = [time.monotonic()]
        monkeypatch.setattr("time.monotonic", lambda: elapsed[0])
        monkeypatch.setattr("time.time", lambda: clock[0])
        elapsed[0] += 50
        job.update(total=400, done=100)
        clock[0] += jump
        elapsed[0] += 50
        job.update(done=200)
        saved = jobs.get(job.record.id)
        assert saved.done == 200, "it is saved"
        assert saved.rate == pytest.approx(2, rel=0.1) and saved.seconds_left == pytest.approx(100, rel=0.1)


def test_a_record_without_its_elapsed_time_has_no_rate() -> None:
    record = JobRecord(source="shop.csv", bundle_id="b" * 16, started=0, updated=0, total=400, done=100)
    assert (record.rate, record.seconds_left) == (0, None)


@pytest.mark.parametrize("state", ["failed", "cancelled", "partial"])
def test_the_end_of_a_job_is_kept_when_the_disk_is_full(tmp_path: Path, state: str) -> None:
    message = "Nothing was written to catalogue.sqlite: database or disk is full. Free space. " + "\x01ü" * 3000
    with closing(SQLiteJobs(tmp_path)) as jobs, closing(SQLiteJobs(tmp_path)) as others:
        job = jobs.begin("shop.csv " * 2000, "b" * 16)
        job.hold()
        job.update(stage="embedding", total=400, done=100)
        with files_up_to((tmp_path / f"{JOBS_FILE}-wal").stat().st_size):
            with pytest.raises(StorageFull, match="Free space"):
                job.update(stage="building")
            job.update(state=state, done=200, message=message)
            ended = others.get(job.record.id)
        assert ended == job.record.model_copy(update={"message": message[:500]})
        assert others.newest() == [ended]
        others.begin("shop.csv", "b" * 16, exclusive=True)
        assert not list(tmp_path.glob("*.lock")), "the next job has saved it"
        assert jobs.get(job.record.id) == ended


def test_a_job_does_not_start_on_a_full_disk(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        job = jobs.begin("shop.csv", "b" * 16)
        with files_up_to(100), pytest.raises(StorageFull, match="Free space"):
            job.hold()
        assert not list(tmp_path.glob("*.lock")) and not list(tmp_path.glob(".job*"))


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        job = jobs.begin("shop.csv", "b" * 16)
        job.hold()

        def fail(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", fail)
        for use in (job.hold, lambda: jobs.get(job.record.id), lambda: jobs.begin("shop.csv", "b" * 16)):
            with pytest.raises(LookalikeError, match=r"cannot be locked: No locks available\. Use a local disk"):
                use()


def _open_and_begin(directory: Path, barrier: "multiprocessing.synchronize.Barrier") -> None:
    barrier.wait()
    jobs = SQLiteJobs(directory)
    jobs.begin("shop.csv", "b" * 16).update(state="done")
    jobs.close()


@pytest.mark.slow
def test_processes_may_create_the_history_concurrently(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(20):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        barrier = context.Barrier(4)
        processes = [context.Process(target=_open_and_begin, args=(directory, barrier)) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 4
        with closing(SQLiteJobs(directory)) as jobs:
            assert sorted(record.id for record in jobs.newest()) == [1, 2, 3, 4]


def test_a_job_is_never_seen_as_interrupted_while_it_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    with closing(SQLiteJobs(tmp_path)) as jobs, closing(SQLiteJobs(tmp_path)) as others:
        job, states = jobs.begin("shop.csv", "b" * 16), []

        def observe(file: IO[str], operation: int) -> None:
            if operation & fcntl.LOCK_EX:
                states.append(others.get(job.record.id).state)
            lock(file, operation)

        others.newest()
        monkeypatch.setattr(fcntl, "flock", observe)
        job.hold()
        assert states and set(states) == {"running"}
        assert others.get(job.record.id).state == "running"


def test_a_damaged_record_stops_neither_the_list_nor_the_next_job(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        jobs.begin("shop.csv", "b" * 16)
        edit_jobs(tmp_path, "UPDATE jobs SET record = '{'")
        assert jobs.begin("shop.csv", "b" * 16, exclusive=True).record.id == 2
        assert [(record.id, record.state) for record in jobs.newest()] == [(2, "running"), (1, "failed")]


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be read as one" * 20, b""])
def test_a_damaged_history_does_not_stop_jobs(tmp_path: Path, content: bytes) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        jobs.begin("shop.csv", "b" * 16).update(state="done")
    for path in tmp_path.glob(f"{JOBS_FILE}*"):
        path.unlink()
    (tmp_path / JOBS_FILE).write_bytes(content)
    with closing(SQLiteJobs(tmp_path)) as jobs:
        assert jobs.newest() == []
        job = jobs.begin("shop.csv", "b" * 16)
        job.update(state="done")
        assert [record.state for record in jobs.newest()] == ["done"]
        problems = jobs.problems()
    kept = [path for path in tmp_path.iterdir() if ".damaged-" in path.name]
    assert [path.read_bytes() for path in kept] == [content]
    assert problems == [f"The job history was damaged and is kept as {kept[0].name}"]


def test_a_folder_or_a_database_of_another_program_is_set_aside_unchanged(tmp_path: Path) -> None:
    (tmp_path / JOBS_FILE).mkdir()
    with closing(SQLiteJobs(tmp_path)) as jobs:
        assert jobs.begin("shop.csv", "b" * 16).record.id == 1
        (tmp_path / JOBS_FILE).unlink()
        with closing(sqlite3.connect(tmp_path / JOBS_FILE)) as database, database:
            database.execute("CREATE TABLE invoices (number INTEGER)")
        content = (tmp_path / JOBS_FILE).read_bytes()
        assert jobs.newest() == [], "a history that was replaced is opened again"
        assert jobs.begin("shop.csv", "b" * 16).record.id == 1
    kept = [path for path in tmp_path.iterdir() if ".damaged-" in path.name]
    assert sorted(path.is_dir() for path in kept) == [False, True]
    assert content in [path.read_bytes() for path in kept if path.is_file()]


def test_damage_of_an_open_history_is_reported_and_then_set_aside(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        jobs.begin("shop.csv", "b" * 16).update(state="done")
    with closing(SQLiteJobs(tmp_path)) as jobs:
        assert len(jobs.newest()) == 1
        os.truncate(tmp_path / JOBS_FILE, 4096)
        with pytest.raises(StoreError, match="malformed"):
            jobs.newest()
        assert jobs.newest() == []
        assert jobs.begin("shop.csv", "b" * 16).record.id == 1


def test_text_that_cannot_be_decoded_damages_one_record_only(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        jobs.begin("shop.csv", "b" * 16).update(state="done")
        jobs.begin("shop.csv", "b" * 16).update(state="done")
        edit_jobs(tmp_path, "UPDATE jobs SET record = CAST(x'ff' AS TEXT) WHERE id = 1")
        assert [record.state for record in jobs.newest()] == ["done", "failed"]


def test_the_locks_of_killed_jobs_are_removed_by_the_next_job(tmp_path: Path) -> None:
    killed, _ = start_job(tmp_path)
    running, number = start_job(tmp_path)
    killed.send_signal(signal.SIGKILL)
    wait_for(killed)
    (tmp_path / ".job-7.lock.0a1b2c3d.lookalike-tmp").touch()  # killed while it claimed its job
    with closing(SQLiteJobs(tmp_path)) as jobs:
        job = jobs.begin("shop.csv", "b" * 16)
        job.hold()
        names = {path.name for path in tmp_path.iterdir() if ".lock." in path.name or path.suffix == ".lock"}
        assert names == {f"job-{number}.lock", f"job-{job.record.id}.lock"}
        assert jobs.get(number).state == "running"
        jobs.cancel(number)
        assert wait_for(running) == 0


def test_a_damaged_record_is_listed_as_failed_and_reported(tmp_path: Path) -> None:
    with closing(SQLiteJobs(tmp_path)) as jobs:
        jobs.begin("shop.csv", "b" * 16).update(state="done")
        bad = jobs.begin("shop.csv", "b" * 16).record.id
        with closing(sqlite3.connect(tmp_path / JOBS_FILE)) as database, database:
            database.execute("UPDATE jobs SET record = '{' WHERE id = ?", (bad,))
        assert [record.state for record in jobs.newest()] == ["failed", "done"]
        assert "is damaged" in jobs.get(bad).message
        assert jobs.problems() == [f"The record of job {bad} in the history is damaged"]
        assert jobs.begin("shop.csv", "b" * 16, exclusive=True).record.id > bad
