"""The job history of a gallery in a folder.

It is a file of its own: progress is written twice a second, and must neither wait for a large write to the store nor
make every follower look for news there.
"""

import errno
import json
import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os.path import samestat
from pathlib import Path

from index._util.files import temporary_file
from index._util.system import exclusive_lock, is_running, try_lock
from index.errors import LookalikeError
from index.gallery.errors import JobMissing, JobRunning, StorageFull
from index.gallery.jobs import Job
from index.gallery.store.records import DAMAGED, parse_record
from index.gallery.store.sqlite_connection import (
    SQLITE_ERRORS,
    connect,
    file_errors,
    is_read_only,
    store_error,
    transaction,
)
from index.jobs import JobRecord

log = logging.getLogger(__name__)

JOBS_FILE = "jobs.sqlite"
LOCK_FILE = ".lockfile"
"""Held while files are created. Not the folder: that would also wait for `flock FOLDER command`."""
_OPENING_SECONDS = 10.0
"""How long to wait for another process that opens the history. Other threads of this one wait meanwhile."""
_STARTING_SECONDS = 60.0
"""How long the process of a job may take from its begin to its claim."""
_IDENTITY = {"id", "source", "bundle_id"}
"""The fields of a record that never change."""
_END_BYTES = 4096
_END_CHARACTERS = 500
"""Of the message in a claim: at most six bytes each in JSON, so that the end fits."""
_TABLES = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, host TEXT NOT NULL, process INTEGER NOT NULL,
    cancel INTEGER NOT NULL DEFAULT 0, record TEXT NOT NULL
)
"""


class FileClaim:
    """A locked file: the lock ends with its process, also in another container.

    It has room for the job's end, which is written there when the disk is full and the history cannot be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_end = False
        with ExitStack() as held:
            temporary = held.enter_context(temporary_file(path))
            self._file = held.enter_context(temporary.open("r+b", buffering=0))
            try_lock(self._file.fileno(), path)  # held already, but raises an error where locks do not work
            if self._file.write(b" " * _END_BYTES) < _END_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())  # some file systems allocate the space only now
            # Renamed once it is locked: a file without a lock means that the process was killed.
            temporary.rename(path)
            self._held = held.pop_all()

    def write_end(self, record: JobRecord) -> None:
        """Keeps how the job ended, in the space that is allocated already."""
        end = record.model_copy(update={"message": record.message[:_END_CHARACTERS]})
        self._file.seek(0)
        self._file.write(end.model_dump_json(exclude=_IDENTITY).encode().ljust(_END_BYTES))
        self._has_end = True

    def release(self) -> None:
        if not self._has_end:
            self._path.unlink(missing_ok=True)
        self._held.close()


class SQLiteJobs:
    """The jobs of one gallery, in SQLite; the file is opened at the first use."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / "jobs"
        self._directory = directory
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._opened_file: os.stat_result | None = None
        self._claims: dict[int, FileClaim] = {}

    @property
    def _path(self) -> Path:
        return self._directory / JOBS_FILE

    @property
    def _db(self) -> sqlite3.Connection:
        """The connection, with the lock held; it is opened again when the file was removed or replaced."""
        if self._connection and not self._connection.in_transaction and not self._is_in_place():
            self.close()
        if self._connection is None:
            if is_read_only(self._path):
                self._connection = self._open_read_only()
            else:
                # SQLite's timeout does not cover concurrent changes of the journal mode.
                with exclusive_lock(self._directory / LOCK_FILE, _OPENING_SECONDS), file_errors(self._path):
                    self._connection = self._open_or_replace()
                    self._opened_file = self._path.stat()
        return self._connection

    def _is_in_place(self) -> bool:
        try:
            return self._opened_file is None or samestat(self._opened_file, self._path.stat())
        except FileNotFoundError:
            return False

    def _open_read_only(self) -> sqlite3.Connection:
        if self._path.exists():
            return connect(self._path, "written")
        empty = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        empty.execute(_TABLES)
        empty.execute("PRAGMA query_only = ON")
        return empty

    def _open_or_replace(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.OperationalError as error:
            raise store_error(self._path, error) from error
        except SQLITE_ERRORS as error:
            self._set_aside(error)
            return self._open()

    def _open(self) -> sqlite3.Connection:
        if self._path.is_dir() or (self._path.exists() and not self._path.stat().st_size):
            raise sqlite3.DatabaseError("it is not a file, or empty")
        db = sqlite3.connect(self._path, timeout=30, check_same_thread=False, isolation_level=None)
        db.text_factory = lambda text: text.decode(errors="replace")  # a damaged record must not hide the others
        try:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables <= {"jobs", "sqlite_sequence"}:
                raise sqlite3.DatabaseError("it is a database of another program")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(_TABLES)
            fault = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if fault != "ok":
                raise sqlite3.DatabaseError(fault)
        except SQLITE_ERRORS:
            db.close()
            raise
        return db

    def _set_aside(self, error: Exception) -> None:
        """Renames a damaged history and continues with a new one: it must not stop the jobs."""
        kept = self._path.with_name(f"{JOBS_FILE}.damaged-{time.time_ns()}")
        log.error("the job history %s is damaged (%s); it is kept as %s", self._path, error, kept.name)
        self._path.rename(kept)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(JOBS_FILE + suffix).unlink(missing_ok=True)

    def newest_revision(self) -> int:
        return max((record.revision or 0 for record in self.newest(1000)), default=0) if self._path.exists() else 0

    def problems(self) -> list[str]:
        # Read first: a damaged history is set aside when it is opened.
        records = self.newest(1000) if self._path.exists() else []
        kept = sorted(path.name for path in self._directory.glob(f"{JOBS_FILE}.damaged-*"))
        return [
            *(f"The job history was damaged and is kept as {name}" for name in kept),
            *(f"The record of job {job.id} in the history is damaged" for job in records if job.message == DAMAGED),
        ]

    def close(self) -> None:
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection = self._opened_file = None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises what SQLite reports as an error of the store; a damaged history is replaced at the next use."""
        try:
            yield
        except SQLITE_ERRORS as error:
            if not isinstance(error, sqlite3.OperationalError):
                self.close()
            raise store_error(self._path, error) from error

    def begin(self, source: str, bundle_id: str, *, exclusive: bool = False) -> Job:
        """Starts a record; those of killed processes are saved as interrupted, and ends that were kept in claims."""
        ended = []
        with self._errors(), self._lock, transaction(self._db):
            for other in self.newest(100):
                if other.state == "running" and exclusive:
                    raise JobRunning(other.id)
                if other.state == "interrupted" or (other.state != "running" and self._claim_file(other.id).exists()):
                    self.save(other)
                    ended.append(other.id)
            now = time.time()
            record = JobRecord(source=source, bundle_id=bundle_id, started=now, updated=now)
            query = "INSERT INTO jobs (host, process, record) VALUES (?, ?, ?) RETURNING id"
            values = (socket.gethostname(), os.getpid(), record.model_dump_json())
            (job_id,) = self._db.execute(query, values).fetchone()
        for other_id in ended:
            self._claim_file(other_id).unlink(missing_ok=True)
        return Job(self, record.model_copy(update={"id": job_id}))

    def adopt(self, job_id: int) -> Job:
        """Takes over a record; its first process may have ended, which made it look interrupted."""
        record = self.get(job_id).model_copy(update={"state": "running", "message": ""})
        with self._errors(), self._lock:
            query = "UPDATE jobs SET host = ?, process = ? WHERE id = ?"
            self._db.execute(query, (socket.gethostname(), os.getpid(), job_id))
        return Job(self, record)

    def save(self, record: JobRecord) -> None:
        try:
            with self._errors(), self._lock:
                self._db.execute("UPDATE jobs SET record = ? WHERE id = ?", (record.model_dump_json(), record.id))
        except StorageFull:
            if record.state == "running" or record.id not in self._claims:
                raise
            self._claims[record.id].write_end(record)

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
        return [self._with_liveness(parse_record(job_id, text), host, process) for job_id, host, process, text in rows]

    def _with_liveness(self, record: JobRecord, host: str, process: int) -> JobRecord:
        """Returns a running job whose process was killed as interrupted."""
        if record.state != "running" or self._is_claimed(record, host, process):
            return record
        # It may have ended since the record was read: its end is saved before the claim is released.
        with self._errors(), self._lock:
            (text,) = self._db.execute("SELECT record FROM jobs WHERE id = ?", (record.id,)).fetchone()
        newest = parse_record(record.id, text)
        if newest.state != "running":
            return newest
        killed = {"state": "interrupted", "message": "Its process was killed; run it again."}
        return newest.model_copy(update=self._claimed_end(record.id) or killed)

    def _claimed_end(self, job_id: int) -> dict[str, object]:
        """Returns the end of a job that could only be written to its claim; empty if there is none."""
        try:
            text = self._claim_file(job_id).read_text(encoding="utf-8").strip()
            end = JobRecord.model_validate({**json.loads(text or "{}"), "source": "", "bundle_id": ""})
        except (OSError, ValueError):
            return {}
        return end.model_dump(exclude=_IDENTITY)

    def _is_claimed(self, record: JobRecord, host: str, process: int) -> bool:
        try:
            with self._claim_file(record.id).open() as file:
                return not try_lock(file.fileno(), self._claim_file(record.id), shared=True)
        except FileNotFoundError:  # its process has not yet come to claim it
            # The process id means nothing in another container, or after a restart of this one.
            is_recent = time.time() - record.updated < _STARTING_SECONDS
            return is_recent and (host != socket.gethostname() or is_running(process))

    def _claim_file(self, job_id: int) -> Path:
        return self._directory / f"job-{job_id}.lock"

    def claim(self, job_id: int) -> FileClaim:
        with file_errors(self._claim_file(job_id)):
            self._claims[job_id] = FileClaim(self._claim_file(job_id))
        return self._claims[job_id]

    def cancel(self, job_id: int) -> JobRecord:
        record = self.get(job_id)
        if record.state != "running":
            raise LookalikeError(f"Job {job_id} is not running: it is {record.state}.", "There is nothing to cancel.")
        with self._errors(), self._lock:
            self._db.execute("UPDATE jobs SET cancel = 1 WHERE id = ?", (job_id,))
        return record

    def is_cancelled(self, job_id: int) -> bool:
        with self._errors(), self._lock:
            return bool(self._db.execute("SELECT cancel FROM jobs WHERE id = ?", (job_id,)).fetchone()[0])
