"""The job history of a gallery in a folder.

It is a file of its own: progress is written twice a second, and must neither wait for a large write to the store nor
make every follower look for news there.
"""

import fcntl
import os
import socket
import sqlite3
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import IO

from index._util.system import exclusive_lock, is_running
from index.errors import LookalikeError
from index.gallery.errors import JobMissing, JobRunning
from index.gallery.jobs import Job
from index.gallery.store.schema import transaction
from index.jobs import JobRecord

JOBS_FILE = "jobs.sqlite"
_STARTING_SECONDS = 60.0
"""How long the process of a job may take from its begin to its claim."""
_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, host TEXT NOT NULL, process INTEGER NOT NULL,
    cancel INTEGER NOT NULL DEFAULT 0, record TEXT NOT NULL
)
"""


class FileClaim:
    """A locked file: the lock ends with its process, also in another container."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


class SQLiteJobs:
    """The jobs of one gallery, in SQLite; the file is opened at the first use."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / "jobs"
        self._directory = directory
        self._lock = threading.RLock()
        self._is_open = False

    @cached_property
    def _db(self) -> sqlite3.Connection:
        path = self._directory / JOBS_FILE
        db = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
        with exclusive_lock(self._directory):  # the timeout does not cover two concurrent changes of the journal mode
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(_TABLES)
        self._is_open = True
        return db

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._db.close()

    def begin(self, source: str, bundle_id: str, *, exclusive: bool = False) -> Job:
        """Starts a record; records of killed processes are saved as interrupted."""
        with self._lock, transaction(self._db):
            for other in self.newest(100):
                if other.state == "interrupted":
                    self.save(other)
                    self._claim_file(other.id).unlink(missing_ok=True)
                elif other.state == "running" and exclusive:
                    raise JobRunning(other.id)
            now = time.time()
            record = JobRecord(source=source, bundle_id=bundle_id, started=now, updated=now)
            query = "INSERT INTO jobs (host, process, record) VALUES (?, ?, ?) RETURNING id"
            values = (socket.gethostname(), os.getpid(), record.model_dump_json())
            (job_id,) = self._db.execute(query, values).fetchone()
        return Job(self, record.model_copy(update={"id": job_id}))

    def adopt(self, job_id: int) -> Job:
        """Takes over a record; its first process may have ended, which made it look interrupted."""
        record = self.get(job_id).model_copy(update={"state": "running", "message": ""})
        with self._lock:
            query = "UPDATE jobs SET host = ?, process = ? WHERE id = ?"
            self._db.execute(query, (socket.gethostname(), os.getpid(), job_id))
        return Job(self, record)

    def save(self, record: JobRecord) -> None:
        with self._lock:
            self._db.execute("UPDATE jobs SET record = ? WHERE id = ?", (record.model_dump_json(), record.id))

    def get(self, job_id: int) -> JobRecord:
        found = self._read("WHERE id = ?", job_id)
        if not found:
            raise JobMissing(job_id)
        return found[0]

    def newest(self, count: int = 20) -> list[JobRecord]:
        return self._read("ORDER BY id DESC LIMIT ?", count)

    def _read(self, condition: str, value: int) -> list[JobRecord]:
        with self._lock:
            rows = self._db.execute(f"SELECT id, host, process, record FROM jobs {condition}", (value,)).fetchall()
        return [self._with_liveness(_record(job_id, text), host, process) for job_id, host, process, text in rows]

    def _with_liveness(self, record: JobRecord, host: str, process: int) -> JobRecord:
        """Returns a running job whose process was killed as interrupted."""
        if record.state != "running" or self._is_claimed(record, host, process):
            return record
        # It may have ended since the record was read: its end is saved before the claim is released.
        with self._lock:
            (text,) = self._db.execute("SELECT record FROM jobs WHERE id = ?", (record.id,)).fetchone()
        newest = _record(record.id, text)
        if newest.state != "running":
            return newest
        return newest.model_copy(update={"state": "interrupted", "message": "Its process was killed; run it again."})

    def _is_claimed(self, record: JobRecord, host: str, process: int) -> bool:
        try:
            with self._claim_file(record.id).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:  # its process has not yet come to claim it
            # The process id means nothing in another container, or after a restart of this one.
            is_recent = time.time() - record.updated < _STARTING_SECONDS
            return is_recent and (host != socket.gethostname() or is_running(process))
        return False

    def _claim_file(self, job_id: int) -> Path:
        return self._directory / f"job-{job_id}.lock"

    def claim(self, job_id: int) -> FileClaim:
        return FileClaim(self._claim_file(job_id))

    def cancel(self, job_id: int) -> JobRecord:
        record = self.get(job_id)
        if record.state != "running":
            raise LookalikeError(f"Job {job_id} is not running: it is {record.state}.", "There is nothing to cancel.")
        with self._lock:
            self._db.execute("UPDATE jobs SET cancel = 1 WHERE id = ?", (job_id,))
        return record

    def is_cancelled(self, job_id: int) -> bool:
        with self._lock:
            return bool(self._db.execute("SELECT cancel FROM jobs WHERE id = ?", (job_id,)).fetchone()[0])


def _record(job_id: int, text: str) -> JobRecord:
    return JobRecord.model_validate_json(text).model_copy(update={"id": job_id})
