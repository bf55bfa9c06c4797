"""Clients that leave and clients that dawdle: neither frees what is still used, nor keeps what others need."""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import anyio.to_thread
import httpx
import pytest
from anyio import CapacityLimiter
from fastapi import Request

from service import app, middleware, search_pipeline
from service.search_pipeline import ClientLeft, while_connected
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.tiny_gallery import tiny_photo

PHOTO = tiny_photo(2, 5)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Leaving:
    """A request whose client leaves when told."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Thread:
    """Work in a thread that ends when told."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)


async def until_nothing_moves() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("fails", [False, True])
async def test_a_thread_that_works_for_nobody_keeps_its_place_until_it_is_done(fails: bool) -> None:
    client, thread, limiter = Leaving(), Thread(), CapacityLimiter(1)

    async def work() -> None:
        await anyio.to_thread.run_sync(thread, limiter=limiter)
        if fails:
            raise ValueError("that nobody will hear of")

    task = asyncio.create_task(while_connected(client.request, work()))
    assert await asyncio.to_thread(thread.begun.wait, 60)
    client.left.set()
    await until_nothing_moves()
    try:
        assert limiter.borrowed_tokens == 1 and not task.done()
    finally:
        thread.may_end.set()
    with pytest.raises(ClientLeft):
        await task
    assert limiter.borrowed_tokens == 0


@pytest.mark.anyio
async def test_what_waits_for_a_place_is_dropped_at_once() -> None:
    client, thread, limiter = Leaving(), Thread(), CapacityLimiter(1)
    async with limiter:
        task = asyncio.create_task(while_connected(client.request, anyio.to_thread.run_sync(thread, limiter=limiter)))
        await until_nothing_moves()
        client.left.set()
        with pytest.raises(ClientLeft):
            await task
    assert not thread.begun.is_set()


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=60)


def head(length: int) -> bytes:
    lines = "POST /v1/search HTTP/1.1", "Host: localhost", "Content-Type: image/jpeg", f"Content-Length: {length}"
    return "\r\n".join((*lines, "\r\n")).encode()


def test_a_client_that_leaves_gives_back_no_permit_while_its_photo_is_decoded(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, decode = Thread(), search_pipeline._pixels

    def wait_and_decode(*given: Any) -> Any:
        monkeypatch.setattr(search_pipeline, "_pixels", decode)
        thread()
        return decode(*given)

    monkeypatch.setattr(search_pipeline, "_pixels", wait_and_decode)
    with serving(settings.model_copy(update={"max_requests": 1})) as client:
        try:
            with connect(client) as leaver:
                leaver.sendall(head(len(PHOTO)) + PHOTO)
                assert thread.begun.wait(60)
                leaver.shutdown(socket.SHUT_WR)
                assert leaver.recv(1) == b""  # the service has seen it
            client.get("/healthz")
            refused = problem(client.post("/v1/search", files={"image": PHOTO}), 503, "overloaded")
            assert refused["detail"] == "1 requests are in work already."
        finally:
            thread.may_end.set()
        while client.post("/v1/search", files={"image": PHOTO}).status_code != 200:
            pass
        told = client.get("/metrics").text
    assert 'lookalike_requests_total{method="POST",route="/v1/search",status="499"} 1.0' in told


def test_photos_that_arrive_slowly_keep_nobody_from_work(settings: Settings) -> None:
    with serving(settings.model_copy(update={"max_requests": 1})) as client, ExitStack() as opened:
        slow = [opened.enter_context(connect(client)) for _ in range(8)]
        for connection in slow:
            connection.sendall(head(len(PHOTO)) + PHOTO[:100])
        assert client.post("/v1/search", files={"image": PHOTO}).status_code == 200
        for connection in slow:
            connection.sendall(PHOTO[100:])
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_photos_that_arrive_together_hold_so_many_bytes_and_no_more(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_MOST_HELD", 20_000)
    with serving(settings.model_copy(update={"max_requests": 2, "max_body_bytes": 10_000})) as client:
        with connect(client) as first, connect(client) as second:
            for slow in (first, second):
                slow.sendall(head(9000) + bytes(8990))
            until = time.monotonic() + 20
            while (refused := client.post("/v1/search", files={"image": bytes(2000)})).status_code != 503:
                assert time.monotonic() < until, "the bytes of both must have arrived by now"
            body = problem(refused, 503, "overloaded")
            assert body["detail"] == "The requests that are in work already have 17,980 bytes."
            assert refused.headers["retry-after"] == "1"
        while (answer := client.post("/v1/search", files={"image": bytes(2000)})).status_code == 503:
            assert time.monotonic() < until, "those who left hold nothing"
        assert answer.status_code == 415
        assert 'lookalike_refused_total{reason="requests"}' in client.get("/metrics").text


@pytest.mark.parametrize("limit", ["_PIECE_SECONDS", "_BODY_SECONDS"])
def test_a_photo_that_does_not_arrive_is_told_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(middleware, limit, 0.2)
    with serving(settings.model_copy(update={"max_requests": 1})) as client, connect(client) as slow:
        slow.sendall(head(9000) + b"x")
        status, headers, content = read_answer(slow)
        told = httpx.Response(status, headers=headers, content=content)
        body = problem(told, 408, "body-too-slow")
        assert body["detail"].startswith("1 bytes") and told.headers["connection"] == "close"
        monkeypatch.undo()
        assert client.post("/v1/search", files={"image": PHOTO}).status_code == 200


def test_time_does_not_press_a_photo_that_is_whole(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    thread, decode = Thread(), search_pipeline._pixels
    over = threading.Timer(1.0, thread.may_end.set)

    def wait_and_decode(*given: Any) -> Any:
        over.start()
        thread()
        return decode(*given)

    monkeypatch.setattr(search_pipeline, "_pixels", wait_and_decode)
    for limit in ("_PIECE_SECONDS", "_BODY_SECONDS"):
        monkeypatch.setattr(middleware, limit, 0.5)
    with serving(settings) as client:
        assert client.post("/v1/search", files={"image": PHOTO}).status_code == 200


def read_answer(connection: socket.socket) -> tuple[int, list[tuple[str, str]], bytes]:
    """The status, headers and body of the one answer after which the service closes the connection."""
    with connection.makefile("rb") as file:
        head, _, body = file.read().partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return int(first.split()[1]), [(name, value) for name, _, value in pairs], body
