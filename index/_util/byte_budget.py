"""A budget of memory that threads share."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition
from time import monotonic
from typing import NamedTuple

_OVERTAKE_SECONDS = 5.0
"""How long small ones may overtake a large one: then it is its turn."""


class QueueFull(Exception):
    """Too many bytes are being waited for; the message has their number."""


class _Waiting(NamedTuple):
    size: int
    is_small: bool
    since: float
    place: object
    """Distinguishes it from others that need as much."""


class ByteBudget:
    """Admits threads in the order of their arrival while the bytes that they need together are within the total.

    `max_holders` limits the threads that are admitted at the same time, and `max_waiting` the bytes that others wait
    for; default: no limit. Threads that need at most `small` bytes have a queue and places of their own, and the others
    have one place fewer: so they do not wait for a few that need much and take long.
    """

    def __init__(
        self, total: int, *, max_holders: int | None = None, max_waiting: int | None = None, small: int = 0
    ) -> None:
        self.total = total
        self._max_holders = max_holders
        self._max_waiting = max_waiting
        self._small = small
        self._held = self._held_by_large = self._holders = self._large_holders = 0
        self._queues: dict[bool, deque[_Waiting]] = {True: deque(), False: deque()}
        """By whether those that wait are small."""
        self._changed = Condition()

    @contextmanager
    def hold(self, count: int, *, slow: bool = False) -> Iterator[None]:
        """Waits until `count` bytes are free and holds them for as long as the context; raises QueueFull.

        Slow work waits with the large ones, however little memory it needs.
        """
        if count > self.total:
            raise ValueError(f"{count:,} bytes are more than the whole budget of {self.total:,}.")
        own = _Waiting(count, count <= self._small and not slow, monotonic(), object())
        self._acquire(own)
        try:
            yield
        finally:
            with self._changed:
                self._change(own, -1)

    def _change(self, own: _Waiting, holders: int) -> None:
        self._held += holders * own.size
        self._holders += holders
        if not own.is_small:
            self._held_by_large += holders * own.size
            self._large_holders += holders
        self._changed.notify_all()

    def _acquire(self, own: _Waiting) -> None:
        queue = self._queues[own.is_small]
        with self._changed:
            is_admitted = not queue and self._has_room(own)
            waiting = sum(other.size for other in queue)
            if not is_admitted and self._max_waiting is not None and waiting + own.size > self._max_waiting:
                raise QueueFull(f"{waiting:,} bytes are being waited for already")
            queue.append(own)
            try:
                self._changed.wait_for(lambda: queue[0] is own and self._has_room(own))
                self._change(own, 1)
            finally:
                queue.remove(own)
                self._changed.notify_all()

    def _has_room(self, own: _Waiting) -> bool:
        if self._held + own.size > self.total:
            return False
        if not own.is_small:
            return self._has_large_place
        if self._max_holders is not None and self._holders - self._large_holders >= self._max_holders:
            return False
        return not self._queues[False] or not self._is_kept_out_by_small(self._queues[False][0])

    def _is_kept_out_by_small(self, large: _Waiting) -> bool:
        """Whether a large one has waited long enough, and only for small ones: it would never get its turn.

        While it waits for other large ones, small ones are still admitted next to those.
        """
        if monotonic() - large.since < _OVERTAKE_SECONDS:
            return False
        fits_next_to_small = large.size + self._small * (self._max_holders or 1) <= self.total
        fits_next_to_large = self._held_by_large + large.size <= self.total and self._has_large_place
        return not fits_next_to_small and fits_next_to_large

    @property
    def _has_large_place(self) -> bool:
        if self._max_holders is None:
            return True
        return self._large_holders < max(1, self._max_holders - (self._small > 0))
