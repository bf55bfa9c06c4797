"""The history of a gallery's jobs: what ran, how far it came, how it ended; watched and cancelled from anywhere.

It lies in a file of its own: progress is written every moment, and must neither wait for a large write to the
catalogue nor make every reader look for news there.
"""

import fcntl
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from index._util.system import exclusive_lock, is_running
from index.errors import LookalikeError
from index.jobs import JobRecord, JobState

__all__ = ["JOBS_FILE", "Job", "JobLog", "JobMissing", "JobRecord", "State", "opened_jobs"]

JOBS_FILE = "jobs.sqlite"
_STARTING = 60.0
"""Seconds within which the process of a job that was begun gets to hold it."""
State = JobState

_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, host TEXT NOT NULL, process INTEGER NOT NULL,
    cancel INTEGER NOT NULL DEFAULT 0, record TEXT NOT NULL
)
"""


class JobMissing(LookalikeError):
    """A job that the gallery never saw."""

    kind = "job-missing"

    def __init__(self, job_id: int) -> None:
        super().__init__(f"The gallery has no job {job_id}.", "List them with `lookalike jobs`.")


class JobLog:
    """The jobs of one gallery. Any thread and any process may use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._db = sqlite3.connect(directory / JOBS_FILE, timeout=30, check_same_thread=False, isolation_level=None)
        with exclusive_lock(directory):  # the timeout does not hold for the change to a journal that two make at once
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(_TABLES)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def begin(self, source: str, bundle_id: str) -> "Job":
        """Starts the record of a job that this process runs, and settles those of processes that were killed."""
        for dead in self.newest():
            if dead.state == "interrupted":
                self.save(dead)
                self.lock_file(dead.id).unlink(missing_ok=True)
        now = time.time()
        record = JobRecord(source=source, bundle_id=bundle_id, started=now, updated=now)
        query = "INSERT INTO jobs (host, process, record) VALUES (?, ?, ?) RETURNING id"
        values = (socket.gethostname(), os.getpid(), record.model_dump_json())
        with self._lock:
            (job_id,) = self._db.execute(query, values).fetchone()
        return Job(self, record.model_copy(update={"id": job_id}))

    def adopt(self, job_id: int) -> "Job":
        """Takes over a record that another process began for this one."""
        # Whoever began it may be gone by now, which makes it look interrupted.
        record = self.get(job_id).model_copy(update={"state": "running", "message": ""})
        with self._lock:
            query = "UPDATE jobs SET host = ?, process = ? WHERE id = ?"
            self._db.execute(query, (socket.gethostname(), os.getpid(), job_id))
        return Job(self, record)

    def save(self, record: JobRecord) -> None:
        with self._lock:
            self._db.execute("UPDATE jobs SET record = ? WHERE id = ?", (record.model_dump_json(), record.id))

    def get(self, job_id: int) -> JobRecord:
        """A job as it is now."""
        found = self._read("WHERE id = ?", job_id)
        if not found:
            raise JobMissing(job_id)
        return found[0]

    def newest(self, count: int = 20) -> list[JobRecord]:
        """The newest jobs, newest first."""
        return self._read("ORDER BY id DESC LIMIT ?", count)

    def _read(self, which: str, value: int) -> list[JobRecord]:
        with self._lock:
            rows = self._db.execute(f"SELECT id, host, process, record FROM jobs {which}", (value,)).fetchall()
        return [
            self._as_it_is(JobRecord.model_validate_json(text).model_copy(update={"id": job_id}), host, process)
            for job_id, host, process, text in rows
        ]

    def _as_it_is(self, record: JobRecord, host: str, process: int) -> JobRecord:
        """A job whose process is gone did not end by itself: it was killed, and can be run again."""
        if record.state != "running" or self._is_held(record, host, process):
            return record
        # It may have ended since it was read: its last word is saved before it lets the lock go.
        with self._lock:
            (text,) = self._db.execute("SELECT record FROM jobs WHERE id = ?", (record.id,)).fetchone()
        last = JobRecord.model_validate_json(text).model_copy(update={"id": record.id})
        if last.state != "running":
            return last
        return last.model_copy(update={"state": "interrupted", "message": "Its process was killed; run it again."})

    def _is_held(self, record: JobRecord, host: str, process: int) -> bool:
        try:
            with self.lock_file(record.id).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:  # begun, but its process has not yet got to hold it
            # Of another container, or of this one before it was started again, the number tells nothing.
            is_recent = time.time() - record.updated < _STARTING
            return is_recent and (host != socket.gethostname() or is_running(process))
        return False

    def lock_file(self, job_id: int) -> Path:
        """Locked by the process that runs the job: the lock goes with it, in other containers and when it is killed."""
        return self._directory / f"job-{job_id}.lock"

    def cancel(self, job_id: int) -> JobRecord:
        """Asks a job to end after the batch that it is at."""
        record = self.get(job_id)
        if record.state != "running":
            raise LookalikeError(f"Job {job_id} is not running: it is {record.state}.", "There is nothing to cancel.")
        with self._lock:
            self._db.execute("UPDATE jobs SET cancel = 1 WHERE id = ?", (job_id,))
        return record

    def is_cancelled(self, job_id: int) -> bool:
        with self._lock:
            return bool(self._db.execute("SELECT cancel FROM jobs WHERE id = ?", (job_id,)).fetchone()[0])


class Job:
    """The running side of a record."""

    _SAVE_EVERY = 0.5

    def __init__(self, log: JobLog, record: JobRecord) -> None:
        self._log = log
        self.record = record
        self._saved = 0.0
        self._held: IO[str] | None = None
        self._stopped = threading.Event()

    def hold(self) -> None:
        """Shows to everybody that this process runs the job, until it ends in whatever way."""
        self._held = self._log.lock_file(self.record.id).open("w")
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def update(self, **values: object) -> None:
        """Notes progress; it is written at most twice a second, unless the stage or the end is told."""
        now = time.time()
        self.record = self.record.model_copy(update={**values, "updated": now})
        if now - self._saved >= self._SAVE_EVERY or "stage" in values or "state" in values:
            self._log.save(self.record)
            self._saved = now
        if self._held and self.record.state != "running":
            self._log.lock_file(self.record.id).unlink(missing_ok=True)
            self._held.close()
            self._held = None

    def stop(self) -> None:
        """Ends the job after its batch, from within its process."""
        self._stopped.set()

    @property
    def told_to_stop(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set() or self._log.is_cancelled(self.record.id)


@contextmanager
def opened_jobs(directory: Path) -> Iterator[JobLog]:
    """The jobs of a gallery, for a moment."""
    log = JobLog(directory)
    try:
        yield log
    finally:
        log.close()
