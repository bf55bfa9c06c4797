"""The middleware: request ids, security headers, and limits of bodies."""

import asyncio
import re
import socket
import threading
import time
from contextlib import ExitStack

import httpx
import pytest

from service import photos
from service.app import create_app
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.service.support import connect, search_head
from tests.support.tiny_gallery import tiny_photo

PHOTO = tiny_photo(2, 5)


def test_every_answer_has_a_request_id_and_keeps_the_callers(client: httpx.Client) -> None:
    one, other = client.get("/healthz"), client.get("/nowhere")
    assert one.headers["x-request-id"] != other.headers["x-request-id"]
    kept = client.get("/healthz", headers={"X-Request-Id": "shop-7.a"})
    assert kept.headers["x-request-id"] == "shop-7.a"
    replaced = client.get("/healthz", headers={"X-Request-Id": "spaces and <tags>"})
    assert re.fullmatch("[0-9a-f]{16}", replaced.headers["x-request-id"])


@pytest.mark.parametrize("address", ["/", "/web/app.js", "/v1/status", "/nowhere"])
def test_every_answer_forbids_foreign_and_inline_code(client: httpx.Client, address: str) -> None:
    headers = client.get(address).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "style-src 'self';" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_an_internal_error_is_a_problem_that_reveals_nothing(settings: Settings) -> None:
    app = create_app(settings)

    @app.get("/fault")
    def fault() -> None:
        raise RuntimeError("the secret is in /etc/secret")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/fault")

    response = asyncio.run(ask())
    problem(response, 500, "internal")
    assert "secret" not in response.text
    assert "default-src" in response.headers["content-security-policy"]


def test_photos_that_arrive_slowly_keep_no_other_request_from_working(settings: Settings) -> None:
    with serving(settings.model_copy(update={"max_requests": 1})) as client, ExitStack() as connections:
        slow = [connections.enter_context(connect(client)) for _ in range(8)]
        for connection in slow:
            connection.sendall(search_head(len(PHOTO)) + PHOTO[:100])
        assert client.post("/v1/search", files={"image": PHOTO}).status_code == 200
        for connection in slow:
            connection.sendall(PHOTO[100:])
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_bodies_that_arrive_together_hold_a_bounded_number_of_bytes(settings: Settings) -> None:
    small = {"max_requests": 2, "max_body_bytes": 10_000, "max_held_bytes": 20_000}
    with serving(settings.model_copy(update=small)) as client:
        with connect(client) as first, connect(client) as second:
            for slow in (first, second):
                slow.sendall(search_head(9000) + bytes(8990))
            until = time.monotonic() + 20
            while (refused := client.post("/v1/search", files={"image": bytes(2000)})).status_code != 503:
                assert time.monotonic() < until, "the bytes of both must have arrived by now"
            body = problem(refused, 503, "overloaded")
            assert body["detail"] == "Other requests hold 17,980 bytes already."
            assert refused.headers["retry-after"] == "1"
        while (answer := client.post("/v1/search", files={"image": bytes(2000)})).status_code == 503:
            assert time.monotonic() < until, "clients that left hold nothing"
        assert answer.status_code == 415
        assert 'lookalike_refused_total{reason="bytes"}' in client.get("/metrics").text


@pytest.mark.parametrize("limit", ["chunk_seconds", "body_seconds"])
def test_a_body_that_does_not_arrive_in_time_is_refused(settings: Settings, limit: str) -> None:
    with serving(settings.model_copy(update={"max_requests": 1, limit: 0.2})) as client, connect(client) as slow:
        slow.sendall(search_head(9000) + b"x")
        status, headers, content = read_answer(slow)
        answer = httpx.Response(status, headers=headers, content=content)
        body = problem(answer, 408, "body-timeout")
        assert body["detail"] == "Timed out after 1 bytes of the request body."
        assert answer.headers["connection"] == "close"
        assert client.post("/v1/search", files={"image": PHOTO}).status_code == 200


def test_no_time_limit_applies_once_the_body_is_complete(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = photos.decode_query

    def decode_slowly(*args: object) -> object:
        assert not threading.Event().wait(1.0)
        return decode(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(photos, "decode_query", decode_slowly)
    with serving(settings.model_copy(update={"chunk_seconds": 0.5, "body_seconds": 0.5})) as client:
        assert client.post("/v1/search", files={"image": PHOTO}).status_code == 200


def read_answer(connection: socket.socket) -> tuple[int, list[tuple[str, str]], bytes]:
    """Reads status, headers and body of the one answer after which the service closes the connection."""
    with connection.makefile("rb") as file:
        head, _, body = file.read().partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return int(first.split()[1]), [(name, value) for name, _, value in pairs], body
