"""Logging: text lines, or one JSON object per line, each with the id of the request that it belongs to."""

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from service.settings import Settings

current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered; threads that work for it see it too."""

_requests = logging.getLogger("service.requests")
_PROBES = {"/healthz", "/readyz", "/metrics"}
"""Called every few seconds by machines: logged at level debug, unless they fail."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def log_request(method: str, route: str, status: int, seconds: float, key: str | None, client: str) -> None:
    """Logs the one line of a request, which never contains a token or anything of a body."""
    milliseconds = round(seconds * 1000, 1)
    level = logging.DEBUG if route in _PROBES and status < 400 else logging.INFO
    _requests.log(
        level,
        "%s %s %d in %.1f ms, key %s, from %s",
        method, route, status, milliseconds, key or "none", client,
        extra={
            "fields": {
                "method": method, "route": route, "status": status, "milliseconds": milliseconds,
                "key": key, "client": client,
            }
        },
    )  # fmt: skip


class TextFormatter(logging.Formatter):
    """Formats a text line; control characters are escaped, so that a client cannot forge another line."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f" [{request_id}]" if (request_id := current_request_id.get()) else ""
        message = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], record.getMessage())
        line = f"{_time(record)} {record.levelname:<7} {record.name}{prefix}: {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formats a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(settings: Settings) -> None:
    """Sends the records of every logger, including the server's, to standard error in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.captureWarnings(True)  # they would otherwise be printed in another format
    for name in ("service", "index", "uvicorn"):
        logging.getLogger(name).setLevel(settings.log_level.upper())
