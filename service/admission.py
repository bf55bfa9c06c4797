"""Decides whether a request may work now: the one place with the limits of concurrent work.

Each kind of work has places of its own, so that waiting writes, listings or jobs never stop searches. What exceeds a
limit is refused at once with `Overloaded`, which the service answers with 503 and Retry-After, instead of making
everybody late.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from time import monotonic
from typing import Literal, ParamSpec, Protocol, TypeVar, get_args

import anyio.to_thread
from anyio import CapacityLimiter

from index._util.byte_budget import ByteBudget, QueueFull
from index._util.deadline import deadline
from index._util.system import usable_cores
from index.errors import LookalikeError
from service.memory import MemoryPlan, Share
from service.settings import Settings

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

Lane = Literal["search", "write"]
"""Requests that are counted while they work: those that search, and those that write items."""
Pool = Literal["decode", "search", "read", "list", "write", "job", "status"]
"""Worker threads for one kind of blocking work."""
Refusal = Literal["rate", "bytes", "answers", "fetch", "embed", "watch", "conflict", Lane, Pool]
"""Why a request was refused: the limit that it met."""

_NOUNS: dict[Refusal, str] = {
    "search": "searches",
    "write": "writes",
    "decode": "photos to decode",
    "read": "reads",
    "list": "listings",
    "job": "requests about jobs",
    "status": "requests for the status",
    "fetch": "photos to fetch",
    "embed": "photos to embed",
    "watch": "watchers of jobs",
}


_SMALL_BODY, _SMALL_ANSWER = 2 * 1024 * 1024, 256 * 1024
"""Memory up to which a body or an answer counts as small: an ordinary photo, and some dozens of items."""
_SEARCH_POOLS: tuple[Pool, ...] = ("decode", "search")
"""What every search by a photo needs."""
_SMALL_DECODES = 16
"""The part of the memory for decoding up to which photos do not wait for larger ones: 63 MiB at a limit of 2 GiB."""
_WAITING_DECODES = 4
"""Photos that may wait to be decoded, as a multiple of the memory for decoding: a few seconds of work at most."""


class Overloaded(LookalikeError):
    """More work is running or waiting than the service accepts; it may be repeated after `retry_after` seconds."""

    kind = "overloaded"

    def __init__(self, problem: str, *, retry_after: float = 1.0, close: bool = False) -> None:
        super().__init__(problem, "Send the request again after the time in Retry-After.")
        self.retry_after = retry_after
        self.close = close
        """Whether the connection is closed too, because the rest of the body is not read."""


class Telemetry(Protocol):
    """Where refusals and requests in work are counted."""

    def refused(self, reason: Refusal) -> None: ...

    def working(self, change: int) -> None: ...


class _ThreadPool:
    """Threads of one kind of work and the bounds on its queue."""

    def __init__(self, threads: int, waiting: int, seconds: float = inf) -> None:
        self.limiter = CapacityLimiter(threads)
        self.threads = threads
        self.capacity = threads + waiting
        self.seconds = seconds
        """How long work may wait, for a thread and for locks of other processes together."""
        self.count = 0
        self.moved_at = 0.0
        """When the last thread was taken while some were free, or one became free."""


class Admission:
    """Counts the work of one process against the limits of its settings."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lanes: dict[Lane, int] = dict.fromkeys(get_args(Lane), 0)
        self._lane_limits: dict[Lane, int] = {"search": settings.max_requests, "write": settings.max_writes}
        cores, waiting = usable_cores(), settings.max_waiting
        self._pools: dict[Pool, _ThreadPool] = {
            # Those that wait for a core or for memory wait inside their threads, where the memory they need is known.
            "decode": _ThreadPool(max(2, cores) + waiting, 0),
            "search": _ThreadPool(max(4, 2 * cores), waiting),
            "read": _ThreadPool(4, settings.max_reads),
            # One, because a list of a thousand items takes as long as many searches.
            "list": _ThreadPool(1, waiting),
            # The store has one writer at a time; a second one prepares its statements meanwhile.
            "write": _ThreadPool(2, settings.max_writes, settings.wait_seconds),
            "job": _ThreadPool(2, waiting, settings.wait_seconds),
            "status": _ThreadPool(2, waiting),
        }
        plan = MemoryPlan.from_settings(settings)
        self.decode_budget = ByteBudget(
            plan.decoding,
            max_holders=max(2, cores),
            max_waiting=_WAITING_DECODES * plan.decoding,
            small=plan.decoding // _SMALL_DECODES,
        )
        """Memory for decoding photos in this process."""
        self._fetches = CapacityLimiter(settings.max_fetches)
        self._max_waiting = waiting
        self._watchers = 0
        self._searched_at = 0.0
        self.received = Share(
            plan.received, small=_SMALL_BODY, refuse=lambda problem: self.refuse("bytes", problem, close=True)
        )
        """Memory for request bodies and fetched photos, until their requests are answered."""
        self.answers = Share(plan.answers, small=_SMALL_ANSWER, refuse=lambda problem: self.refuse("answers", problem))
        """Memory for answers, from when they are made until the clients have read them."""

    @property
    def working(self) -> int:
        """Requests that search or write now."""
        return sum(self._lanes.values())

    def check(self, lane: Lane) -> None:
        """Refuses a request when its lane is full.

        Called before a body is read. The place itself is taken afterwards: a client that sends slowly must not keep
        others from working.
        """
        if self._lanes[lane] >= self._lane_limits[lane]:
            raise self.refuse(lane, f"{self._lanes[lane]} {_NOUNS[lane]} are running already.")

    @contextmanager
    def place(self, lane: Lane) -> Iterator[None]:
        """Takes a place in the lane for as long as the context, or refuses."""
        self.check(lane)
        self._lanes[lane] += 1
        self._telemetry.working(1)
        if lane == "search":
            self._searched_at = monotonic()
        try:
            yield
        finally:
            self._lanes[lane] -= 1
            self._telemetry.working(-1)
            if lane == "search":
                self._searched_at = monotonic()

    async def run(
        self, pool: Pool, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Runs blocking work in a thread of the pool, or refuses when too much waits for one, or it waited too long.

        A thread that has begun is waited for even when the caller is cancelled: it holds memory that is counted.
        """
        own = self._pools[pool]
        if own.count >= own.capacity:
            raise self.refuse(pool, f"{own.count} {_NOUNS[pool]} are waiting already.")
        own.count += 1
        if own.count <= own.threads:
            own.moved_at = monotonic()
        try:
            with deadline(own.seconds), anyio.move_on_after(own.seconds):
                return await anyio.to_thread.run_sync(lambda: work(*args, **kwargs), limiter=own.limiter)
            raise self.refuse(pool, f"Other {_NOUNS[pool]} have not ended for {own.seconds:g} s.")
        except QueueFull:
            raise self.refuse(pool, f"The memory for {_NOUNS[pool]} is in use, and others wait for it.") from None
        finally:
            own.count -= 1
            own.moved_at = monotonic()

    def stuck_work(self, seconds: float) -> str | None:
        """Returns what kind of work has occupied all its threads for so long that nothing of it ended; None: none."""
        for pool in _SEARCH_POOLS:
            own = self._pools[pool]
            if own.count >= own.threads and monotonic() - own.moved_at > seconds:
                return _NOUNS[pool]
        if self._lanes["search"] >= self._lane_limits["search"] and monotonic() - self._searched_at > seconds:
            return _NOUNS["search"]
        return None

    @contextmanager
    def watch_place(self) -> Iterator[None]:
        """Takes a place to watch a job for as long as the context, or refuses when too many watch."""
        if self._watchers >= self._max_waiting:
            raise self.refuse("watch", f"There are {self._watchers} {_NOUNS['watch']} already.")
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    @asynccontextmanager
    async def fetch_place(self) -> AsyncIterator[None]:
        """Waits for a place to fetch a photo from its address, or refuses when too many wait."""
        waiting = self._fetches.statistics().tasks_waiting
        if waiting >= self._max_waiting:
            raise self.refuse("fetch", f"{waiting} {_NOUNS['fetch']} are waiting already.")
        async with self._fetches:
            yield

    def check_queue(self, waiting: int, seconds_each: float) -> None:
        """Refuses a photo when too many wait for the model."""
        if waiting >= self._max_waiting:
            raise self.refuse(
                "embed",
                f"{waiting} {_NOUNS['embed']} are waiting already.",
                retry_after=max(1.0, seconds_each * waiting),
            )

    def refuse(self, reason: Refusal, problem: str, *, retry_after: float = 1.0, close: bool = False) -> Overloaded:
        """Counts a refusal and returns the error to raise."""
        self._telemetry.refused(reason)
        return Overloaded(problem, retry_after=retry_after, close=close)
