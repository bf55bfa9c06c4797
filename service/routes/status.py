"""What the service is and whether it can answer: for the page, for people and for probes."""

import logging
import sqlite3
from pathlib import Path

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from index.embedding.bundle import BundleCard
from index.gallery.jobs import JobRecord, opened_jobs
from service.auth.dependencies import MaySearch
from service.problems import ACCESS, NOT_READY, ProblemError, documented
from service.schemas.search import BundleStatus, GalleryStatus, Health, Limits, Status, shown
from service.state import StateDep

log = logging.getLogger(__name__)

router = APIRouter(tags=["status"])

_LOOKED_AT = 100
"""Jobs among which the newest of each state is looked for."""
_STATUS = {
    "gallery": {
        "items": 144,
        "images": 1152,
        "change": 9,
        "generation": "000000000009-90025e0b3c7c4321",
        "pending": 0,
        "kind": "exact",
        "recall": 1.0,
    },
    "bundle": {
        "id": "90025e0b3c7c4321",
        "backbone": "efficientnet_lite0",
        "loss": "proxy_isa",
        "dimension": 512,
        "data": "sample",
        "metrics": {"recall@1": 0.969, "map@r": 0.858},
        "untrained_metrics": {"recall@1": 0.829, "map@r": 0.517},
    },
    "provider": "CPUExecutionProvider",
    "keys": False,
    "urls": False,
    "limits": {"max_body_bytes": 20971520, "max_pixels": 50000000, "max_batch": 16},
}
_OK = {"status": "ok"}
_METRICS = """\
# HELP lookalike_requests_total Requests answered; 499: the client left.
# TYPE lookalike_requests_total counter
lookalike_requests_total{method="POST",route="/v1/search",status="200"} 1027.0
# HELP lookalike_gallery_items Items in the gallery.
# TYPE lookalike_gallery_items gauge
lookalike_gallery_items 144.0
# HELP lookalike_ready 1 while /readyz says that a search can be answered.
# TYPE lookalike_ready gauge
lookalike_ready 1.0
"""


@router.get(
    "/v1/status",
    summary="The gallery, the model and the limits",
    responses={200: shown(_STATUS), **documented(*ACCESS)},
    dependencies=[MaySearch],
)
def status(state: StateDep) -> Status:
    stats, settings, model = state.gallery.stats(), state.settings, state.active_model.loaded
    return Status(
        gallery=GalleryStatus(**{name: getattr(stats, name) for name in GalleryStatus.model_fields}),
        bundle=_bundle(model.bundle.card) if model else None,
        provider=model.embedder.provider if model else None,
        keys=state.keys is not None,
        urls=state.fetcher is not None,
        limits=Limits(
            max_body_bytes=settings.max_body_bytes, max_pixels=settings.max_pixels, max_batch=settings.max_batch
        ),
    )


def _bundle(card: BundleCard) -> BundleStatus:
    return BundleStatus(**{name: getattr(card, name) for name in BundleStatus.model_fields})


@router.get("/healthz", summary="The process is alive", responses={200: shown(_OK), **documented()})
async def healthz() -> Health:
    return Health()


@router.get("/readyz", summary="A search can be answered", responses={200: shown(_OK), **documented(NOT_READY)})
async def readyz(state: StateDep) -> Health:
    if state.shutting_down:
        raise ProblemError(NOT_READY, "The service is about to end.", "Send the request to another one.")
    state.active_model.current()
    return Health()


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": _METRICS}}},
        **documented(*ACCESS),
    },
    dependencies=[MaySearch],
)
def metrics(state: StateDep) -> Response:
    """Where keys are on, the scraper needs one with the scope search."""
    model = state.active_model.loaded
    page = state.telemetry.exposition(
        state.gallery.stats(),
        model.bundle.card if model else None,
        model.embedder.provider if model else None,
        ready=model is not None and not state.shutting_down,
        jobs=_newest_jobs(Path(state.settings.gallery)),
    )
    return Response(page, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _newest_jobs(gallery: Path) -> list[JobRecord]:
    """None when the history cannot be read: a full disk must not hide all other figures."""
    try:
        with opened_jobs(gallery) as history:
            return history.newest(_LOOKED_AT)
    except sqlite3.Error as error:
        log.warning("the history of jobs cannot be read: %s", error)
        return []
