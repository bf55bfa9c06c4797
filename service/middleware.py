"""What holds for every request: an id, safe headers, a bounded body, an answer even when we fail, a line in the log."""

import logging
import re
import uuid
from time import perf_counter

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.observability.logging import log_request
from service.observability.logging import request_id as request_in_work
from service.observability.metrics import Telemetry
from service.problems import BODY_TOO_LARGE, BODY_TOO_SLOW, HOST_UNKNOWN, INTERNAL, OVERLOADED, ProblemError, answer
from service.search_pipeline import ClientLeft

log = logging.getLogger(__name__)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Answers change with the gallery and the page with a release: kept, but asked about each time.
    "Cache-Control": "no-cache",
}
_CLIENT_LEFT = 499
"""The status that is noted, by custom, for a request that nobody waited for."""
_PIECE_SECONDS = 15
"""Given to each piece of a body to arrive."""
_BODY_SECONDS = 60
"""Given to the whole of it: while it arrives, it may hold what others wait for."""
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestContext:
    """Names each request, sends the safe headers, turns what nobody caught into a problem, and notes how it went.

    It answers unexpected errors itself because Starlette's own handler for them lies outside all
    middleware: its answer would carry neither the id nor the headers.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SAFE_ID.fullmatch(asked) else uuid.uuid4().hex[:16]
        scope.setdefault("state", {})["request_id"] = request_id
        request_in_work.set(request_id)
        begun, root = perf_counter(), scope.get("root_path", "")
        status = 500  # unless it is told otherwise: the answer broke off midway
        try:
            status = await self._answered(scope, receive, send, request_id)
        finally:
            method, route, seconds = scope["method"], _template(scope, root), perf_counter() - begun
            self._telemetry.request(method, route, status, seconds)
            client = scope["client"][0] if scope.get("client") else "unknown"
            log_request(method, route, status, seconds, scope["state"].get("key_id"), client)

    async def _answered(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> int:
        """Has the request answered, and tells with which status."""
        state = scope["state"].get("service")
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if state is not None and state.shutting_down:
                    headers["Connection"] = "close"
            await send(message)

        host = Headers(scope=scope).get("host", "")
        if state is not None and not state.answers_to(host):
            told = f"Without API keys the service answers to this machine's names only, not to {host[:80]!r}."
            problem = HOST_UNKNOWN.problem(told, HOST_UNKNOWN.remedy, request_id)
            await answer(problem)(scope, receive, send_with_headers)
            return status
        try:
            await self._app(scope, receive, send_with_headers)
        except (ClientDisconnect, ClientLeft):
            log.info("request %s: the client left before it was answered", request_id)
            return _CLIENT_LEFT
        except Exception:
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if status:
                raise
            problem = INTERNAL.problem(INTERNAL.detail, INTERNAL.remedy, request_id)
            await answer(problem)(scope, receive, send_with_headers)
        return status or _CLIENT_LEFT


def _template(scope: Scope, root: str) -> str:
    """The route of a request as it was declared: the only form of an address whose number is bounded."""
    mounted = scope.get("root_path", "").removeprefix(root)
    return getattr(scope.get("route"), "path", mounted or "none")


class BodyLimit:
    """Refuses a body while it arrives: form parsing limits neither files nor their sum, and nothing limits the time.

    All bodies together may hold `max_held` bytes until they are answered. Many may arrive slowly, but few large ones
    at once.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_held: int, telemetry: Telemetry) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held = max_held
        self._held = 0
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = int(Headers(scope=scope).get("content-length", "0"))
        received, whole, end = 0, False, anyio.current_time() + _BODY_SECONDS

        async def limited() -> Message:
            nonlocal received, whole
            if declared > self._max_bytes:
                raise self._too_large()
            try:
                with anyio.fail_after(None if whole else min(_PIECE_SECONDS, end - anyio.current_time())):
                    message = await receive()
            except TimeoutError:
                told = f"{received:,} bytes of the request came in time, and no end."
                raise ProblemError(BODY_TOO_SLOW, told, headers={"Connection": "close"}) from None
            piece = len(message.get("body", b""))
            received += piece
            self._held += piece
            whole = not message.get("more_body", False)
            if received > self._max_bytes:
                raise self._too_large()
            if self._held > self._max_held:
                self._telemetry.refused("requests")
                told = f"The requests that are in work already have {self._held - received:,} bytes."
                raise ProblemError(OVERLOADED, told, retry_after=1, headers={"Connection": "close"})
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= received

    def _too_large(self) -> ProblemError:
        return ProblemError(BODY_TOO_LARGE, f"The request has more than {self._max_bytes:,} bytes.")
