"""Whether searches can be answered now: what `/readyz` and its metric report."""

import logging
import threading
from asyncio import wait, wrap_future
from concurrent.futures import Future
from time import monotonic

from index.errors import LookalikeError
from index.gallery import Gallery
from service.admission import Admission
from service.auth.api_keys import KeyFileUnreadable, KeyRing
from service.inference import ActiveModel, NotReady
from service.problems import KEYS_UNREADABLE

log = logging.getLogger(__name__)

MAX_SECONDS = 1.5
"""Time that reading the gallery may take."""
STUCK_SECONDS = 10.0
"""Time after which work that occupies all places, and none of which ends, is stuck."""
KEPT_SECONDS = 0.5
"""Time that a result is used for, so that many probes cost as much as a few."""


class Readiness:
    """Checks everything that a search needs. Never takes longer than `MAX_SECONDS`, and uses no thread of requests."""

    def __init__(self, gallery: Gallery, active_model: ActiveModel, admission: Admission, keys: KeyRing | None) -> None:
        self._gallery = gallery
        self._active_model = active_model
        self._admission = admission
        self._keys = keys
        self._reading: Future[Exception | None] | None = None
        self._started = 0.0
        self._reported = ""

    async def is_ready(self) -> bool:
        """Returns whether `check` raises nothing."""
        try:
            await self.check()
        except NotReady:
            return False
        return True

    async def check(self) -> None:
        """Raises NotReady with the reason unless a search could be answered now; logs each new reason once."""
        try:
            await self._check()
        except NotReady as error:
            self._report(error.problem)
            raise
        self._report("")

    def _report(self, reason: str) -> None:
        if reason != self._reported:
            self._reported = reason
            log.warning("not ready: %s", reason) if reason else log.info("ready again")

    async def _check(self) -> None:
        bundle_id = self._active_model.current().bundle.id
        if work := self._admission.stuck_work(STUCK_SECONDS):
            raise NotReady(f"All places for {work} have been taken for {STUCK_SECONDS:g} seconds.", "See the log.")
        await self._read(bundle_id)

    async def _read(self, bundle_id: str) -> None:
        """Reads the keys and the gallery, in a thread that other checks share until it ends."""
        now = monotonic()
        if self._reading is None or (self._reading.done() and now - self._started > KEPT_SECONDS):
            self._reading, self._started = Future(), now
            # A daemon: a file system that hangs must not keep the process from ending.
            arguments = self._reading, bundle_id
            threading.Thread(target=self._run, args=arguments, name="readiness", daemon=True).start()
        reading = self._reading
        await wait({wrap_future(reading)}, timeout=max(0.0, self._started + MAX_SECONDS - now))
        if not reading.done():
            raise NotReady(f"The gallery has not responded for {MAX_SECONDS:g} seconds.", "Check its disk.")
        error = reading.result()
        if isinstance(error, KeyFileUnreadable):  # whose message names a path, and anybody may ask
            raise NotReady(KEYS_UNREADABLE.detail, KEYS_UNREADABLE.remedy)
        if isinstance(error, LookalikeError):
            raise NotReady(error.problem, error.remedy)
        if error:
            raise NotReady(f"The gallery cannot be read: {error}.", "Check its disk; see the log of the service.")

    def _run(self, result: Future[Exception | None], bundle_id: str) -> None:
        try:
            if self._keys:
                self._keys.check()
            self._gallery.check(bundle_id)
        except Exception as error:  # whatever it is, a search would fail by it too
            result.set_result(error)
        else:
            result.set_result(None)
