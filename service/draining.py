"""Leaving without breaking off: once told to end, a service still answers while its clients turn elsewhere."""

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from service.backend import Backend

log = logging.getLogger(__name__)


@contextmanager
def draining(backend: Backend) -> Iterator[None]:
    """Puts a pause before what the server does on SIGTERM.

    The server then closes its port and finishes what it accepted, but a request that was on its way to an idle
    connection would be lost. So for `drain_seconds` `/readyz` answers 503, each answer closes its connection, and
    everything else is answered as before. A second signal ends the pause.
    """
    ends = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    if not callable(ends):  # nobody handles the signal, or another thread does
        yield
        return
    loop, end, seconds = asyncio.get_running_loop(), ends, backend.settings.drain_seconds

    def begin(number: int, frame: FrameType | None) -> None:
        if backend.leaving or not seconds:
            end(number, frame)
            return
        backend.leaving = True
        loop.call_soon_threadsafe(loop.call_later, seconds, end, number, None)
        log.info("told to end: answering for %g seconds more", seconds)

    signal.signal(signal.SIGTERM, begin)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, end)
