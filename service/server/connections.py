"""Counts the connections of one process, and chooses which one is closed when there are too many."""

import resource
from collections import Counter
from typing import NamedTuple, Protocol

from service.settings import Settings

BACKLOG = 64
"""Connections that are accepted at once; those that exceed the limit are closed only afterwards."""
_OTHER_FILES = 64 + BACKLOG
"""Open files of a process that are reserved for the gallery, jobs and fetched photos."""


class ConnectionLimits(NamedTuple):
    """Limits of the connections of one process."""

    max_connections: int
    max_per_client: int
    head_seconds: float
    """Time to send the head of a request; the limits of bodies begin after it."""
    write_seconds: float = 15.0
    """Interval in which a client that receives a large response must read some of it."""
    close_seconds: float = 0.5
    """Time that idle connections get after the port has closed: their next request may be on its way."""

    @classmethod
    def from_settings(cls, settings: Settings) -> "ConnectionLimits":
        limit = settings.max_connections or max_connections()
        per_client = settings.max_client_connections or max(1, limit // 2)
        return cls(limit, per_client, settings.head_seconds, settings.write_seconds)


def max_connections() -> int:
    """Returns how many connections the limit of open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, files - _OTHER_FILES)


class Closable(Protocol):
    """A connection of the table."""

    def abort(self) -> None: ...


class ConnectionTable:
    """The open connections, and those among them that no request is being answered on.

    A connection that exceeds a limit takes the place of one that has not sent a complete head, the oldest first: a
    client that connects and sends nothing must not keep others out. Next are those between two requests.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._clients: dict[Closable, str] = {}
        self._counts: Counter[str] = Counter()
        self._new: dict[Closable, None] = {}
        self._waiting: dict[Closable, None] = {}

    def add(self, connection: Closable, client: str) -> None:
        """Adds a connection of the client's address, and aborts one when there are too many."""
        self._clients[connection] = client
        self._counts[client] += 1
        if self._counts[client] > self.limits.max_per_client:
            self._drop(self._oldest_idle(client) or connection)
        elif len(self._clients) > self.limits.max_connections:
            self._drop(self._oldest_idle() or connection)
        if connection in self._clients:
            self._new[connection] = None

    def mark_working(self, connection: Closable) -> None:
        """Records that a request has arrived: its connection is not closed for others."""
        self._new.pop(connection, None)
        self._waiting.pop(connection, None)

    def mark_waiting(self, connection: Closable) -> None:
        """Records that a request was answered."""
        if connection in self._clients:
            self._waiting[connection] = None

    def remove(self, connection: Closable) -> None:
        """Forgets a connection that was closed."""
        client = self._clients.pop(connection, None)
        if client is None:
            return
        self.mark_working(connection)
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]

    def _oldest_idle(self, client: str | None = None) -> Closable | None:
        idle = (one for group in (self._new, self._waiting) for one in group)
        return next((one for one in idle if client in (None, self._clients[one])), None)

    def _drop(self, connection: Closable) -> None:
        self.remove(connection)  # now, although the connection is lost only later
        connection.abort()
