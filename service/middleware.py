"""Applies to every request: an id, security headers, a bounded body, an answer even after a failure, a log line."""

import asyncio
import logging
import re
import sys
import uuid
from time import perf_counter

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from index.errors import LookalikeError
from service.admission import Admission
from service.memory import BODY_FACTOR, ESCAPED_JSON_FACTOR, JSON_FACTOR
from service.observability.logging import current_request_id, log_request
from service.observability.metrics import Telemetry
from service.problems import BODY_TIMEOUT, BODY_TOO_LARGE, HOST_NOT_ALLOWED, INTERNAL, ProblemError, problem_response
from service.requests import ClientLeft
from service.settings import Settings

log = logging.getLogger(__name__)

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Answers change with the gallery and the page with a release: cached, but revalidated each time.
    "Cache-Control": "no-cache",
}
_CLIENT_LEFT = 499
"""The status recorded, by convention, when the client left before it got an answer."""
_PIECE_BYTES = 64 * 1024
"""Size of the pieces that an answer is sent in."""
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class StartErrors:
    """Logs an error that the user can fix in one line when the application cannot start.

    Starlette would log each error with its traceback.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_short(message: Message) -> None:
            error = sys.exception()
            if message["type"] == "lifespan.startup.failed" and isinstance(error, LookalikeError):
                message = {**message, "message": str(error)}
            await send(message)

        await self._app(scope, receive, send_short if scope["type"] == "lifespan" else send)


class RequestContext:
    """Gives each request an id, adds the security headers, turns unhandled errors into problems, and logs the outcome.

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
        requested = Headers(scope=scope).get("x-request-id", "")
        request_id = requested if _SAFE_ID.fullmatch(requested) else uuid.uuid4().hex[:16]
        scope.setdefault("state", {})["request_id"] = request_id
        current_request_id.set(request_id)
        started, root, method = perf_counter(), scope.get("root_path", ""), scope["method"]
        if method == "HEAD":  # works wherever GET does
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        status = 500  # recorded when sending the answer fails midway
        try:
            status = await self._respond(scope, receive, send, request_id)
        finally:
            route, seconds = _route_template(scope, root), perf_counter() - started
            self._telemetry.request(method, route, status, seconds)
            client = scope["client"][0] if scope.get("client") else "unknown"
            log_request(method, route, status, seconds, scope["state"].get("key_id"), client)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> int:
        """Answers the request and returns the status."""
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
        if state is not None and not state.allows_host(host):
            detail = f"Without API keys only requests to this machine are served, not to {host[:80]!r}."
            problem = HOST_NOT_ALLOWED.problem(detail, HOST_NOT_ALLOWED.remedy, request_id)
            await problem_response(problem)(scope, receive, send_with_headers)
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
            await problem_response(problem)(scope, receive, send_with_headers)
        return status or _CLIENT_LEFT


def _without_body(send: Send) -> Send:
    """Sends the head of an answer only; the server then reports a disconnect, which ends a stream."""
    is_complete = False

    async def send_head(message: Message) -> None:
        nonlocal is_complete
        if message["type"] == "http.response.start":
            await send(message)
        elif not is_complete:
            is_complete = True
            await send({"type": "http.response.body"})

    return send_head


def _route_template(scope: Scope, root: str) -> str:
    """Returns the declared path of the route: unlike addresses, there is a bounded number of them."""
    mounted = scope.get("root_path", "").removeprefix(root)
    return getattr(scope.get("route"), "path", mounted or "none")


class BodyLimit:
    """Limits the size and the arrival time of bodies, and the memory that all of them take until they are answered.

    Parsing a form limits neither the size of files nor their sum, and nothing else limits the time.
    """

    def __init__(self, app: ASGIApp, settings: Settings, admission: Admission) -> None:
        self._app = app
        self._settings = settings
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings = self._settings
        headers = Headers(scope=scope)
        declared = int(headers.get("content-length", "0"))
        factor = JSON_FACTOR if "json" in headers.get("content-type", "").lower() else BODY_FACTOR
        received, is_complete, deadline = 0, False, anyio.current_time() + settings.body_seconds

        async def receive_limited() -> Message:
            nonlocal received, is_complete, factor
            if declared > settings.max_body_bytes:
                raise self._too_large()
            timeout = None if is_complete else min(settings.chunk_seconds, deadline - anyio.current_time())
            try:
                with anyio.fail_after(timeout):
                    message = await receive()
            except TimeoutError:
                detail = f"Timed out after {received:,} bytes of the request body."
                raise ProblemError(BODY_TIMEOUT, detail, headers={"Connection": "close"}) from None
            body = message.get("body", b"")
            received += len(body)
            if factor == JSON_FACTOR and (b"\\" in body or not body.isascii()):
                factor = ESCAPED_JSON_FACTOR
            held.resize(factor * received)
            is_complete = not message.get("more_body", False)
            if received > settings.max_body_bytes:
                raise self._too_large()
            return message

        with self._admission.received.hold() as held:
            await self._app(scope, receive_limited, send)

    def _too_large(self) -> ProblemError:
        limit = self._settings.max_body_bytes
        return ProblemError(BODY_TOO_LARGE, f"The request body has more than {limit:,} bytes.")


class AnswerLimit:
    """Counts each answer until the client has read it, and hands it to the server in pieces.

    The server takes a piece when the client has read the one before, so what is not read stays here and is counted.
    Routes with large answers count them with `scope["state"]["answer"]` before, while they are made, and are refused
    when there is no memory for them.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if message["type"] == "http.response.body":
                # What the answer was made of is gone by now. Its head is sent already, so it cannot be refused.
                held.resize(len(body), forced=True)
            if len(body) <= _PIECE_BYTES:
                await send(message)
                return
            for start in range(0, len(body), _PIECE_BYTES):
                await send({**message, "body": body[start : start + _PIECE_BYTES], "more_body": True})
                await asyncio.sleep(0)  # for other requests, and to notice that the client left
            await send({**message, "body": b""})

        with self._admission.answers.hold() as held:
            scope.setdefault("state", {})["answer"] = held
            await self._app(scope, receive, send_in_pieces)
