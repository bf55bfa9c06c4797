"""The job history of a gallery in a folder.

It is a file of its own: progress is written twice a second, and must neither wait for a large write to the store nor
make every follower look for news there.
"""

import fcntl
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from index._util.files import temporary_sibling
from index._util.system import exclusive_lock, is_running
from index.errors import LookalikeError
from index.gallery.errors import JobMissing, JobRunning
from index.gallery.jobs import Job
from index.gallery.store.schema import store_error, transaction
from index.jobs import JobRecord

log = logging.getLogger(__name__)

JOBS_FILE = "jobs.sqlite"
LOCK_FILE = ".lockfile"
"""Held while files are created. Not the folder: that would also wait for `flock FOLDER command`."""
_STARTING_SECONDS = 60.0
"""How long the process of a job may take from its begin to its claim."""
_DAMAGED = "The record of this job is damaged."
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
        temporary = temporary_sibling(path)
        self._file: IO[str] = temporary.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        # Renamed once it is locked: a file without a lock means that the process was killed.
        temporary.rename(path)

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
        # SQLite's timeout does not cover concurrent changes of the journal mode.
        with exclusive_lock(self._directory / LOCK_FILE):
            try:
                db = self._open()
            except sqlite3.OperationalError as error:
                raise store_error(self._path, error) from error
            except sqlite3.DatabaseError as error:
                self._set_aside(error)
                db = self._open()
        self._is_open = True
        return db

    @property
    def _path(self) -> Path:
        return self._directory / JOBS_FILE

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=30, check_same_thread=False, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(_TABLES)
            fault = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if fault != "ok":
                raise sqlite3.DatabaseError(fault)
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Renames a damaged history and continues with a new one: it must not stop the jobs."""
        kept = self._path.with_name(f"{JOBS_FILE}.damaged-{time.time_ns()}")
        log.error("the job history %s is damaged (%s); it is kept as %s", self._path, error, kept.name)
        self._path.rename(kept)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(JOBS_FILE + suffix).unlink(missing_ok=True)

    def problems(self) -> list[str]:
        kept = sorted(path.name for path in self._directory.glob(f"{JOBS_FILE}.damaged-*"))
        found = [f"The job history was damaged and is kept as {name}" for name in kept]
        if self._path.exists():
            damaged = [record.id for record in self.newest(1000) if record.message == _DAMAGED]
            found += [f"The record of job {job_id} in the history is damaged" for job_id in damaged]
        return found

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._db.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises what SQLite reports as an error of the store."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise store_error(self._path, error) from error

    def begin(self, source: str, bundle_id: str, *, exclusive: bool = False) -> Job:
        """Starts a record; records of killed processes are saved as interrupted."""
        with self._errors(), self._lock, transaction(self._db):
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
        with self._errors(), self._lock:
            query = "UPDATE jobs SET host = ?, process = ? WHERE id = ?"
            self._db.execute(query, (socket.gethostname(), os.getpid(), job_id))
        return Job(self, record)

    def save(self, record: JobRecord) -> None:
        with self._errors(), self._lock:
            self._db.execute("UPDATE jobs SET record = ? WHERE id = ?", (record.model_dump_json(), record.id))

    def get(self, job_id: int) -> JobRecord:
        found = self._read("WHERE id = ?", job_id)
        if not found:
            raise JobMissing(job_id)
        return found[0]

    def newest(self, count: int = 20) -> list[JobRecord]:
        return self._read("ORDER BY id DESC LIMIT ?", count)

    def _read(self, condition: str, value: int) -> list[JobRecord]:
        with self._errors(), self._lock:
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
        with self._errors(), self._lock:
            self._db.execute("UPDATE jobs SET cancel = 1 WHERE id = ?", (job_id,))
        return record

    def is_cancelled(self, job_id: int) -> bool:
        with self._lock:
            return bool(self._db.execute("SELECT cancel FROM jobs WHERE id = ?", (job_id,)).fetchone()[0])


def _record(job_id: int, text: str) -> JobRecord:
    """Parses a record; a damaged one counts as failed, because the history must not stop later jobs."""
    try:
        return JobRecord.model_validate_json(text).model_copy(update={"id": job_id})
    except ValidationError:
        return JobRecord(id=job_id, source="", bundle_id="", state="failed", started=0, updated=0, message=_DAMAGED)
