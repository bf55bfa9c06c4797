"""The state that routes work with: settings, the open gallery, the active model, and the admission controller."""

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, cast

import anyio.to_thread
from fastapi import Depends, Request

from index.gallery import Gallery, open_gallery
from index.gallery.errors import StoreUnavailable
from index.gallery.settings import GallerySettings
from index.gallery.vectors.faiss.settings import FaissSettings
from service.admission import Admission
from service.auth.api_keys import KeyFileUnreadable, KeyRing
from service.auth.rate_limit import RateLimit
from service.inference import ActiveModel
from service.memory import Holding
from service.observability.metrics import Telemetry
from service.readiness import Readiness
from service.settings import Settings, SettingsError
from service.url_fetcher import Fetcher

log = logging.getLogger(__name__)

PHOTO_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
START_SECONDS = 30.0
"""Time to wait for the gallery's server when the service starts."""
RETRY_SECONDS = 2.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOCAL_HOST = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?", re.IGNORECASE)


@dataclass
class ServiceState:
    """The open resources of one running service."""

    settings: Settings
    telemetry: Telemetry
    admission: Admission
    gallery: Gallery
    active_model: ActiveModel
    readiness: Readiness
    keys: KeyRing | None
    rates: RateLimit
    fetcher: Fetcher | None
    examples: dict[str, Path]
    shutting_down: bool = False
    """Shutting down: still answering, but reported as not ready."""

    def allows_host(self, host: str) -> bool:
        """Whether a request with this Host header is served.

        Without keys only local names are: a web page whose domain resolves to this machine (DNS rebinding) could
        otherwise use the service of whoever visits it.
        """
        return self.keys is not None or self.settings.open or _LOCAL_HOST.fullmatch(host) is not None


@asynccontextmanager
async def open_state(settings: Settings, telemetry: Telemetry, admission: Admission) -> AsyncIterator[ServiceState]:
    """Opens everything that requests need; on exit finishes what was accepted and closes the gallery."""
    check_exposure(settings)
    gallery = await anyio.to_thread.run_sync(_open_gallery, settings)
    try:
        active_model = ActiveModel(gallery, settings, check_queue=admission.check_queue, on_batch=telemetry.batch)
        await active_model.start()
        try:
            keys = KeyRing(settings.keys, on_change=_log_keys) if settings.keys else None
            yield ServiceState(
                settings=settings,
                telemetry=telemetry,
                admission=admission,
                gallery=gallery,
                active_model=active_model,
                readiness=Readiness(gallery, active_model, admission, keys),
                keys=keys,
                rates=RateLimit(settings.rate, settings.burst),
                fetcher=_make_fetcher(settings),
                examples=_list_photos(settings.examples),
            )
        finally:
            await active_model.close()
    finally:
        await anyio.to_thread.run_sync(gallery.close)


def _open_gallery(settings: Settings) -> Gallery:
    """Opens the gallery; waits for a server that has not started yet, as after a start of all containers."""
    deadline = monotonic() + START_SECONDS
    while True:
        try:
            return open_gallery(
                settings.gallery,
                create=settings.create,
                maintain=True,
                cache=settings.cache,
                settings=GallerySettings(max_stale_seconds=settings.max_stale_seconds),
                faiss_settings=FaissSettings(gpu_share=settings.gpu_share / settings.workers),
            )
        except StoreUnavailable as error:
            if monotonic() > deadline:
                raise
            log.warning("%s It is tried again for at most %g seconds.", error.problem, START_SECONDS)
            sleep(RETRY_SECONDS)


def check_exposure(settings: Settings) -> None:
    """Refuses to serve beyond this machine without keys, unless the settings allow it explicitly."""
    if not settings.keys and settings.host not in _LOOPBACK and not settings.open:
        raise SettingsError(
            f"The service would listen on {settings.host} without API keys.",
            "Create some with `lookalike keys create` and set LOOKALIKE_KEYS, or set LOOKALIKE_OPEN=true.",
        )


def _log_keys(error: KeyFileUnreadable | None) -> None:
    if error:
        log.error("%s Until then every request is refused.", error)
    else:
        log.info("the key file can be read again")


def _make_fetcher(settings: Settings) -> Fetcher | None:
    if not settings.url_hosts:
        return None
    return Fetcher(settings.url_hosts, max_bytes=settings.max_body_bytes, timeout=settings.url_seconds)


def _list_photos(folder: Path | None) -> dict[str, Path]:
    """Maps name to file, once: a request picks a name from here and never forms a path."""
    if folder is None:
        return {}
    return {
        path.name: path for path in sorted(folder.iterdir()) if path.suffix.lower() in PHOTO_TYPES and path.is_file()
    }


async def _get_state(request: Request) -> ServiceState:
    return cast(ServiceState, request.state.service)


async def _get_answer(request: Request) -> Holding:
    return cast(Holding, request.state.answer)


AnswerDep = Annotated[Holding, Depends(_get_answer)]
"""The parameter type by which a route receives what it counts its answer's bytes with."""
StateDep = Annotated[ServiceState, Depends(_get_state)]
"""The parameter type by which a route receives the state."""
