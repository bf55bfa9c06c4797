"""The middleware: request ids, security headers, and limits of bodies."""

import asyncio
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from index.gallery.store.sqlite_jobs import SQLiteJobs
from service import photos
from service.admission import Admission
from service.app import create_app
from service.middleware import AnswerLimit, BodyLimit
from service.server.protocol import connection_class
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
    small = {"max_requests": 2, "max_body_bytes": 10_000, "max_held_bytes": 80_000}
    with serving(settings.model_copy(update=small)) as client:
        with ExitStack() as connections:
            for _ in range(4):
                slow = connections.enter_context(connect(client))
                slow.sendall(search_head(9990) + bytes(9980))
            until = time.monotonic() + 20
            while (refused := client.post("/v1/search", files={"image": bytes(2000)})).status_code != 503:
                assert time.monotonic() < until, "the bytes of all must have arrived by now"
            body = problem(refused, 503, "overloaded")
            assert body["detail"] == "Other requests hold 79,840 bytes already."
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


@pytest.mark.parametrize(
    "path",
    ["/healthz", "/readyz", "/v1/status", "/", "/web/app.js", "/v1/items", "/v1/items/ball-blue", "/v1/facets",
     "/v1/examples", "/examples/blue%20ball.jpg", "/openapi.json", "/v1/jobs", "/metrics", "/v1/items/none"],
)  # fmt: skip
def test_head_has_the_head_of_get_and_no_body(client: httpx.Client, path: str) -> None:
    read, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (read.status_code, b"")
    changing = {"x-request-id", "date"} | ({"content-length"} if path in ("/metrics", "/v1/items/none") else set())
    kept = [{name: value for name, value in one.headers.items() if name not in changing} for one in (read, head)]
    assert kept[0] == kept[1]
    assert "content-length" in head.headers
    assert client.head("/healthz").status_code == 200, "the connection is still in order"


def test_head_of_a_thumbnail_and_of_a_cached_one(client: httpx.Client) -> None:
    found = client.post("/v1/search?limit=1", files={"image": PHOTO}).json()["items"][0]["image"]["url"]
    head = client.head(found)
    assert head.headers["content-type"] == "image/jpeg" and int(head.headers["content-length"]) > 100
    assert client.head(found, headers={"If-None-Match": head.headers["etag"]}).status_code == 304


def test_head_does_not_change_anything_and_is_counted_as_itself(client: httpx.Client) -> None:
    refused = client.head("/v1/search")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
    assert client.post("/v1/status").headers["allow"] == "GET, HEAD"
    client.head("/v1/status")
    assert 'lookalike_requests_total{method="HEAD",route="/v1/status",status="200"}' in client.get("/metrics").text


def test_head_of_a_stream_ends(settings: Settings) -> None:
    with closing(SQLiteJobs(Path(settings.gallery))) as history, serving(settings) as client:
        job = history.begin("catalogue.csv", "0" * 16)
        head = client.head(f"/v1/jobs/{job.record.id}/events", timeout=20)
        job.update(state="cancelled")
        assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert client.head("/healthz").status_code == 200


class Uncounted:
    """Ignores what the admission controller reports."""

    def refused(self, reason: object) -> None: ...

    def working(self, change: int) -> None: ...


@pytest.mark.parametrize(
    ("media_type", "pieces", "counts"),
    [
        ("image/jpeg", [bytes(1000), b"\xff" * 500], [2000, 3000]),
        ("multipart/form-data; boundary=x", [b"x" * 1000], [2000]),
        ("application/json", [b"x" * 1000, b"y" * 1000], [3000, 6000]),
        ("application/merge-patch+json", [b"x" * 1000, "ö".encode()], [3000, 6012]),
        ("Application/JSON", [b'{"image": "\\u0041', b"x" * 983], [102, 6000]),
    ],
)
def test_a_body_is_counted_with_the_memory_that_it_takes(
    settings: Settings, media_type: str, pieces: list[bytes], counts: list[int]
) -> None:
    admission, found = Admission(settings, Uncounted()), []

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            found.append(admission.received.held)
        found.append(admission.received.held)

    async def send(message: Message) -> None: ...

    scope = {"type": "http", "headers": [(b"content-type", media_type.encode())]}
    asyncio.run(BodyLimit(read_all, settings, admission)(scope, receive, send))
    assert found == counts and admission.received.held == 0


@pytest.mark.parametrize("ending", ["read", "cut off", "left"])
def test_an_answer_is_counted_until_the_client_has_read_it(settings: Settings, ending: str) -> None:
    admission, answer = Admission(settings, Uncounted()), bytes(20_000_000)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["answer"].add(2 * len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    limits = settings.model_copy(update={"write_seconds": 1.0 if ending == "cut off" else 60.0})
    with run_app(AnswerLimit(app, admission), limits) as place, socket.create_connection(place, timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(5) == b"HTTP/"
        time.sleep(0.3)
        assert admission.answers.held == len(answer)
        if ending == "read":
            received = 5
            while received < len(answer):
                received += len(client.recv(1_000_000))
        elif ending == "left":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        until = time.monotonic() + 20
        while admission.answers.held:
            assert time.monotonic() < until
            time.sleep(0.05)


@contextmanager
def run_app(app: ASGIApp, settings: Settings) -> Iterator[tuple[str, int]]:
    """Serves an application with the service's connections; yields the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=connection_class(settings), lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
