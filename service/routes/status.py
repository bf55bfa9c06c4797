"""Reports the state of the service: for the web page, for operators and for probes."""

import logging
import sqlite3

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from index.embedding.bundle import BundleCard
from index.errors import LookalikeError
from index.gallery import Gallery, GalleryStats
from index.jobs import JobRecord
from index.rankings import MAX_EXAMPLES
from service.auth.dependencies import MaySearch
from service.openapi import METRICS, STATUS, error_responses, example_response
from service.problems import ACCESS_PROBLEMS, INDEX_UNAVAILABLE, NOT_READY, OVERLOADED, ProblemError
from service.requests import KnownQuery
from service.schemas.status import BundleStatus, GalleryStatus, Health, IndexStatus, Limits, Status
from service.state import ServiceState, StateDep

log = logging.getLogger(__name__)

router = APIRouter(tags=["status"])

_MAX_JOBS = 100
"""Jobs among which the newest of each state is looked for."""
_OK = {"status": "ok"}


@router.get(
    "/v1/status",
    summary="The gallery, the model and the limits",
    responses={200: example_response(STATUS), **error_responses(OVERLOADED, INDEX_UNAVAILABLE, *ACCESS_PROBLEMS)},
    dependencies=[MaySearch, KnownQuery],
)
async def get_status(request: Request, state: StateDep) -> Status:
    settings, model = state.settings, state.active_model.loaded
    return Status(
        gallery=_gallery_status(await state.admission.run("status", state.gallery.stats)),
        bundle=_bundle_status(model.bundle.card) if model else None,
        provider=model.embedder.provider if model else None,
        keys=state.keys is not None,
        scope=request.state.key_scope if state.keys is not None else None,
        urls=state.fetcher is not None,
        limits=Limits(
            max_body_bytes=settings.max_body_bytes,
            max_pixels=settings.max_pixels,
            max_batch=settings.max_batch,
            max_examples=MAX_EXAMPLES,
        ),
    )


def _gallery_status(stats: GalleryStats) -> GalleryStatus:
    index = IndexStatus(**stats.index.model_dump(include=set(IndexStatus.model_fields)))
    return GalleryStatus(
        items=stats.items, images=stats.images, unsearchable=stats.unsearchable, revision=stats.revision, index=index
    )


def _bundle_status(card: BundleCard) -> BundleStatus:
    values = {name: getattr(card, name) for name in BundleStatus.model_fields}
    return BundleStatus(**values | {"loss": card.loss or None, "data": card.data or None})


@router.get("/healthz", summary="The process is alive", responses={200: example_response(_OK), **error_responses()})
async def check_health() -> Health:
    return Health()


@router.get(
    "/readyz",
    summary="Searches can be answered",
    responses={200: example_response(_OK), **error_responses(NOT_READY)},
)
async def check_readiness(state: StateDep) -> Health:
    if state.shutting_down:
        raise ProblemError(NOT_READY, "The service is shutting down.", "Send the request to another instance.")
    await state.readiness.check()
    return Health()


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": METRICS}}},
        **error_responses(OVERLOADED, *ACCESS_PROBLEMS),
    },
    dependencies=[MaySearch],
)
async def get_metrics(state: StateDep) -> Response:
    """With API keys enabled, the scraper needs one with the scope search."""
    is_ready = not state.shutting_down and await state.readiness.is_ready()
    page = await state.admission.run("status", _metrics_page, state, is_ready)
    return Response(page, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _metrics_page(state: ServiceState, is_ready: bool) -> bytes:
    model = state.active_model.loaded
    return state.telemetry.exposition(
        _read_gallery(state.gallery),
        model.bundle.card if model else None,
        model.embedder.provider if model else None,
        ready=is_ready,
        jobs=_newest_jobs(state.gallery),
    )


def _read_gallery(gallery: Gallery) -> GalleryStatus | None:
    """Returns None when the gallery cannot be read, which `ready` reports: that must not hide all other metrics."""
    try:
        return _gallery_status(gallery.stats())
    except (LookalikeError, OSError, sqlite3.Error) as error:
        log.warning("the gallery cannot be read: %s", error)
        return None


def _newest_jobs(gallery: Gallery) -> list[JobRecord]:
    """Returns no jobs when the history cannot be read: a full disk must not hide all other metrics."""
    try:
        return gallery.jobs.newest(_MAX_JOBS)
    except LookalikeError as error:
        log.warning("the history of jobs cannot be read: %s", error)
        return []
