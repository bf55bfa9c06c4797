"""Connections to PostgreSQL: how they are opened and kept, and what their errors mean."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Literal, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.types.string import (
    StrBinaryDumper,
    StrDumper,
    StrDumperUnknown,
    TextBinaryLoader,
    TextLoader,
)
from pydantic import Field

from index._util.models import Frozen
from index.errors import LookalikeError
from index.gallery.errors import RESTORE, StorageFull, StoreBusy, StoreError, StoreReadOnly, StoreUnavailable

Result = TypeVar("Result")
_Action = Literal["read", "written"]
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
DEFAULT_SCHEMA = "lookalike"


class PostgresSettings(Frozen):
    """Time limits of the connections."""

    connect_seconds: int = Field(default=5, description="for each host of the address")
    read_seconds: float = Field(default=30, description="for a read that is not streamed")
    news_seconds: float = Field(default=2, description="for asking whether there is news, before each search")
    lock_seconds: float = Field(default=30, description="for another writer to end")
    idle_seconds: float = Field(default=60, description="that a writer may pause within a transaction")
    retry_seconds: float = Field(default=1, description="between attempts to connect to a server that is gone")
    resolve_seconds: float = Field(default=30, description="for finding out whether a write was kept")
    claim_seconds: float = Field(
        default=60, description="for a job's process to claim it, after its begin or after a start of the server"
    )
    max_connections: int = Field(default=8, description="for reads of one process, besides two for news and writes")


class Server:
    """The schema of a gallery in a database, and how to connect to it."""

    def __init__(self, address: str, settings: PostgresSettings | None = None) -> None:
        self.settings = settings or PostgresSettings()
        self._conninfo, self.schema = _split(address)
        parts = conninfo_to_dict(self._conninfo)
        self.place = "/".join(str(parts.get(name) or "") for name in ("host", "port", "dbname")) + f"/{self.schema}"
        """Names where the gallery is, without secrets."""
        self._error: StoreError | None = None
        """Why the last attempt to connect failed."""
        self._retry_at = 0.0
        self._trying = threading.RLock()

    def connect(self, *, seconds: float, options: str = "") -> "Connection":
        """Opens a connection whose statements may take some time each, 0 for any.

        While the server is gone, one thread at a time tries to connect, and others fail at once with its error.
        """
        error = self._error
        if error is None:
            return self._connect(seconds, options)
        with self.alone_while_gone():
            if monotonic() < self._retry_at:
                raise type(error)(error.problem, error.remedy)
            return self._connect(seconds, options)

    @contextmanager
    def alone_while_gone(self) -> Iterator[None]:
        """Lets one thread at a time try while the server is gone; others fail at once instead of waiting for it."""
        error = self._error
        if error is None:
            yield
            return
        if not self._trying.acquire(blocking=False):
            raise type(error)(error.problem, error.remedy)
        try:
            yield
        finally:
            self._trying.release()

    def _connect(self, seconds: float, options: str) -> "Connection":
        wanted = {
            "search_path": self.schema,
            "statement_timeout": int(seconds * 1000),
            "lock_timeout": int(self.settings.lock_seconds * 1000),
            "idle_in_transaction_session_timeout": int(self.settings.idle_seconds * 1000),
            "client_min_messages": "warning",
        }
        switches = " ".join(f"-c {name}={value}" for name, value in wanted.items())
        given = conninfo_to_dict(self._conninfo)
        patience = self.settings.connect_seconds
        values: dict[str, Any] = {
            "connect_timeout": min(patience, max(2, int(seconds))) if seconds else patience,
            "application_name": "lookalike",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
            **given,
            "options": f"{given.get('options') or ''} {switches} {options}".strip(),
        }
        try:
            connection = Connection.connect(make_conninfo("", **values), autocommit=True)
        except psycopg.Error as error:
            failure = _connect_error(error)
            self._error, self._retry_at = failure, monotonic() + self.settings.retry_seconds
            raise failure from error
        self._error = None
        connection.seconds = seconds
        _register_text(connection)
        return connection


def _split(address: str) -> tuple[str, str]:
    """Returns the address as libpq accepts it, and the schema."""
    base, mark, query = address.partition("?")
    parts = query.split("&") if query else []
    schemas = [part.removeprefix("schema=") for part in parts if part.startswith("schema=")]
    schema = schemas[-1] if schemas else DEFAULT_SCHEMA
    if not _SCHEMA.fullmatch(schema):
        raise LookalikeError(
            f"The schema {schema[:80]!r} is not a valid name.", "Use small letters, digits and underscores."
        )
    others = "&".join(part for part in parts if not part.startswith("schema="))
    conninfo = base + (mark + others if others else "")
    try:
        conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise LookalikeError(f"The address of the database is invalid: {_reason(error)}.", "Correct it.") from None
    return conninfo, schema


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that gives up on a server which has stopped to respond, although its host is up."""

    seconds: float = 0
    """Time that the server allows a statement, 0 for any."""

    def wait(self, gen: PQGen[Result], interval: float = 0.1, timeout: float | None = None) -> Result:
        if timeout is None and self.seconds:
            timeout = self.seconds + 1  # the server's own limit first, if it still works
        try:
            return super().wait(gen, interval, timeout)
        except psycopg.errors._WaitTimeout as error:
            self.pgconn.finish()
            raise psycopg.OperationalError("the server has not responded in time") from error

    @property
    def is_lost(self) -> bool:
        return self.closed or self.pgconn.transaction_status == TransactionStatus.UNKNOWN

    @property
    def is_idle(self) -> bool:
        """Whether no transaction is open."""
        return not self.is_lost and self.pgconn.transaction_status == TransactionStatus.IDLE


class Connections:
    """The idle connections of one kind; threads borrow them."""

    def __init__(self, server: Server, *, limit: int, seconds: float, options: str = "") -> None:
        self._server = server
        self._seconds = seconds
        self._options = options
        self._limit = limit
        self._slots = threading.BoundedSemaphore(limit)
        self._idle: list[Connection] = []

    @contextmanager
    def borrow(self, *, fresh: bool = False) -> Iterator[Connection]:
        """Lends a connection, an idle one unless it has to be `fresh`."""
        if not self._slots.acquire(timeout=self._server.settings.lock_seconds):
            raise StoreBusy(
                f"All {self._limit} connections to PostgreSQL are busy.", "Try again, or send fewer requests at once."
            )
        try:
            if fresh:
                self.close()
            connection = self._take()
            try:
                yield connection
            finally:
                self._give_back(connection)
        finally:
            self._slots.release()

    def _take(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._server.connect(seconds=self._seconds, options=self._options)

    def _give_back(self, connection: Connection) -> None:
        if connection.is_idle:
            self._idle.append(connection)
        else:
            connection.close()  # which rolls back

    def run(self, task: Callable[[Connection], Result]) -> Result:
        """Runs a read; repeats it on a new connection if an idle one was closed by the server."""
        for fresh in (False, True):
            with self.borrow(fresh=fresh) as connection:
                try:
                    with store_errors("read"):
                        return task(connection)
                except StoreUnavailable:
                    if fresh or not connection.is_lost:
                        raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()


# Errors


@contextmanager
def store_errors(action: _Action = "written") -> Iterator[None]:
    """Raises what PostgreSQL reports as an error of the store."""
    try:
        yield
    except _OUR_MISTAKES:
        raise
    except psycopg.Error as error:
        raise _store_error(error, action) from error


_OUR_MISTAKES = (
    psycopg.errors.SyntaxError,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.DatatypeMismatch,
    psycopg.errors.AmbiguousColumn,
)
_GONE = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "53300")
"""SQLSTATE of a connection that was lost or refused, and of a server that starts, stops or has no connection left."""
_BUSY = ("55P03", "40P01", "40001")


def _reason(error: Exception) -> str:
    """Returns the first line that says why; the text of libpq may have several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _store_error(error: psycopg.Error, action: _Action) -> StoreError:
    state = error.sqlstate or ""
    what = "The gallery cannot be read" if action == "read" else "Nothing was written"
    problem = f"{what}: PostgreSQL reports: {_reason(error)}."
    if state in ("53100", "53200"):
        return StorageFull(problem, "Free space on the disk of PostgreSQL, and try again.")
    if state == "25006":
        return StoreReadOnly(problem, "Use the address of the primary server, and try again.")
    if state == "42501":
        return StoreReadOnly(problem, "Grant the user of the address the rights on the gallery's schema.")
    if state.startswith(_BUSY):
        return StoreBusy(problem, "Wait until the other writer has ended, and try again.")
    if state == "57014":
        return StoreUnavailable(problem, "Try again; look at the load of PostgreSQL if it happens often.")
    if state.startswith(_GONE) or (not state and isinstance(error, psycopg.OperationalError)):
        return StoreUnavailable(problem, "Try again when PostgreSQL can be reached.")
    if state in ("42P01", "3F000"):
        return StoreError(problem, f"The gallery's tables were removed. {RESTORE}")
    return StoreError(problem, "Look into the log of PostgreSQL; if its data is damaged, restore a backup.")


def _connect_error(error: psycopg.Error) -> StoreError:
    """Returns why there is no connection; here libpq passes on no SQLSTATE."""
    text = str(error)
    # Without the host: the service shows the problem to whoever searches.
    reason = re.sub(r"^(connection failed: )?connection to server .*? failed: ", "", _reason(error))
    problem = f"PostgreSQL cannot be reached: {reason}."
    if "password authentication failed" in text or "no password supplied" in text or "pg_hba.conf" in text:
        return StoreError(problem, "Check the user and the password: in the address, PGPASSWORD or ~/.pgpass.")
    if re.search(r'database ".*" does not exist', text):
        return StoreError(problem, "Create the database: createdb NAME; or correct the address.")
    if re.search(r'role ".*" does not exist', text):
        return StoreError(problem, "Create the user: createuser NAME; or correct the address.")
    return StoreUnavailable(problem, "Start it, or correct the address.")


# Texts: PostgreSQL stores no NUL characters, which ids, titles and links may have

_ESCAPE = "\x01"


def _escape(text: str) -> str:
    """Replaces NUL characters; keeps the order of texts by code point."""
    if "\0" in text or _ESCAPE in text:
        return text.replace(_ESCAPE, "\x01\x02").replace("\0", "\x01\x01")
    return text


def _unescape(text: str) -> str:
    return text.replace("\x01\x01", "\0").replace("\x01\x02", _ESCAPE) if _ESCAPE in text else text


class _BinaryDumper(StrBinaryDumper):
    def dump(self, obj: str) -> Any:
        return super().dump(_escape(obj))


class _TextDumper(StrDumper):
    def dump(self, obj: str) -> Any:
        return super().dump(_escape(obj))


class _UnknownDumper(StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        return super().dump(_escape(obj))


class _TextLoader(TextLoader):
    def load(self, data: Any) -> str | bytes:
        text = super().load(data)
        return _unescape(text) if isinstance(text, str) else text


class _BinaryLoader(TextBinaryLoader):
    def load(self, data: Any) -> str | bytes:
        text = super().load(data)
        return _unescape(text) if isinstance(text, str) else text


def _register_text(connection: Connection) -> None:
    for dumper in (_BinaryDumper, _TextDumper, _UnknownDumper):
        connection.adapters.register_dumper(str, dumper)
    for loader in (_TextLoader, _BinaryLoader):
        connection.adapters.register_loader("text", loader)
