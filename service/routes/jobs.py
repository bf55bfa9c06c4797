"""Re-indexing over the API: jobs that are started, watched and cancelled."""

import json
from collections.abc import AsyncIterator
from pathlib import Path as File
from time import monotonic
from typing import Annotated, TypeVar

import anyio
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery.jobs import JobMissing, JobRecord, opened_jobs
from service.auth.dependencies import MayAdmin
from service.job_runner import JobRunning, start_job
from service.openapi import error_responses, example_response
from service.problems import (
    ACCESS_PROBLEMS,
    BODY_PROBLEMS,
    BUNDLE_INVALID,
    INVALID,
    JOB_ENDED,
    JOB_MISSING,
    JOB_RUNNING,
    NOT_READY,
    OVERLOADED,
    ProblemError,
)
from service.requests import read_json
from service.schemas.search import JobBody, JobsAnswer, JobStatus
from service.state import ServiceState, StateDep

router = APIRouter(tags=["jobs"], dependencies=[MayAdmin])

Named = TypeVar("Named")
JobId = Annotated[int, Path(ge=1, lt=2**63)]

_LOOK_EVERY = 0.5
_HEARTBEAT = 15.0
"""Seconds of silence after which a comment is sent: proxies close what says nothing."""
_RUNNING = {
    "id": 7,
    "source": "/data/catalogue.csv",
    "bundle_id": "0123456789abcdef",
    "state": "running",
    "stage": "embedding",
    "started": 1767225600.0,
    "updated": 1767225660.0,
    "total": 90000,
    "done": 30000,
    "embedded": 1200,
    "unchanged": 28800,
    "rejected": 0,
    "deleted": 0,
    "generation": None,
    "message": "",
    "rate": 500.0,
    "seconds_left": 120.0,
}


@router.post(
    "/v1/jobs",
    summary="Re-index a source",
    status_code=202,
    responses={
        202: {
            **example_response(_RUNNING, "The job has begun"),
            "headers": {"Location": {"description": "where to watch it", "schema": {"type": "string"}}},
        },
        **error_responses(*BODY_PROBLEMS, INVALID, JOB_RUNNING, BUNDLE_INVALID, NOT_READY, *ACCESS_PROBLEMS),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": JobBody.model_json_schema(),
                    "examples": {"nightly": {"value": {"source": "shop", "delete_missing": True}}},
                }
            },
        }
    },
)
async def begin(request: Request, response: Response, state: StateDep) -> JobStatus:
    """Embeds what is new in a source and, with another bundle, all of it; searches go on meanwhile.

    Sources and bundles are named by the operator's settings. The job is a process of its own: it goes on when the
    service ends, and one that was killed goes on where it was when the same source is posted again.
    """
    body, settings, here = await read_json(request, JobBody), state.settings, request.url.path
    address = _named(settings.sources, body.source, "source")
    queries = _named(settings.sources, body.queries, "queries") if body.queries is not None else None
    bundle = await _bundle(state, body.bundle)
    options = body.options(queries)
    try:
        job_id = await state.admission.run("job", start_job, File(settings.gallery), address, bundle, options)
    except JobRunning as error:
        raise ProblemError(
            JOB_RUNNING, error.problem, error.remedy, headers={"Location": f"{here}/{error.job_id}"}
        ) from None
    response.headers["Location"] = f"{here}/{job_id}"
    return JobStatus.of(await state.admission.run("job", _record, state, job_id))


def _named(known: dict[str, Named], name: str, field: str) -> Named:
    """What the operator calls so: a request never brings a path of its own."""
    if name not in known:
        raise ProblemError(
            INVALID,
            f"{field}: the settings have none of the name {name[:80]!r}.",
            f"Known are: {', '.join(sorted(known))}." if known else "Have the operator name some in the settings.",
        )
    return known[name]


async def _bundle(state: ServiceState, name: str | None) -> Bundle:
    """The bundle of a name, or the gallery's own copy of the live one."""
    if name is not None:
        return await state.admission.run("job", Bundle.load, _named(state.settings.bundles, name, "bundle"))
    live = await state.admission.run("job", state.gallery.live_bundle)
    if live is None:
        return state.active_model.current().bundle
    return await state.admission.run("job", state.gallery.kept_bundle, live)


@router.get(
    "/v1/jobs",
    summary="List jobs",
    responses={
        200: example_response({"jobs": [_RUNNING]}, "Jobs, the newest first"),
        **error_responses(INVALID, OVERLOADED, *ACCESS_PROBLEMS),
    },
)
async def list_jobs(state: StateDep, count: Annotated[int, Query(ge=1, le=1000)] = 20) -> JobsAnswer:
    """The newest ones, whoever started them."""

    def newest() -> list[JobRecord]:
        with opened_jobs(File(state.settings.gallery)) as history:
            return history.newest(count)

    return JobsAnswer(jobs=[JobStatus.of(record) for record in await state.admission.run("job", newest)])


@router.get(
    "/v1/jobs/{job_id}",
    summary="A job as it is now",
    responses={
        200: example_response(_RUNNING, "The job"),
        **error_responses(JOB_MISSING, INVALID, OVERLOADED, *ACCESS_PROBLEMS),
    },
)
async def read(job_id: JobId, state: StateDep) -> JobStatus:
    return JobStatus.of(await state.admission.run("job", _record, state, job_id))


def _record(state: ServiceState, job_id: int) -> JobRecord:
    with opened_jobs(File(state.settings.gallery)) as history:
        return history.get(job_id)


@router.delete(
    "/v1/jobs/{job_id}",
    summary="Cancel a job",
    status_code=202,
    responses={
        202: example_response(_RUNNING, "The job will end"),
        **error_responses(JOB_MISSING, JOB_ENDED, INVALID, OVERLOADED, *ACCESS_PROBLEMS),
    },
)
async def cancel(job_id: JobId, state: StateDep) -> JobStatus:
    """It ends after the images that it is at; what it embedded is kept, and nothing goes live."""

    def ask() -> JobRecord:
        with opened_jobs(File(state.settings.gallery)) as history:
            return history.cancel(job_id)

    try:
        return JobStatus.of(await state.admission.run("job", ask))
    except JobMissing:
        raise
    except LookalikeError as error:
        raise ProblemError(JOB_ENDED, error.problem, error.remedy) from None


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="Watch a job",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Events `progress` and at last `ended`, each with the job as its data",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": f"event: progress\ndata: {json.dumps(_RUNNING)}\n\n",
                }
            },
        },
        **error_responses(JOB_MISSING, INVALID, OVERLOADED, *ACCESS_PROBLEMS),
    },
)
async def events(job_id: JobId, state: StateDep) -> StreamingResponse:
    """Server-sent events: the job whenever it has got further, until it ends or the client leaves.

    A service that is told to end closes the stream; the next one goes on with it.
    """
    await state.admission.run("job", _record, state, job_id)
    # nginx would collect the events until they fill a buffer.
    return StreamingResponse(_told(state, job_id), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _told(state: ServiceState, job_id: int) -> AsyncIterator[str]:
    told, since = None, monotonic()
    while True:
        record = await state.admission.run("job", _record, state, job_id)
        ended = record.state != "running"
        if ended or record != told:
            yield f"event: {'ended' if ended else 'progress'}\ndata: {JobStatus.of(record).model_dump_json()}\n\n"
            told, since = record, monotonic()
        elif monotonic() - since >= _HEARTBEAT:
            yield ": nothing new\n\n"
            since = monotonic()
        if ended or state.shutting_down:
            return
        await anyio.sleep(_LOOK_EVERY)
