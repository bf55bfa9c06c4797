"""A budget of memory that threads share."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class QueueFull(Exception):
    """Too many bytes are being waited for; the message has their number."""


class ByteBudget:
    """Admits threads in the order of their arrival while the bytes that they need together are within the total.

    One that needs much is not overtaken by those that need little, so it is never starved. `max_holders` limits the
    threads that are admitted at the same time, and `max_waiting` the bytes that others wait for; default: no limit.
    """

    def __init__(self, total: int, *, max_holders: int | None = None, max_waiting: int | None = None) -> None:
        self.total = total
        self._max_holders = max_holders
        self._max_waiting = max_waiting
        self._held = self._holders = self._waiting_bytes = 0
        self._waiting: deque[object] = deque()
        self._changed = Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Waits until `count` bytes are free and holds them for as long as the context; raises QueueFull."""
        if count > self.total:
            raise ValueError(f"{count:,} bytes are more than the whole budget of {self.total:,}.")
        self._acquire(count)
        try:
            yield
        finally:
            with self._changed:
                self._held -= count
                self._holders -= 1
                self._changed.notify_all()

    def _acquire(self, count: int) -> None:
        place = object()
        with self._changed:
            is_admitted = not self._waiting and self._has_room(count)
            if not is_admitted and self._max_waiting is not None and self._waiting_bytes + count > self._max_waiting:
                raise QueueFull(f"{self._waiting_bytes:,} bytes are being waited for already")
            self._waiting.append(place)
            self._waiting_bytes += count
            try:
                self._changed.wait_for(lambda: self._waiting[0] is place and self._has_room(count))
                self._held += count
                self._holders += 1
            finally:
                self._waiting.remove(place)
                self._waiting_bytes -= count
                self._changed.notify_all()

    def _has_room(self, count: int) -> bool:
        return self._held + count <= self.total and (self._max_holders is None or self._holders < self._max_holders)
