"""Connections of clients: limited in number and in idle time, and not cut off during a request.

The two classes extend uvicorn's, which has no setting for either. They rely on attributes of uvicorn that are not
documented, so pyproject.toml bounds its version; `tests/service/server/test_protocol.py` checks a newer one.
"""

import asyncio
import resource
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.settings import Settings

BACKLOG = 64
"""Connections that are accepted at once; those that exceed the limit are closed only afterwards."""
_MIN_READ_RATE = 10_000
"""Bytes per second that a client must read of a response that does not fit into the socket's buffer."""
_OTHER_FILES = 64 + BACKLOG
"""Open files of a process that are reserved for the gallery, jobs and fetched photos."""


class ConnectionLimits(NamedTuple):
    """Limits of the connections of one process."""

    max_connections: int
    head_seconds: float
    """Time to send the head of a request; the limits of bodies begin after it."""
    write_seconds: float = 15.0
    """Interval in which a client that receives a large response must read some of it."""
    close_seconds: float = 0.5
    """Time that idle connections get after the port has closed: their next request may be on its way."""

    @classmethod
    def from_settings(cls, settings: Settings) -> "ConnectionLimits":
        return cls(settings.max_connections or max_connections(), settings.head_seconds, settings.write_seconds)


def max_connections() -> int:
    """Returns how many connections the limit of open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, files - _OTHER_FILES)


def connection_class(settings: Settings) -> type[asyncio.Protocol]:
    """Returns what uvicorn's setting `http` needs: a factory of connections with the limits of the settings."""
    return cast(type[asyncio.Protocol], partial(Connection, limits=ConnectionLimits.from_settings(settings)))


class Connection(H11Protocol):
    """A connection that is closed when the head of a request does not arrive in time."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_idle:
            self._cancel_timer()
        elif not self._timer:  # a part of the next head
            self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def _watch_reader(self, size: int) -> None:
        """Looks again later whether the client has read enough of the response: until then it occupies memory."""
        self._write_timer = self.loop.call_later(self._limits.write_seconds, self._check_reader, size)

    def _check_reader(self, before: int) -> None:
        size = self.transport.get_write_buffer_size()
        if before - size < _MIN_READ_RATE * self._limits.write_seconds:
            self.transport.abort()
        else:
            self._watch_reader(size)

    def _cancel_write_timer(self) -> None:
        if self._write_timer:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._is_idle:
            self.loop.call_later(self._limits.close_seconds, self._close)
        else:
            super().shutdown()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_seconds, self._close)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()


class Server(uvicorn.Server):
    """A server that accepts the clients who have connected before it closes its port; uvicorn's resets them."""

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        pending = [connection for listener in sockets or () for connection in _accept_pending(listener)]
        for server in self.servers:
            server.close()
        for connection in pending:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_connection, connection)
        await super().shutdown(list(sockets or ()))

    def _make_connection(self) -> asyncio.Protocol:
        factory = cast(Any, self.config.http_protocol_class)
        return cast(asyncio.Protocol, factory(self.config, self.server_state, self.lifespan.state))


def _accept_pending(listener: socket.socket) -> Iterator[socket.socket]:
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        yield connection
