"""The rate limit: one token bucket for each key, so that a busy client slows down nobody but itself."""

import threading
from collections import OrderedDict


class RateLimit:
    """Allows each key `burst` requests at once and `rate` requests a second from then on.

    A bucket is kept as one number, the moment when it will be full again: tokens need no timer to drip in.
    Beyond `most_keys`, the bucket that was used longest ago is forgotten, which fills it; it bounds the memory
    and is far more than a service has keys.
    """

    def __init__(self, rate: float, burst: int, *, most_keys: int = 10_000) -> None:
        if rate <= 0 or burst < 1 or most_keys < 1:
            raise ValueError(f"rate {rate}, burst {burst} and most_keys {most_keys} must be positive")
        self._interval = 1 / rate
        self._span = (burst - 1) * self._interval
        self._most_keys = most_keys
        self._full_at: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()  # held for a few instructions: an event loop may take it as well

    def take(self, key_id: str, now: float) -> float:
        """Takes a token and answers 0, or takes none and answers the seconds until there is one.

        `now` is in seconds of any clock that does not go back, such as `time.monotonic()`.
        """
        with self._lock:
            full_at = max(self._full_at.get(key_id, now), now)
            wait = full_at - now - self._span
            self._full_at[key_id] = full_at if wait > 0 else full_at + self._interval
            self._full_at.move_to_end(key_id)
            if len(self._full_at) > self._most_keys:
                self._full_at.popitem(last=False)
        return max(wait, 0.0)
