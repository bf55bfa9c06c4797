"""Connections of clients: limited in number and in idle time, and not cut off during a request.

The classes extend uvicorn's, which has no setting for either. They rely on attributes of uvicorn that are not
documented, so pyproject.toml bounds its version; `tests/service/server/test_protocol.py` checks a newer one.
"""

import asyncio
import socket
import struct
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextvars import Context
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.problems import HEAD_TOO_LARGE, MALFORMED, problem_response
from service.server.connections import ConnectionLimits, ConnectionTable
from service.server.heads import MAX_HEAD_BYTES, StrictBuffer
from service.settings import Settings

_MIN_READ_RATE = 10_000
"""Bytes per second that a client must read of a response that does not fit into the socket's buffer."""
_UNSENT_BYTES = 64 * 1024
"""Bytes of a response in the socket's buffer that were not sent yet; the system's default is some megabytes."""


def connection_class(settings: Settings) -> type[asyncio.Protocol]:
    """Returns what uvicorn's setting `http` needs: a factory of connections with the limits of the settings."""
    table = ConnectionTable(ConnectionLimits.from_settings(settings))
    return cast(type[asyncio.Protocol], partial(Connection, table=table))


class Connection(H11Protocol):
    """A connection that is closed when the head of a request does not arrive in time, or others need its place."""

    def __init__(self, *args: Any, table: ConnectionTable, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self.conn._receive_buffer = StrictBuffer()
        self._table = table
        self._limits = table.limits
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A response is counted until the system has all of it, so the buffer in between must not look empty before.
        transport.set_write_buffer_limits(0)
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._table.add(self, self.client[0] if self.client else "")
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        # In a context of its own: the one that asyncio calls this in may be of the last request.
        Context().run(super().data_received, data)
        if not self.is_idle:
            self._table.mark_working(self)
            self._cancel_timer()
        elif not self._timer:  # a part of the next head
            self._start_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection of a client that has sent all of its request, and waits for the response."""
        if self.is_idle or self._is_refused or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_idle:  # else the next request had arrived before
            self._table.mark_waiting(self)

    def _should_upgrade(self) -> bool:
        """Refuses to become a web socket, which none of the limits would apply to."""
        return False

    def send_400_response(self, msg: str) -> None:
        """Answers what is not a valid request, and closes the connection once the client has had time to read that."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        type_, request_id = HEAD_TOO_LARGE if hint == HEAD_TOO_LARGE.status else MALFORMED, uuid.uuid4().hex[:16]
        problem = type_.problem(str(error or msg), type_.remedy, request_id)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a response has begun
            self.transport.abort()
            return
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        response = problem_response(problem, {"Connection": "close", "X-Request-Id": request_id})
        head = h11.Response(status_code=problem.status, headers=response.raw_headers, reason=type_.title.encode())
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closed at once, what the client is still sending would make the system drop the response.
        self._is_refused = True
        self.transport.write_eof()
        self.loop.call_later(self._limits.close_seconds, self.transport.close)

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
            self._reset()
        else:
            self._watch_reader(size)

    def _reset(self) -> None:
        """Closes the connection at once. The system drops what it holds; else it would wait for a slow client too."""
        connected = self.transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _cancel_write_timer(self) -> None:
        if self._write_timer:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.remove(self)
        self._cancel_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.is_idle:
            self.loop.call_later(self._limits.close_seconds, self._close)
        else:
            super().shutdown()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
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
