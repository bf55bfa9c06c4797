"""The history of a gallery's jobs: their progress and result, visible to every process, which may also cancel them."""

import threading
import time
from pathlib import Path
from typing import Protocol

from index.jobs import JobRecord


class Claim(Protocol):
    """Marks a job as running in a process; it ends with the process, even when that is killed."""

    def release(self) -> None: ...


class JobHistory(Protocol):
    """The jobs of one gallery. Any thread and any process may use it."""

    @property
    def folder(self) -> Path:
        """For the output and the rejects of jobs."""

    def begin(self, source: str, bundle_id: str, *, exclusive: bool = False) -> "Job":
        """Starts a record for a job that this process, or one that it starts, runs.

        With `exclusive` raises JobRunning if another job of the gallery runs.
        """

    def adopt(self, job_id: int) -> "Job":
        """Takes over a record that another process began for this one."""

    def save(self, record: JobRecord) -> None: ...

    def get(self, job_id: int) -> JobRecord:
        """Returns a job's current record; one whose process was killed is `interrupted`."""

    def newest(self, count: int = 20) -> list[JobRecord]:
        """Returns the newest jobs, newest first."""

    def cancel(self, job_id: int) -> JobRecord:
        """Asks a job to stop after its current batch."""

    def is_cancelled(self, job_id: int) -> bool: ...

    def claim(self, job_id: int) -> Claim:
        """Shows to every process that this one runs the job, until it is released or the process ends."""

    def problems(self) -> list[str]:
        """Returns what is wrong with the history, which never affects searches."""

    def close(self) -> None: ...


class Job:
    """A job in the process that runs it: updates its record and watches for its cancellation."""

    def __init__(self, history: JobHistory, record: JobRecord, save_seconds: float = 0.5) -> None:
        """Progress is saved every `save_seconds` at most."""
        self._history = history
        self.record = record
        self._save_seconds = save_seconds
        self._saved = float("-inf")
        self._claim: Claim | None = None
        self._stopped = threading.Event()

    def hold(self) -> None:
        """Claims the job for this process until it ends."""
        self._claim = self._history.claim(self.record.id)

    def update(self, **values: object) -> None:
        """Records progress; a new stage or state is always saved immediately."""
        self.record = self.record.model_copy(update={**values, "updated": time.time()})
        now = time.monotonic()
        if now - self._saved >= self._save_seconds or "stage" in values or "state" in values:
            self._history.save(self.record)
            self._saved = now
        if self._claim and self.record.state != "running":
            self._claim.release()
            self._claim = None

    def stop(self) -> None:
        """Stops the job after its current batch, from within its process."""
        self._stopped.set()

    @property
    def was_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @property
    def stopping(self) -> bool:
        """Whether the job should stop: `stop` was called, or another process cancelled it."""
        return self._stopped.is_set() or self._history.is_cancelled(self.record.id)
