"""Starts re-indexing jobs as separate processes, and follows them.

A job embeds for hours and may use much memory without slowing searches down. It continues when the service ends; the
next service and `lookalike jobs` find it in the gallery's history.
"""

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from index._util.files import is_disk_full
from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import CACHE_VARIABLE, open_gallery, redact
from index.gallery.errors import StorageFull
from index.gallery.jobs import Job
from index.ingest.options import CommonOptions, ReindexOptions
from index.jobs import JobRecord
from service.problems import INVALID, ProblemError
from service.schemas.jobs import JobBody
from service.settings import Settings
from service.state import ServiceState

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_TAIL_BYTES = 4096


def start_job(state: ServiceState, body: JobBody) -> JobRecord:
    """Starts `lookalike reindex` in a process of its own; raises JobRunning while another job of the gallery runs."""
    settings = state.settings
    source = _look_up(settings.sources, body.source, "source")
    queries = None if body.queries is None else _look_up(settings.sources, body.queries, "queries")
    bundle = _find_bundle(state, body.bundle)
    history = state.gallery.jobs
    history.folder.mkdir(parents=True, exist_ok=True)
    job = history.begin(body.source, bundle.id, exclusive=True)
    common = {**body.model_dump(include=set(CommonOptions.model_fields)), "queries": queries}
    options = ReindexOptions(
        source=[source],
        gallery=str(settings.gallery),
        bundle=bundle.directory,
        rejects=history.folder / f"{job.record.id}.rejects.csv",
        allow_folder=settings.source_folders,
        allow_address=settings.source_addresses,
        **common,
    )
    try:
        job.hold()  # reserves the space to record that it could not be started
        # Before the answer: an item that is stored after it gets vectors of this bundle too.
        state.gallery.keep_bundle(bundle)
        process = _start_process(job, history.folder, options, settings.cache)
    except (OSError, LookalikeError) as error:
        job.update(state="failed", message=f"It could not be started: {error}")
        if is_disk_full(error):
            raise StorageFull("The job could not be started: its disk is full.", "Free space, and try again.") from None
        raise
    log.info("job %s re-indexes %s in process %s", job.record.id, source, process.pid)
    # A daemon: it must not keep the service from ending.
    name = f"job-{job.record.id}"
    threading.Thread(target=_watch, args=(settings, job.record.id, process), name=name, daemon=True).start()
    return job.record


def _look_up(known: dict[str, Value], name: str, field: str) -> Value:
    """Returns the value that the operator's settings give a name: a request never brings a path of its own."""
    if name not in known:
        raise ProblemError(
            INVALID,
            f"{field}: {name[:80]!r} is not in the settings.",
            f"Use one of: {', '.join(sorted(known))}." if known else "Ask the operator to name some in the settings.",
        )
    return known[name]


def _find_bundle(state: ServiceState, name: str | None) -> Bundle:
    """Returns the bundle of a name, or the gallery's copy of the active one."""
    if name is not None:
        return Bundle.load(_look_up(state.settings.bundles, name, "bundle"))
    active = state.gallery.active_bundle()
    return state.active_model.current().bundle if active is None else state.gallery.load_bundle(active)


def _start_process(job: Job, folder: Path, options: ReindexOptions, cache: Path | None) -> "subprocess.Popen[bytes]":
    job_id = job.record.id
    file = folder / f"{job_id}.options.json"
    command = [sys.executable, "-P", "-m", "lookalike", "reindex", "--options", "-", "--job", str(job_id)]
    environment = {**os.environ, **({CACHE_VARIABLE: str(cache)} if cache else {})}
    # The file is for people. Neither it nor the arguments may show the password of a gallery's address.
    public = options.model_copy(update={"gallery": redact(options.gallery)})
    file.write_text(public.model_dump_json(indent=2), encoding="utf-8")
    with _log_file(folder, job_id).open("wb") as output:
        job.release()  # the new process claims the job
        # A session of its own: the Ctrl-C that stops the service must not reach the job.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin as stdin:  # if it has ended, its exit code says why
        stdin.write(options.model_dump_json().encode())
    return process


def _watch(settings: Settings, job_id: int, process: "subprocess.Popen[bytes]") -> None:
    """Waits for the process, and records the end of one that died before it could do so itself."""
    code = process.wait()
    with open_gallery(settings.gallery, cache=settings.cache) as gallery:  # the service may have closed its own
        if gallery.jobs.get(job_id).state not in ("running", "interrupted"):
            return
        if code < 0:
            end, message = "interrupted", f"Its process was killed by signal {-code}; run it again."
        else:
            last = _last_line(_log_file(gallery.jobs.folder, job_id))
            end, message = "failed", last or f"Its process ended with code {code}."
        try:
            gallery.jobs.adopt(job_id).update(state=end, message=message)
        except LookalikeError as error:
            log.error("the end of job %s could not be recorded: %s", job_id, error)
    log.error("job %s is %s: %s", job_id, end, message)


def _log_file(folder: Path, job_id: int) -> Path:
    return folder / f"{job_id}.log"


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
