"""The rate limit: one token bucket per key, so that a busy client slows down only itself."""

import threading
from collections import OrderedDict


class RateLimit:
    """Allows each key `burst` requests at once and `rate` requests per second after that.

    A bucket is stored as one number, the time when it will be full again, so refilling needs no timer.
    Beyond `max_keys`, the bucket that was used longest ago is dropped, which refills it; this bounds the memory
    and is far more than a service has keys.
    """

    def __init__(self, rate: float, burst: int, *, max_keys: int = 10_000) -> None:
        if rate <= 0 or burst < 1 or max_keys < 1:
            raise ValueError(f"rate {rate}, burst {burst} and max_keys {max_keys} must be positive")
        self._interval = 1 / rate
        self._span = (burst - 1) * self._interval
        self._max_keys = max_keys
        self._full_at: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()  # held for a few instructions, so an event loop may take it too

    def take(self, key_id: str, now: float) -> float:
        """Takes a token and returns 0, or returns the seconds until one is available.

        `now` is in seconds of a monotonic clock, such as `time.monotonic()`.
        """
        with self._lock:
            full_at = max(self._full_at.get(key_id, now), now)
            wait = full_at - now - self._span
            self._full_at[key_id] = full_at if wait > 0 else full_at + self._interval
            self._full_at.move_to_end(key_id)
            if len(self._full_at) > self._max_keys:
                self._full_at.popitem(last=False)
        return max(wait, 0.0)
