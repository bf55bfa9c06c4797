"""The job history of a gallery in PostgreSQL. A job runs while its process holds an advisory lock."""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import psycopg

from index._util.system import is_running
from index.errors import LookalikeError
from index.gallery.errors import JobMissing, JobRunning
from index.gallery.jobs import Job
from index.gallery.store.postgres_connection import Connection, Connections, Server, store_errors
from index.gallery.store.records import DAMAGED, parse_record
from index.jobs import JobRecord

_KILLED = "Its process was killed; run it again."
_ROWS = """
SELECT id, host, process, record, claimed IS NOT NULL, EXISTS (
    SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND classid = %(space)s::bigint::oid AND objid = id::oid
), claimed < pg_postmaster_start_time()
AND clock_timestamp() < pg_postmaster_start_time() + %(seconds)s * interval '1 second', pg_is_in_recovery() FROM jobs
"""


class LockClaim:
    """An advisory lock, which ends with the connection, and so with the process."""

    def __init__(self, jobs: "PostgresJobs", job_id: int) -> None:
        self._jobs = jobs
        self._job_id = job_id
        self._lock = threading.Lock()
        self._connection: Connection | None = jobs.lock(job_id)

    def renew(self) -> None:
        """Claims the job again if the connection was lost."""
        with self._lock:
            if self._connection is None:
                return
            try:
                self._connection.execute("SELECT 1")
            except psycopg.Error:
                self._connection.close()
                self._connection = self._jobs.lock(self._job_id)

    def release(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            try:
                self._jobs.forget_claim(self._job_id)
            finally:
                connection.close()


class PostgresJobs:
    """The jobs of one gallery."""

    def __init__(self, server: Server, connections: Connections, folder: Path) -> None:
        self.folder = folder
        self._server = server
        self._connections = connections
        self._space = crc32(f"{server.schema}\0jobs".encode())
        self._liveness = {"space": self._space, "seconds": server.settings.claim_seconds}
        self._claims: dict[int, LockClaim] = {}

    def _run(self, query: str, **values: object) -> list[tuple[Any, ...]]:
        def execute(connection: Connection) -> list[tuple[Any, ...]]:
            cursor = connection.execute(query, values)
            return cursor.fetchall() if cursor.description else []

        return self._connections.run(execute)

    def begin(self, source: str, bundle_id: str, *, exclusive: bool = False) -> Job:
        now = time.time()
        record = JobRecord(source=source, bundle_id=bundle_id, started=now, updated=now)
        with self._connections.borrow(fresh=True) as connection, store_errors(), connection.transaction():
            connection.execute("LOCK TABLE jobs IN SHARE ROW EXCLUSIVE MODE")
            rows = connection.execute(f"{_ROWS} ORDER BY id DESC LIMIT 100", self._liveness).fetchall()
            for row in rows:
                other = self._with_liveness(row)
                if other.state == "running" and exclusive:
                    raise JobRunning(other.id)
                if other.state == "interrupted":
                    query = "UPDATE jobs SET record = %s WHERE id = %s AND record <> %s"
                    text = other.model_dump_json()
                    connection.execute(query, (text, other.id, text))
            query = "INSERT INTO jobs (host, process, record) VALUES (%s, %s, %s) RETURNING id"
            values = (socket.gethostname(), os.getpid(), record.model_dump_json())
            ((job_id,),) = connection.execute(query, values).fetchall()
        return Job(self, record.model_copy(update={"id": job_id}))

    def adopt(self, job_id: int) -> Job:
        """Takes over a record; its first process may have ended, which made it look interrupted."""
        record = self.get(job_id).model_copy(update={"state": "running", "message": ""})
        query = "UPDATE jobs SET host = %(host)s, process = %(process)s WHERE id = %(id)s"
        self._run(query, host=socket.gethostname(), process=os.getpid(), id=job_id)
        return Job(self, record)

    def save(self, record: JobRecord) -> None:
        claim = self._claims.get(record.id)
        if claim and record.state == "running":
            claim.renew()
        query = "UPDATE jobs SET record = %(record)s WHERE id = %(id)s"
        self._run(query, record=record.model_dump_json(), id=record.id)

    def get(self, job_id: int) -> JobRecord:
        found = self._run(f"{_ROWS} WHERE id = %(id)s", **self._liveness, id=job_id)
        if not found:
            raise JobMissing(job_id)
        return self._with_liveness(found[0])

    def newest(self, count: int = 20) -> list[JobRecord]:
        rows = self._run(f"{_ROWS} ORDER BY id DESC LIMIT %(count)s", **self._liveness, count=count)
        return [self._with_liveness(row) for row in rows]

    def _with_liveness(self, row: tuple[Any, ...]) -> JobRecord:
        """Returns a running job whose process was killed as interrupted."""
        job_id, host, process, text, is_claimed, is_locked, may_return, is_standby = row
        record = parse_record(job_id, text)
        if record.state != "running" or is_locked or is_standby:  # which shows no locks of the primary server
            return record
        if is_claimed:
            is_alive = may_return  # its connection was lost when the server started, and it may claim the job again
        else:  # its process has not yet come to claim it
            is_recent = time.time() - record.updated < self._server.settings.claim_seconds
            is_alive = is_recent and (host != socket.gethostname() or is_running(process))
        return record if is_alive else record.model_copy(update={"state": "interrupted", "message": _KILLED})

    def claim(self, job_id: int) -> LockClaim:
        self._claims[job_id] = LockClaim(self, job_id)
        return self._claims[job_id]

    def lock(self, job_id: int) -> Connection:
        """Returns a connection that holds the lock of a job."""
        connection = self._server.connect(seconds=self._server.settings.read_seconds)
        try:
            with store_errors():
                space = self._space - (1 << 32) if self._space >= 1 << 31 else self._space
                connection.execute("SELECT pg_advisory_lock_shared(%s::int, %s::int)", (space, job_id))
                connection.execute("UPDATE jobs SET claimed = clock_timestamp() WHERE id = %s", (job_id,))
        except BaseException:
            connection.close()
            raise
        return connection

    def forget_claim(self, job_id: int) -> None:
        """Records that no process holds the job's lock, although none was killed."""
        self._claims.pop(job_id, None)
        self._run("UPDATE jobs SET claimed = NULL WHERE id = %(id)s", id=job_id)

    def cancel(self, job_id: int) -> JobRecord:
        record = self.get(job_id)
        if record.state != "running":
            raise LookalikeError(f"Job {job_id} is not running: it is {record.state}.", "There is nothing to cancel.")
        self._run("UPDATE jobs SET cancel = true WHERE id = %(id)s", id=job_id)
        return record

    def is_cancelled(self, job_id: int) -> bool:
        rows = self._run("SELECT cancel FROM jobs WHERE id = %(id)s", id=job_id)
        return bool(rows and rows[0][0])

    def newest_revision(self) -> int:
        return max((record.revision or 0 for record in self.newest(1000)), default=0)

    def problems(self) -> list[str]:
        damaged = (job.id for job in self.newest(1000) if job.message == DAMAGED)
        return [f"The record of job {job_id} in the history is damaged" for job_id in damaged]

    def close(self) -> None:
        """Keeps claims, as those of a folder: they end with the job or the process."""
