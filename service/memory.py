"""Divides the memory of one process between what its requests need, and counts the bytes of each share.

What a process takes in any case is set aside: the interpreter, the model, the index and a compaction. The rest is
divided between request bodies, photos that are being decoded, and answers; a part is left for searches themselves and
for what the allocator does not return. In each thread that searches, the window of a ranking takes up to 10 bytes per
number of its 500 vectors: 2.5 MiB with 512 numbers. A share that is used up refuses requests instead of growing.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from index._util.system import memory_limit
from service.settings import Settings

_MIB = 1024 * 1024
_PROCESS_BYTES, _PARENT_BYTES = 250 * _MIB, 100 * _MIB
"""What a server process takes without requests, and what the parent of several of them takes."""
_SIXTEENTHS = {"received": 3, "decoding": 9, "answers": 2}
"""Shares of the rest; two sixteenths are left."""
JSON_FACTOR, ESCAPED_JSON_FACTOR, BODY_FACTOR = 3, 6, 2
"""Memory that a body takes until its request is answered, as a multiple of its size. Measured with 20 MiB: a photo is
held twice, as it arrived and joined. JSON is held with its text and the decoded photo. With escapes or characters other
than ASCII a text may take four bytes per character."""
_SMALL_SHARE = 4
"""The last fourth of a share is for small requests: a few large ones must not keep them all out."""


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of glibc's parameters."""


def configure_allocator() -> None:
    """Makes the allocator return large blocks to the system when they are freed, if it is glibc's.

    By default it raises the size from which it does so to that of the blocks that were freed, and keeps memory for each
    of many threads: after some large bodies and answers a process held 400 MiB that nothing used.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter, value in ((_MMAP_THRESHOLD, _MIB), (_TRIM_THRESHOLD, 16 * _MIB), (_ARENA_MAX, 4)):
            library.mallopt(parameter, value)


class MemoryPlan(NamedTuple):
    """The bytes that one process may use for each purpose."""

    received: int
    decoding: int
    answers: int

    @classmethod
    def from_settings(cls, settings: Settings, limit: int | None = None) -> "MemoryPlan":
        """Divides the memory limit by the number of processes; a setting replaces a share, but not its minimum."""
        limit = limit or memory_limit()
        process = (limit - _PARENT_BYTES if settings.workers > 1 else limit) // settings.workers
        rest = max(process - _PROCESS_BYTES, limit // settings.workers // 4)
        shares = {name: rest * part // 16 for name, part in _SIXTEENTHS.items()}
        configured = {
            "received": settings.max_held_bytes,
            "decoding": settings.max_decode_bytes,
            "answers": settings.max_unsent_bytes,
        }
        shares |= {name: total // settings.workers for name, total in configured.items() if total is not None}
        # Else the largest allowed body, or the largest answer, would be refused for ever.
        minimum = {
            "received": ESCAPED_JSON_FACTOR * settings.max_body_bytes * _SMALL_SHARE // (_SMALL_SHARE - 1),
            "answers": 2 * settings.max_answer_bytes * _SMALL_SHARE // (_SMALL_SHARE - 1),
        }
        return cls(**{name: max(share, minimum.get(name, 0)) for name, share in shares.items()})


class Share:
    """Bytes for one purpose, counted over all requests of a process; any thread may count."""

    def __init__(self, total: int, *, small: int, refuse: Callable[[str], Exception]) -> None:
        """`small` is the size up to which a request may use the last part; `refuse` makes the error of a refusal."""
        self.total = total
        self.held = 0
        self._small = small
        self._refuse = refuse
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator["Holding"]:
        """Yields what a request counts its bytes with; they are released with the context."""
        holding = Holding(self)
        try:
            yield holding
        finally:
            holding.resize(0)

    def change(self, before: int, after: int, *, forced: bool) -> None:
        """Replaces the bytes that a request held; raises when there is no room for more, unless forced."""
        with self._lock:
            limit = self.total if after <= self._small else self.total - self.total // _SMALL_SHARE
            others = self.held - before
            if after > before and not forced and others + after > limit:
                raise self._refuse(f"Other requests hold {others:,} bytes already.")
            self.held = others + after


class Holding:
    """The bytes that one request holds of a share."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.count = 0

    def add(self, count: int) -> None:
        """Holds some more bytes, or raises when there is no room for them."""
        self.resize(self.count + count)

    def resize(self, count: int, *, forced: bool = False) -> None:
        """Holds this many bytes instead of those before."""
        self._share.change(self.count, count, forced=forced)
        self.count = count
