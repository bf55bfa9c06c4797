"""Generates load on an HTTP service: many clients with keep-alive connections and little work of their own."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Load(NamedTuple):
    """The result of a load."""

    seconds: float
    latencies: NDArray[np.float64]
    statuses: dict[int, int]

    @property
    def rate(self) -> float:
        """Successful requests per second."""
        return self.statuses.get(200, 0) / self.seconds

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.latencies, share))


def form_request(photo: bytes, field: str, path: str) -> bytes:
    """Returns a complete request that uploads a photo, made once so that sending it costs nothing."""
    boundary = b"lookalike-load"
    head = b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="p.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    body = head % (boundary, field.encode()) + photo + b"\r\n--" + boundary + b"--\r\n"
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines.append(f"Content-Type: multipart/form-data; boundary={boundary.decode()}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def closed_load(port: int, requests: Sequence[bytes], *, clients: int, count: int) -> Load:
    """Runs clients that each send the next request when the previous one is answered."""
    return asyncio.run(_closed(port, requests, clients, count))


def open_load(port: int, requests: Sequence[bytes], *, rate: float, count: int) -> Load:
    """Sends requests at random times, whether or not earlier ones are answered; waiting counts."""
    return asyncio.run(_open(port, requests, rate, count))


async def _closed(port: int, requests: Sequence[bytes], clients: int, count: int) -> Load:
    waiting = iter(range(count))
    latencies: list[float] = []
    statuses: dict[int, int] = {}

    async def client() -> None:
        connection = await asyncio.open_connection("127.0.0.1", port)
        for number in waiting:
            started = time.perf_counter()
            status = await _send(connection, requests[number % len(requests)])
            latencies.append(time.perf_counter() - started)
            statuses[status] = statuses.get(status, 0) + 1
        connection[1].close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(time.perf_counter() - started, np.array(latencies), statuses)


async def _open(port: int, requests: Sequence[bytes], rate: float, count: int) -> Load:
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    latencies: list[float] = []
    statuses: dict[int, int] = {}
    chance = random.Random(0)

    async def one(number: int) -> None:
        started = time.perf_counter()
        # The service has closed those that lay idle for some seconds.
        while idle and idle[-1][0].at_eof():
            idle.pop()[1].close()
        connection = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        status = await _send(connection, requests[number % len(requests)])
        latencies.append(time.perf_counter() - started)
        statuses[status] = statuses.get(status, 0) + 1
        idle.append(connection)

    started = at = time.perf_counter()
    tasks = []
    for number in range(count):
        at += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - started
    for _, writer in idle:
        writer.close()
    return Load(seconds, np.array(latencies), statuses)


async def _send(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> int:
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return int(head.split(b" ", 2)[1])
