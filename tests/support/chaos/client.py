"""A small HTTP client: cheap enough to generate load, and close enough to the socket to misbehave."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
TIMEOUT = 60.0
"""Seconds without an answer after which a request counts as lost, on the busiest machine."""


class ConnectionBroken(Exception):
    """The connection ended, or the time was over, before the answer was complete."""


class Response(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def encode_request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of a request; made once, it can be sent many times."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection:
    """A keep-alive connection to a port of this machine, opened by the first request."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.revision = 0
        """The newest revision that an answer on this connection had."""
        self.answers = 0
        self._streams: Streams | None = None

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent; the service closes connections that are idle for some seconds."""
        return self._streams is None or not self._streams[0].at_eof()

    async def send(self, request: bytes, *, timeout: float = TIMEOUT) -> Response:
        """Sends an encoded request and returns its answer, or raises ConnectionBroken."""
        try:
            async with asyncio.timeout(timeout):
                if self._streams is None:
                    self._streams = await asyncio.open_connection("127.0.0.1", self.port)
                self._streams[1].write(request)
                response = await read_response(self._streams[0])
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            self.close()
            raise ConnectionBroken(f"{type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            self.close()
            raise
        self.answers += 1
        if response.headers.get("connection") == "close":
            self.close()
        return response

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()
        self._streams = None


async def read_response(reader: asyncio.StreamReader) -> Response:
    """Reads an answer whose length is declared."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
    status = int(head[0].split(" ", 2)[1])
    body = await reader.readexactly(int(headers.get("content-length", "0"))) if status not in (204, 304) else b""
    return Response(status, headers, body)


async def abandon(streams: Streams, *, reset: bool = False) -> None:
    """Ends a connection without waiting for what was asked on it; `reset` drops what is still on its way."""
    writer = streams[1]
    if reset:
        writer.transport.abort()
        return
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
