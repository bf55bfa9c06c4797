"""A deadline that the work of one request shares, however deep it waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from time import monotonic

_end: ContextVar[float] = ContextVar("deadline", default=inf)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Bounds the waits of the context, and of threads that work for it, to `seconds` in total."""
    token = _end.set(min(_end.get(), monotonic() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


def seconds_left(limit: float = inf) -> float:
    """Returns how long a wait may take: at most `limit` seconds, and not beyond the deadline."""
    return max(0.0, min(limit, _end.get() - monotonic()))
