"""What the service is and whether it can answer: for the page, for people and for probes."""

from fastapi import APIRouter

from service.backend import Serving
from service.problems import NOT_READY, documented
from service.schemas import BundleStatus, GalleryStatus, Health, Limits, Status

router = APIRouter(tags=["status"])


@router.get("/v1/status", summary="The gallery, the model and the limits", responses=documented())
def status(serving: Serving) -> Status:
    stats, card = serving.gallery.stats(), serving.bundle.card
    return Status(
        gallery=GalleryStatus(items=stats.items, images=stats.images, generation=stats.generation),
        bundle=BundleStatus(
            id=card.id,
            backbone=card.backbone,
            loss=card.loss,
            dimension=card.dimension,
            data=card.data,
            metrics=card.metrics,
            untrained_metrics=card.untrained_metrics,
        ),
        provider=serving.embedder.provider,
        limits=Limits(max_body_bytes=serving.settings.max_body_bytes, max_pixels=serving.settings.max_pixels),
    )


@router.get("/healthz", summary="The process is alive", responses=documented())
async def healthz() -> Health:
    return Health()


@router.get("/readyz", summary="A search can be answered", responses=documented(NOT_READY))
def readyz(serving: Serving) -> Health:
    serving.matching_stats()
    return Health()
