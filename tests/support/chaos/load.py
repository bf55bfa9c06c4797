"""Searches at a fixed arrival rate, whether or not earlier ones are answered."""

import asyncio
import time
from contextlib import suppress

from .client import Connection, ConnectionBroken, Response, encode_request
from .photos import make_grained_photo
from .world import World, check_contract

ROUTE = "POST /v1/search"
_CLIENTS = 16
_MAX_IN_FLIGHT = 400
"""Searches without an answer beyond which no more are sent: each needs an open file here and in the service."""
_CHECKED = 20
"""One in so many answers is parsed: the generator shares the cores with the service."""


def encode_searches(count: int = 24) -> list[bytes]:
    """Returns searches by photos of about 100 KB, encoded once."""
    headers = {"Content-Type": "image/jpeg"}
    photos = [make_grained_photo(number).data for number in range(count)]
    return [encode_request("POST", "/v1/search?limit=5", photo, headers) for photo in photos]


async def measure_capacity(port: int, *, seconds: float) -> float:
    """Returns the searches per second that the service completes for clients that wait for each answer."""
    requests, done = encode_searches(), 0
    end = time.monotonic() + seconds

    async def client(first: int) -> None:
        nonlocal done
        connection = Connection(port)
        for number in range(first, 1 << 60):
            if time.monotonic() >= end:
                break
            response = await connection.send(requests[number % len(requests)])
            done += response.status == 200
        connection.close()

    began = time.monotonic()
    await asyncio.gather(*(client(first) for first in range(_CLIENTS)))
    return done / (time.monotonic() - began)


class _Load:
    def __init__(self, world: World) -> None:
        self._world = world
        self._requests = encode_searches()
        self._idle: list[Connection] = []
        self.in_flight = 0

    async def send(self, number: int) -> None:
        """Sends one search on an idle or a new connection."""
        world, began = self._world, time.monotonic()
        connection = self._take()
        self.in_flight += 1
        try:
            response = await connection.send(self._requests[number % len(self._requests)])
        except ConnectionBroken:
            world.stats.requests["load", 0] += 1
            return
        finally:
            self.in_flight -= 1
        world.stats.requests["load", response.status] += 1
        if response.status == 200:
            world.stats.latencies.append(time.monotonic() - began)
        if number % _CHECKED == 0 or response.status not in (200, 503):
            self._check(response, began)
        self._idle.append(connection)

    def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.port == self._world.service.port and connection.is_usable:
                return connection
            connection.close()
        return Connection(self._world.service.port)

    def _check(self, response: Response, began: float) -> None:
        check_contract(self._world, ROUTE, response)
        if response.status == 200:
            for item in response.json()["items"]:
                if problem := self._world.expectations.check_match(item, began, {}):
                    self._world.violate("search", problem)
        elif response.status != 503:
            self._world.violate("refused search", f"under load: {response.status} {response.body[:300]!r}")

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def send_load(world: World, rate: float) -> None:
    """Sends searches at random times with this many per second on average, until the run is over."""
    load, random, at = _Load(world), world.random("load"), time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    number = 0
    while not world.is_over:
        at += random.expovariate(rate)
        # No sleep when it is late: the rate holds over time, and the other clients get their turn in between.
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        number += 1
        if not world.service.up.is_set():
            world.stats.requests["not sent, no service", 0] += 1
            continue
        if load.in_flight >= _MAX_IN_FLIGHT:
            world.stats.requests["not sent, too many open", 0] += 1
            continue
        task = asyncio.create_task(load.send(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    with suppress(TimeoutError):
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)
    load.close()
