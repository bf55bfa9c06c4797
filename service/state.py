"""What the routes work with: the opened gallery, the model of its live bundle, and the permits to use them."""

import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar, cast

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Depends, Request

from index._util.system import usable_cores
from index.gallery import Gallery, open_gallery
from service.auth.api_keys import KeyRing
from service.auth.rate_limit import RateLimit
from service.inference import Overloaded
from service.live_model import Models
from service.observability.metrics import Telemetry
from service.settings import Settings, SettingsError
from service.url_fetcher import Fetcher

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

PHOTO_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOCAL = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?", re.IGNORECASE)


class Busy(Overloaded):
    """More requests are in work than the service has permits."""

    def __init__(self, working: int, retry_after: float) -> None:
        super().__init__(working, retry_after)
        self.problem = f"{working} requests are in work already."


@dataclass
class ServiceState:
    """The engines of one running service."""

    settings: Settings
    telemetry: Telemetry
    gallery: Gallery
    active_model: Models
    keys: KeyRing | None
    rates: RateLimit
    fetcher: Fetcher | None
    examples: dict[str, Path]
    decoders: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(max(2, usable_cores())))
    """Bounds the photos in memory: each one decoded may weigh 150 MB."""
    searchers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(max(4, 2 * usable_cores())))
    listers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    """Apart from those: a list of a thousand items takes as long as many searches, which must not wait behind it."""
    listing: int = 0
    working: int = 0
    shutting_down: bool = False
    """Shutting down: still answering, but reported as not ready."""

    def answers_to(self, host: str) -> bool:
        """Whether a request for this host is answered. A web page whose name leads to this machine passes for our own:
        without keys nothing else would keep it out.
        """
        return self.keys is not None or self.settings.open or _LOCAL.fullmatch(host) is not None

    def check_permits(self) -> None:
        """Refuses a request when too many are in work. Asked before a body is read, which may take its client a minute:
        until it is there, it must not keep others from work.
        """
        if self.working >= self.settings.max_requests:
            self.telemetry.refused("requests")
            raise Busy(self.working, 1.0)

    async def listed(self, work: Callable[[], Answer]) -> Answer:
        """Makes a long list in a thread, one after the other; refused when too many wait."""
        if self.listing > self.settings.max_waiting:
            self.telemetry.refused("requests")
            raise Busy(self.listing, 1.0)
        self.listing += 1
        try:
            return await anyio.to_thread.run_sync(work, limiter=self.listers)
        finally:
            self.listing -= 1

    @contextmanager
    def permit(self) -> Iterator[None]:
        """The right to do work for a request, taken before any is done; refused when too many have one."""
        self.check_permits()
        self.working += 1
        try:
            with self.telemetry.working():
                yield
        finally:
            self.working -= 1


@asynccontextmanager
async def open_state(settings: Settings, telemetry: Telemetry) -> AsyncIterator[ServiceState]:
    """Opens everything a request needs; at the end finishes what was accepted and closes the gallery."""
    check_exposure(settings)
    gallery = open_gallery(settings.gallery, create=settings.create, maintain=True)
    try:
        active_model = Models(gallery, settings, on_batch=telemetry.batch)
        await active_model.start()
        try:
            yield ServiceState(
                settings=settings,
                telemetry=telemetry,
                gallery=gallery,
                active_model=active_model,
                keys=KeyRing(settings.keys) if settings.keys else None,
                rates=RateLimit(settings.rate, settings.burst),
                fetcher=_fetcher(settings),
                examples=_photos_in(settings.examples),
            )
        finally:
            await active_model.close()
    finally:
        gallery.close()


def check_exposure(settings: Settings) -> None:
    """Without keys anybody who reaches the service may change the gallery: only on one machine, unless told."""
    if not settings.keys and settings.host not in _LOOPBACK and not settings.open:
        raise SettingsError(
            f"The service would listen on {settings.host} without API keys.",
            "Make some with `lookalike keys create` and set LOOKALIKE_KEYS, or set LOOKALIKE_OPEN=true.",
        )


def _fetcher(settings: Settings) -> Fetcher | None:
    if not settings.url_hosts:
        return None
    return Fetcher(settings.url_hosts, max_bytes=settings.max_body_bytes, timeout=settings.url_seconds)


def _photos_in(folder: Path | None) -> dict[str, Path]:
    """Name to file, listed once: a request picks a name from here and never forms a path."""
    if folder is None:
        return {}
    return {
        path.name: path for path in sorted(folder.iterdir()) if path.suffix.lower() in PHOTO_TYPES and path.is_file()
    }


async def _get_state(request: Request) -> ServiceState:
    return cast(ServiceState, request.state.service)


StateDep = Annotated[ServiceState, Depends(_get_state)]
"""The parameter type by which a route receives the state."""
