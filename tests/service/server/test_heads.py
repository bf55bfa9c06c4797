"""Heads that a proxy could read differently are refused, and so are those that are too large."""

import json
import socket

import httpx
import pytest

from tests.service.support import connect

HOST = b"Host: localhost\r\n"
NEXT = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def exchange(client: httpx.Client, *pieces: bytes) -> bytes:
    """Sends the pieces one after the other, and returns all that arrives until the service closes the connection."""
    with connect(client) as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = b""
        while data := connection.recv(100_000):
            received += data
    return received


def refused(answer: bytes, status: int) -> str:
    """Checks that the answer is one problem of this status, and returns its detail."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower() and answer.count(b"HTTP/1.1") == 1
    problem = json.loads(body)
    assert problem["status"] == status and problem["remedy"]
    assert f"x-request-id: {problem['request_id']}".encode() in head.lower()
    return str(problem["detail"])


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\nCONTENT-LENGTH: 4\r\n",
        b"Content-Length: 0\r\nTransfer-Encoding:chunked\r\n",
        b"Content-Length:4\r\nX: y\r\nTransfer-Encoding: identity\r\n",
    ],
)
def test_two_lengths_of_one_body_are_refused(client: httpx.Client, headers: bytes) -> None:
    head = b"POST /v1/search HTTP/1.1\r\n" + HOST + headers + b"\r\n"
    detail = refused(exchange(client, head + b"0\r\n\r\n" + NEXT), 400)
    assert detail == "The head has both Content-Length and Transfer-Encoding."


def test_http_1_0_has_no_chunks(client: httpx.Client) -> None:
    head = b"POST /v1/search HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert "HTTP/1.0" in refused(exchange(client, head + b"0\r\n\r\n"), 400)


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET /healthz HTTP/1.1\nHost: localhost\n\n",),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\n\r\n",),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\n",),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: 1\nY: 2\r\n\r\n",),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost", b"\n", b"\r\n"),
        (b"\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",),
        (b"POST /v1/search HTTP/1.1\r\n" + HOST + b"Content-Type: image/jpeg\r\nTransfer-Encoding: chunked\r\n\r\n",
         b"0\r\n\n"),
    ],
)  # fmt: skip
def test_lines_that_end_with_lf_alone_are_refused(client: httpx.Client, pieces: tuple[bytes, ...]) -> None:
    assert refused(exchange(client, *pieces), 400) == "A line of the head does not end with CRLF."


def test_line_ends_that_arrive_in_pieces_are_accepted(client: httpx.Client) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(client, *(head[place : place + 1] for place in range(len(head))))
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_body_may_contain_any_line_end(client: httpx.Client) -> None:
    body = b'{"item_id":\n"ball-blue"}'
    head = b"POST /v1/search HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\nConnection: close\r\n"
    answer = exchange(client, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    answer = exchange(client, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200"), answer


@pytest.mark.parametrize("piece", [1_000, 1_000_000])
@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("shape", ["header", "path", "headers"])
def test_a_large_head_is_refused_however_it_arrives(
    client: httpx.Client, piece: int, is_complete: bool, shape: str
) -> None:
    long = b"x" * 70_000
    head = {
        "header": b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + long,
        "path": b"GET /healthz?" + long + b" HTTP/1.1\r\n" + HOST[:-2],
        "headers": b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n".join(b"X%d: y" % number for number in range(10_000)),
    }[shape]
    head += b"\r\n\r\n" * is_complete
    detail = refused(exchange(client, *(head[at : at + piece] for at in range(0, len(head), piece))), 431)
    assert detail == "The head has more than 65,536 bytes."


def test_a_head_just_below_the_limit_is_answered_in_one_piece_and_in_many(client: httpx.Client) -> None:
    start = b"GET /healthz HTTP/1.1\r\nConnection: close\r\n" + HOST + b"X: "
    head = start + b"x" * (65_536 - len(start) - 4) + b"\r\n\r\n"
    assert exchange(client, head).startswith(b"HTTP/1.1 200")
    assert exchange(client, head[:30_000], head[30_000:65_000], head[65_000:]).startswith(b"HTTP/1.1 200")


def test_the_next_head_on_a_connection_is_checked_too(client: httpx.Client) -> None:
    answer = exchange(client, NEXT + b"GET /healthz HTTP/1.1\nHost: localhost\n\n")
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200") and second.startswith(b"400")


def test_a_bad_chunk_is_refused_once_and_ends_its_request(client: httpx.Client) -> None:
    head = b"POST /v1/search HTTP/1.1\r\n" + HOST + b"Content-Type: image/jpeg\r\nTransfer-Encoding: chunked\r\n\r\n"
    refused(exchange(client, head + b"3\r\nabc\r\n", b"nothing\r\n" + b"x" * 100_000), 400)


def test_an_upgrade_to_a_web_socket_is_ignored(client: httpx.Client) -> None:
    upgrade = b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13\r\n"
    with connect(client) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST + upgrade + b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
