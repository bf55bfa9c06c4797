"""The history of a gallery's jobs: their progress and result, visible to every process, which may also cancel them."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from index.errors import LookalikeError
from index.gallery.types import NeededBundles
from index.jobs import JobRecord

log = logging.getLogger(__name__)

_MAX_JOBS = 100
"""Jobs among which those that prepare a bundle are looked for."""


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

    def newest_revision(self) -> int:
        """Returns the highest revision that a job has recorded, 0 if there is none."""

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
        self._begun = time.monotonic() - record.seconds
        self._saved = float("-inf")
        self._claim: Claim | None = None
        self._stopped = threading.Event()

    def hold(self) -> None:
        """Claims the job for this process until it ends."""
        self._claim = self._history.claim(self.record.id)

    def release(self) -> None:
        """Ends the claim of this process."""
        if self._claim:
            self._claim.release()
            self._claim = None

    def update(self, **values: object) -> None:
        """Records progress; a new stage or state is always saved immediately."""
        now = time.monotonic()
        clocks = {"updated": time.time(), "seconds": round(now - self._begun, 3)}
        self.record = self.record.model_copy(update={**values, **clocks})
        if now - self._saved >= self._save_seconds or "stage" in values or "state" in values:
            self._history.save(self.record)
            self._saved = now
        if self.record.state != "running":
            self.release()

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


def needed_bundles(
    jobs: JobHistory, active_bundle: Callable[[], str | None], has_copy: Callable[[str], bool]
) -> NeededBundles:
    """Returns the active bundle, and those with a copy in the gallery that jobs prepare.

    A bundle is prepared while a job of it runs. The newest job of a bundle that is not active prepares it also after
    it was stopped or failed, because it is usually repeated; one that failed before it indexed an image does not count.
    """
    # Read before the active bundle: a job that has ended by then has activated the bundle that is read afterwards.
    newest = _newest(jobs)
    active = active_bundle()
    others = [job for job in newest if job.bundle_id != active and (job.state != "failed" or job.done)]
    unfinished = [job for job in others[:1] if job.state not in ("done", "partial")]
    running = [job for job in others if job.state == "running"]
    prepared = dict.fromkeys(job.bundle_id for job in unfinished + running)
    return NeededBundles(active, tuple(filter(has_copy, prepared)))


def _newest(jobs: JobHistory) -> list[JobRecord]:
    """Returns no jobs when the history cannot be read: that must not stop writes."""
    try:
        return jobs.newest(_MAX_JOBS)
    except (LookalikeError, OSError) as error:
        log.error("the bundles that jobs prepare are unknown, because the history cannot be read: %s", error)
        return []
