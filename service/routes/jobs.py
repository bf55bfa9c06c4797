"""Re-indexing jobs over the API: start, list, read, cancel and watch them."""

import json
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from index.errors import LookalikeError
from index.gallery.errors import JobMissing, JobRunning, StoreError
from index.jobs import JobRecord
from service import job_runner
from service.auth.dependencies import MayAdmin
from service.openapi import JOB_BODY, READ_PROBLEMS, error_responses, example_response
from service.problems import (
    BODY_PROBLEMS,
    BUNDLE_INVALID,
    JOB_ENDED,
    JOB_MISSING,
    JOB_RUNNING,
    NOT_READY,
    READ_ONLY,
    STORAGE_FULL,
    ProblemError,
)
from service.requests import KnownQuery, read_json
from service.schemas.jobs import JobBody, JobsAnswer, JobStatus
from service.state import ServiceState, StateDep

router = APIRouter(tags=["jobs"], dependencies=[MayAdmin, KnownQuery])

JobId = Annotated[int, Path(ge=1, lt=2**63)]

_POLL_SECONDS = 0.5
_HISTORY_PROBLEMS = (STORAGE_FULL, READ_ONLY, *READ_PROBLEMS)
"""Of every request about jobs: SQLite creates files even to read the history."""
_RUNNING = {
    "id": 7,
    "source": "catalogue",
    "bundle_id": "0123456789abcdef",
    "state": "running",
    "stage": "embedding",
    "started": "2026-01-01T00:00:00Z",
    "updated": "2026-01-01T00:01:00Z",
    "seconds": 60.0,
    "total": 90000,
    "done": 30000,
    "embedded": 1200,
    "unchanged": 28800,
    "rejected": 0,
    "deleted": 0,
    "missing": 0,
    "revision": None,
    "message": None,
    "rate": 500.0,
    "seconds_left": 120.0,
}


@router.post(
    "/v1/jobs",
    summary="Re-index a source",
    status_code=202,
    responses={
        202: {
            **example_response(_RUNNING, "The job has started"),
            "headers": {"Location": {"description": "URL of the job", "schema": {"type": "string"}}},
        },
        **error_responses(*BODY_PROBLEMS, JOB_RUNNING, BUNDLE_INVALID, NOT_READY, *_HISTORY_PROBLEMS),
    },
    openapi_extra=JOB_BODY,
)
async def start_job(request: Request, response: Response, state: StateDep) -> JobStatus:
    """Embeds what is new in a source, or all of it with another bundle; searches continue meanwhile.

    Sources and bundles are named in the operator's settings. The job runs in a process of its own and continues when
    the service ends. After a kill, it continues where it stopped when the same source is posted again.
    """
    body, here = await read_json(request, JobBody), request.url.path
    try:
        record = await state.admission.run("job", job_runner.start_job, state, body)
    except JobRunning as error:
        location = {"Location": f"{here}/{error.job_id}"}
        raise ProblemError(JOB_RUNNING, error.problem, error.remedy, headers=location) from None
    response.headers["Location"] = f"{here}/{record.id}"
    return JobStatus.of(record)


@router.get(
    "/v1/jobs",
    summary="List jobs",
    responses={
        200: example_response({"jobs": [_RUNNING]}, "Jobs, newest first"),
        **error_responses(*_HISTORY_PROBLEMS),
    },
)
async def list_jobs(
    state: StateDep, limit: Annotated[int, Query(ge=1, le=1000, description="maximum number of jobs")] = 20
) -> JobsAnswer:
    """Returns the newest jobs, whoever started them."""
    records = await state.admission.run("job", state.gallery.jobs.newest, limit)
    return JobsAnswer(jobs=[JobStatus.of(record) for record in records])


async def _read_record(job_id: JobId, state: StateDep) -> JobRecord:
    return await state.admission.run("job", state.gallery.jobs.get, job_id)


async def _watch_place(state: StateDep) -> AsyncIterator[None]:
    with state.admission.watch_place():
        yield


RecordDep = Annotated[JobRecord, Depends(_read_record)]
"""The parameter type by which a route receives an existing job."""


@router.get(
    "/v1/jobs/{job_id}",
    summary="Read a job",
    responses={200: example_response(_RUNNING, "The job"), **error_responses(JOB_MISSING, *_HISTORY_PROBLEMS)},
)
async def get_job(record: RecordDep) -> JobStatus:
    """Returns the current state of a job."""
    return JobStatus.of(record)


@router.delete(
    "/v1/jobs/{job_id}",
    summary="Cancel a job",
    status_code=202,
    responses={
        202: example_response(_RUNNING, "The job will stop"),
        **error_responses(JOB_MISSING, JOB_ENDED, *_HISTORY_PROBLEMS),
    },
)
async def cancel_job(job_id: JobId, state: StateDep) -> JobStatus:
    """Stops a job after its current batch; what it embedded is kept, and no bundle is activated."""
    try:
        return JobStatus.of(await state.admission.run("job", state.gallery.jobs.cancel, job_id))
    except (JobMissing, StoreError):
        raise
    except LookalikeError as error:
        raise ProblemError(JOB_ENDED, error.problem, error.remedy) from None


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="Watch a job",
    dependencies=[Depends(_watch_place)],
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "Events `progress` and finally `ended`, each with the job as its data",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": f"event: progress\ndata: {json.dumps(_RUNNING)}\n\n",
                }
            },
        },
        **error_responses(JOB_MISSING, *_HISTORY_PROBLEMS),
    },
)
async def watch_job(record: RecordDep, state: StateDep) -> AsyncIterator[ServerSentEvent]:
    """Sends the job as server-sent events whenever it has changed, until it ends or the client disconnects.

    A service that shuts down closes the stream; a client that reconnects to the next one continues it.
    """
    async for current in _follow(state, record):
        name = "progress" if current.state == "running" else "ended"
        yield ServerSentEvent(event=name, data=JobStatus.of(current))


async def _follow(state: ServiceState, record: JobRecord) -> AsyncIterator[JobRecord]:
    """Yields a job's record now and after every change, until the job ends or the service shuts down."""
    yield record
    while record.state == "running" and not state.shutting_down:
        await anyio.sleep(_POLL_SECONDS)
        current = await state.admission.run("job", state.gallery.jobs.get, record.id)
        if current != record:
            record = current
            yield record
