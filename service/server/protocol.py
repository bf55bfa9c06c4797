"""A client's connection: bounded in number and in the time that it may stand still, and not cut off while it asks."""

import asyncio
import resource
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_SECONDS = 15
"""Given to a connection to send the head of a request; the limits of bodies begin after it."""
_LAST_SECONDS = 0.5
"""Given to idle connections after the port has closed: their next request may be on its way."""
BACKLOG = 64
"""Connections that are accepted at one go; those that are too many among them are closed only afterwards."""
_OTHER_FILES = 64 + BACKLOG
"""Of those that the process may open; kept for the gallery, jobs and fetched photos."""


class Connection(H11Protocol):
    """Uvicorn's, which waits for a head for ever and takes connections until the process can open no file."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _most_connections():
            transport.abort()
        self._late = self.loop.call_later(_HEAD_SECONDS, self._end)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_idle and self._late:
            self._late.cancel()
            self._late = None
        elif self._is_idle and not self._late:  # a part of the next head
            self._late = self.loop.call_later(_HEAD_SECONDS, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late:
            self._late.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._is_idle:
            self.loop.call_later(_LAST_SECONDS, self._end)
        else:
            super().shutdown()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _end(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()


def _most_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, files - _OTHER_FILES)


class Server(uvicorn.Server):
    """Uvicorn's, which resets the connections that nobody has accepted yet when it closes its port."""

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        last = [connection for listener in sockets or () for connection in _waiting(listener)]
        for server in self.servers:
            server.close()
        for connection in last:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        await super().shutdown(list(sockets or ()))

    def _protocol(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """Accepts those who have connected."""
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        yield connection
