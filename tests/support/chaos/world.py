"""What all clients of a run share: the service, the expectations, what was measured, and what was wrong."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from .client import Connection, ConnectionBroken, Response, encode_request
from .expectations import Expectations, Json
from .photos import HostileImages, Photo, make_photo
from .service import ServiceProcess

_EXAMPLES = 5
"""Violations of one kind that are described."""
PHOTOS = 40
_KILL_GRACE = 2.0
"""Seconds after a kill in which connections may still break."""


class Interrupted(Exception):
    """The service was killed before it answered: a write may or may not have been made."""


class Finished(Exception):
    """The run is over."""


@dataclass(frozen=True)
class ChaosOptions:
    """The size of a run."""

    seed: int
    seconds: float = 60.0
    workers: int = 1
    max_memory: int = 900 << 20
    """Bytes of memory that the processes of the service may take together at any time."""
    health_seconds: float = 10.0
    """Time for /healthz to answer while the process lives."""
    kill_seconds: tuple[float, float] = (5.0, 12.0)
    """Shortest and longest time between two kills of the service."""
    load: float = 0.0
    """Searches to send as a multiple of the measured capacity, in addition to everything else."""
    record_seconds: float = 60.0
    """Interval of the records."""


@dataclass
class Stats:
    """Counts and times since the last record."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By kind of request and status; 0 when the service was killed before it answered."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of the searches that were accepted."""
    recoveries: list[float] = field(default_factory=list)
    """Seconds from a kill until the service was ready again."""
    health: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """What was done to the service."""


class World:
    """The state of a run."""

    def __init__(self, options: ChaosOptions, folder: Path, *, gallery: Path, service: ServiceProcess) -> None:
        self.options = options
        self.folder = folder
        self.gallery = gallery
        self.table = folder / "catalogue" / "catalogue.csv"
        self.service = service
        self.expectations = Expectations()
        self.hostile = HostileImages()
        self.photos: list[Photo] = [make_photo(number) for number in range(PHOTOS)]
        self.documented: dict[str, set[int]] = {}
        self.stats = Stats()
        self.totals = Stats()
        self.violations: Counter[str] = Counter()
        self.examples: list[str] = []
        self.peak_memory = 0
        self.is_over = False
        self.is_broken = False
        """Whether the service could not be started again, which ends the run."""
        self.is_disk_full = False
        self._switches = 0
        self._switching = 0
        self._began = time.monotonic()

    def violate(self, kind: str, text: str) -> None:
        """Records that an invariant does not hold."""
        self.violations[kind] += 1
        if self.violations[kind] <= _EXAMPLES:
            self.examples.append(f"{kind}, after {time.monotonic() - self._began:.1f} s: {text}")

    def random(self, name: str) -> Random:
        """Returns the random numbers of one client, which do not depend on what the others do."""
        return Random(f"{self.options.seed} {name}")

    async def rest(self, seconds: float) -> None:
        """Waits; raises Finished when the run is over."""
        end = time.monotonic() + seconds
        while not self.is_over and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.2))
        self.check_over()

    def check_over(self) -> None:
        if self.is_over:
            raise Finished

    def begin_switch(self) -> None:
        """Marks that another bundle may become active from now on."""
        self._switches += 1
        self._switching += 1

    def end_switch(self) -> None:
        self._switching -= 1

    @property
    def switch_mark(self) -> int | None:
        """A number that changes when a bundle may be activated; None while that may happen."""
        return None if self._switching else self._switches

    def take_stats(self) -> Stats:
        """Returns the counts since the last call, and adds them to the totals."""
        taken, self.stats = self.stats, Stats()
        for name in ("requests", "faults"):
            getattr(self.totals, name).update(getattr(taken, name))
        for name in ("latencies", "recoveries", "health", "memory"):
            getattr(self.totals, name).extend(getattr(taken, name))
        return taken


class Client:
    """One client with a keep-alive connection; checks of every answer that it keeps the contract."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.random = world.random(name)
        self._connection: Connection | None = None

    async def send(
        self,
        kind: str,
        route: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sends a request of the route, such as `GET /v1/items/{item_id}`; raises Interrupted after a kill."""
        return await self.send_encoded(kind, route, encode_request(route.partition(" ")[0], path, body, headers))

    async def send_json(
        self, kind: str, route: str, path: str, document: Json, headers: Mapping[str, str] | None = None
    ) -> Response:
        body, headers = json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})}
        return await self.send(kind, route, path, body, headers)

    async def send_encoded(self, kind: str, route: str, request: bytes) -> Response:
        service = self.world.service
        while not service.up.is_set():
            await self.world.rest(0.1)
        connection = self._connect()
        kills, is_fresh, began = service.kills, connection.answers == 0, time.monotonic()
        try:
            response = await connection.send(request)
        except ConnectionBroken as error:
            self._connection = None
            self.world.stats.requests[kind, 0] += 1
            seconds = time.monotonic() - began
            was_killed = service.kills > kills or time.monotonic() - service.killed_at < _KILL_GRACE
            # The service closes a connection that was idle for some seconds: then it has not read the request.
            if not was_killed and (is_fresh or seconds > 1):
                self.world.violate("no answer", f"{self.name}: {route} after {seconds:.1f} s: {error}")
            raise Interrupted from error
        stats = self.world.stats
        stats.requests[kind, response.status] += 1
        if kind == "search" and response.status == 200:
            stats.latencies.append(time.monotonic() - began)
        check_contract(self.world, route, response)
        return response

    def _connect(self) -> Connection:
        port = self.world.service.port
        if self._connection is None or self._connection.port != port or not self._connection.is_usable:
            self.close()
            self._connection = Connection(port)
        return self._connection

    def check_revision(self, answer: Json, at_least: int) -> None:
        """Checks that a search saw every write acknowledged before it, and that the connection never goes back."""
        connection, revision = self._connect(), answer["revision"]
        if revision < at_least:
            self.world.violate("stale", f"{self.name}: a search of revision {revision} began after {at_least}")
        if revision < connection.revision:
            self.world.violate("went back", f"{self.name}: revision {revision} follows {connection.revision}")
        connection.revision = max(connection.revision, revision)

    def close(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None


def check_contract(world: World, route: str, response: Response) -> None:
    """Checks that a status is documented for the route, and that an error is a problem document."""
    status = response.status
    documented = world.documented.get(route)
    if status == 500:
        world.violate("500", f"{route}: {response.body[:300]!r}, {response.headers.get('x-request-id')}")
    elif documented is not None and status not in documented:
        world.violate("undocumented status", f"{route}: {status} {response.body[:300]!r}")
    if status < 400:
        return
    problem: Any = None
    if response.headers.get("content-type") == "application/problem+json":
        problem = response.json()
    if not isinstance(problem, dict) or problem.get("status") != status or not problem.get("detail"):
        world.violate("not a problem", f"{route}: {status} {response.headers} {response.body[:300]!r}")
    elif problem["type"] == "/problems/overloaded" and not response.headers.get("retry-after"):
        world.violate("not a problem", f"{route}: {status} without Retry-After")


def problem_type(response: Response) -> str:
    """Returns the last part of the problem's type."""
    return str(response.json()["type"]).rpartition("/")[2]
