"""Re-indexing jobs as processes of their own: the service starts them, and from then on they do not need it.

A job embeds for hours and may use all the memory it likes without a search feeling it. It is left alone when the
service ends: it goes on, and whoever looks next, the next service or `lookalike jobs`, finds it in the history.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from index._util.system import exclusive_lock
from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery.jobs import Job, opened_jobs

log = logging.getLogger(__name__)

JOBS = "jobs"
"""The folder of the gallery with the output and the rejects of each job."""
_LOOKED_AT = 100
"""Jobs among which the running one is looked for."""
_TAIL_BYTES = 4096


class JobRunning(LookalikeError):
    """A second job would write the same gallery at once."""

    kind = "job-running"

    def __init__(self, job_id: int) -> None:
        super().__init__(f"Job {job_id} is running.", "Wait until it has ended, or cancel it.")
        self.job_id = job_id


def start_job(gallery: Path, address: str, bundle: Bundle, options: Sequence[str]) -> int:
    """Starts `lookalike reindex` and answers the job's id; refused while another job of the gallery runs."""
    folder = gallery / JOBS
    folder.mkdir(exist_ok=True)
    with opened_jobs(gallery) as history:
        with exclusive_lock(folder):  # or two would find none running, and begin one each
            running = [record.id for record in history.newest(_LOOKED_AT) if record.state == "running"]
            if running:
                raise JobRunning(running[0])
            job = history.begin(address, bundle.id)
        job_id = job.record.id
        process = _begun(job, folder, [*options, "--gallery", str(gallery), "--bundle", str(bundle.directory)], address)
    log.info("job %s re-indexes %s in process %s", job_id, address, process.pid)
    # A daemon: it must not keep the service from ending.
    threading.Thread(target=_watch, args=(gallery, job_id, process), name=f"job-{job_id}", daemon=True).start()
    return job_id


def _begun(job: Job, folder: Path, options: list[str], address: str) -> "subprocess.Popen[bytes]":
    job_id = job.record.id
    own = ["--job", str(job_id), "--rejects", str(folder / f"{job_id}.rejects.csv")]
    command = [sys.executable, "-P", "-m", "lookalike", "reindex", *options, *own, "--", address]
    try:
        with _log_file(folder, job_id).open("wb") as output:
            # A session of its own: the Ctrl-C that ends the service is not meant for it.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        job.update(state="failed", message=f"It could not be started: {error}.")
        raise


def _watch(gallery: Path, job_id: int, process: "subprocess.Popen[bytes]") -> None:
    """Waits for the process, and notes the end that it did not live to note itself."""
    code = process.wait()
    with opened_jobs(gallery) as history:
        if history.get(job_id).state not in ("running", "interrupted"):
            return
        if code < 0:
            state, message = "interrupted", f"Its process was killed by signal {-code}; run it again."
        else:
            told = _last_line(_log_file(gallery / JOBS, job_id))
            state, message = "failed", told or f"Its process ended with code {code}."
        history.adopt(job_id).update(state=state, message=message)
    log.error("job %s is %s: %s", job_id, state, message)


def _log_file(folder: Path, job_id: int) -> Path:
    return folder / f"{job_id}.log"


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
