"""Graceful shutdown: after SIGTERM the service keeps answering while its clients switch to another instance."""

import asyncio
import contextvars
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from service.state import ServiceState

log = logging.getLogger(__name__)


@contextmanager
def draining(state: ServiceState, *, repeat_seconds: float = 1.0) -> Iterator[None]:
    """Delays what the server does on SIGTERM by `drain_seconds`.

    The server then closes its port and finishes what it accepted, but a client that connects in that moment would be
    lost. So during the delay `/readyz` answers 503, each answer closes its connection, and everything else works as
    before. A second signal ends the delay, except within `repeat_seconds`: then it is the same one, sent to all
    processes and forwarded by the parent. Ctrl-C shuts down without a delay.
    """
    inner = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    if not callable(inner):  # the signal has no handler, or belongs to another thread
        yield
        return
    loop, shut_down, seconds = asyncio.get_running_loop(), inner, state.settings.drain_seconds
    received_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        # A signal interrupts whichever request is running, and would be logged with its id.
        contextvars.Context().run(shut_down_later, number, frame)

    def shut_down_later(number: int, frame: FrameType | None) -> None:
        nonlocal received_at
        state.shutting_down = True
        if number == signal.SIGINT or not seconds:
            shut_down(number, frame)
        elif received_at is None:
            received_at = monotonic()
            loop.call_soon_threadsafe(loop.call_later, seconds, shut_down, number, None)
            log.info("shutting down in %g seconds", seconds)
        elif monotonic() - received_at > repeat_seconds:
            shut_down(number, frame)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
