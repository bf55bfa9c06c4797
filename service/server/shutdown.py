"""Leaving without breaking off: once told to end, a service still answers while its clients turn elsewhere."""

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from service.state import ServiceState

log = logging.getLogger(__name__)

_SAME_SECONDS = 1.0
"""A second SIGTERM within them is the first once more: it went to all processes, and the first of them passes it on."""


@contextmanager
def draining(state: ServiceState) -> Iterator[None]:
    """Puts a pause before what the server does on SIGTERM.

    The server then closes its port and finishes what it accepted, but who connects in that moment would be lost. So for
    `drain_seconds` `/readyz` answers 503, each answer closes its connection, and everything else is answered as before.
    A second signal ends the pause. Ctrl-C makes none: whoever presses it waits.
    """
    ends = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    if not callable(ends):  # nobody handles the signal, or another thread does
        yield
        return
    loop, end, seconds = asyncio.get_running_loop(), ends, state.settings.drain_seconds
    told_at: float | None = None

    def begin(number: int, frame: FrameType | None) -> None:
        nonlocal told_at
        state.shutting_down = True
        if number == signal.SIGINT or not seconds:
            end(number, frame)
        elif told_at is None:
            told_at = monotonic()
            loop.call_soon_threadsafe(loop.call_later, seconds, end, number, None)
            log.info("told to end: answering for %g seconds more", seconds)
        elif monotonic() - told_at > _SAME_SECONDS:
            end(number, frame)

    before = {number: signal.signal(number, begin) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
