"""Connections that are idle do not keep other clients out, and those in use are not cut off."""

import asyncio
import select
import socket
import threading
import time
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
import uvicorn

from service.app import create_app
from service.server import protocol
from service.settings import Settings
from tests.service.conftest import serving

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=60)


def answered(connection: socket.socket) -> bool:
    """Whether an answer arrives before the connection is closed."""
    response = HTTPResponse(connection)
    try:
        response.begin()
        return bool(response.read())
    except ConnectionError:  # among them http.client's own, of a connection that is closed without a word
        return False


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", HEAD[:-2], HEAD[:30]])
@pytest.mark.parametrize("asked_before", [False, True])
def test_a_connection_that_never_completes_a_head_is_closed(
    settings: Settings, sent: bytes, asked_before: bool
) -> None:
    with serving(settings.model_copy(update={"head_seconds": 0.3})) as client, connect(client) as slow:
        if asked_before:
            slow.sendall(HEAD)
            assert answered(slow)
        slow.sendall(sent)
        assert not answered(slow)


def test_a_head_that_arrives_in_pieces_is_answered(settings: Settings) -> None:
    with serving(settings) as client, connect(client) as slow:
        for _ in range(2):
            for piece in (HEAD[:7], HEAD[7:40], HEAD[40:]):
                slow.sendall(piece)
                time.sleep(0.05)
            assert answered(slow)


def test_the_limit_of_the_head_does_not_apply_to_the_body(settings: Settings) -> None:
    with serving(settings.model_copy(update={"head_seconds": 0.2})) as client, connect(client) as slow:
        slow.sendall(b"PATCH /v1/items/none HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 2\r\n\r\n{")
        time.sleep(0.6)
        slow.sendall(b"}")
        assert slow.recv(100_000).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("path", ["/v1/search", "/v1/items/none"])
def test_a_client_that_half_closes_after_its_request_is_answered(settings: Settings, path: str) -> None:
    body = b'{"item_id": "ball-blue"}'
    method = b"POST" if path == "/v1/search" else b"PATCH"
    head = method + b" " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(settings) as client, connect(client) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(100_000), b""))
    assert received.startswith((b"HTTP/1.1 200", b"HTTP/1.1 422")) and received.endswith(b"}")


def test_a_client_that_half_closes_within_a_request_is_closed(settings: Settings) -> None:
    for sent in (b"", HEAD[:20], b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf"):
        with serving(settings) as client, connect(client) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            assert b"HTTP/1.1 200" not in connection.recv(100_000)


def test_a_client_that_was_not_accepted_yet_is_answered_before_shutdown(settings: Settings) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    listener = socket.create_server(("127.0.0.1", 0))
    server = protocol.Server(
        uvicorn.Config(create_app(settings), http=protocol.connection_class(settings), log_level="warning")
    )

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        loops[0].call_soon_threadsafe(loops[0].remove_reader, listener.fileno())
        time.sleep(0.3)  # from now on the loop accepts no connection
        with socket.create_connection(listener.getsockname(), timeout=60) as last:
            last.sendall(HEAD)
            server.should_exit = True
            assert answered(last)
    finally:
        server.should_exit = True
        thread.join()


async def _large_answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(20_000_000)})


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_does_not_read_its_answer_is_cut_off(settings: Settings, reads: bool) -> None:
    limits = settings.model_copy(update={"write_seconds": 0.3})
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(_large_answer, http=protocol.connection_class(limits), lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=20) as client:
            client.sendall(HEAD)
            received = 0
            if reads:  # slowly, but steadily: longer than the interval in total
                while received < 5_000_000:
                    received += len(client.recv(100_000))
                    time.sleep(0.01)
                while data := client.recv(1_000_000):
                    received += len(data)
                    if received >= 20_000_000:
                        break
                assert received >= 20_000_000
            else:
                poll = select.poll()
                poll.register(client, 0)
                assert poll.poll(20_000), "it is reset although the system still holds a part of the answer"
                with pytest.raises(ConnectionError):
                    while data := client.recv(1_000_000):
                        received += len(data)
                assert received < 20_000_000
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
