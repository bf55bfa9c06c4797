"""A budget of memory that threads share."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class ByteBudget:
    """Admits threads in the order of their arrival while the bytes that they need together are within the total.

    One that needs much is not overtaken by those that need little, so it is never starved.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._held = 0
        self._waiting: deque[object] = deque()
        self._changed = Condition()

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Waits until `count` bytes are free and holds them for as long as the context."""
        if count > self.total:
            raise ValueError(f"{count:,} bytes are more than the whole budget of {self.total:,}.")
        self._acquire(count)
        try:
            yield
        finally:
            with self._changed:
                self._held -= count
                self._changed.notify_all()

    def _acquire(self, count: int) -> None:
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is place and self._held + count <= self.total)
                self._held += count
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()
