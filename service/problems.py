"""Converts errors to RFC 9457 problem documents: every answer that is not a success is made here."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from index.embedding.bundle import BundleError
from index.embedding.images import ImageError
from index.errors import LookalikeError
from index.gallery.errors import (
    BundleMismatch,
    ItemMissing,
    JobMissing,
    SearchError,
    StorageFull,
    StoreBusy,
    StoreReadOnly,
    VersionConflict,
)
from index.gallery.filters import FilterError
from service.admission import Overloaded
from service.inference import NotReady
from service.schemas.problem import Problem
from service.url_fetcher import FetchError

MEDIA_TYPE = "application/problem+json"
_MAX_REPORTED = 10
"""Mistakes of one request that are listed."""


@dataclass(frozen=True)
class ProblemType:
    """A kind of problem, with the detail and remedy that the OpenAPI document shows as an example."""

    slug: str
    status: int
    title: str
    detail: str = ""
    remedy: str = ""

    def problem(self, detail: str, remedy: str, request_id: str) -> Problem:
        """Makes the problem document of one request."""
        return Problem(
            type=f"/problems/{self.slug}",
            title=self.title,
            status=self.status,
            detail=detail.encode(errors="replace").decode(),  # JSON may contain lone surrogates
            remedy=remedy,
            request_id=request_id,
        )


_SEND_PHOTO = "Send a form with the file field `image`, or the photo itself with its own type (image/...)."
_SEND_FILE = "Send a complete JPEG, PNG, WebP, AVIF, HEIC, GIF or BMP file."

MALFORMED = ProblemType(
    "request-malformed", 400, "Malformed request", "Missing boundary in multipart.", "Correct the form's encoding."
)
NOT_FOUND = ProblemType(
    "not-found", 404, "Not found", "There is nothing at /v1/serch.", "See /openapi.json for the addresses."
)
METHOD_NOT_ALLOWED = ProblemType(
    "method-not-allowed", 405, "Method not allowed", "/v1/search does not accept GET.", "Use POST."
)
BODY_TIMEOUT = ProblemType(
    "body-timeout",
    408,
    "Request body timed out",
    "Timed out after 1,000 bytes of the request body.",
    "Send the request again, or send a smaller photo.",
)
HOST_NOT_ALLOWED = ProblemType(
    "host-not-allowed",
    421,
    "Host not allowed",
    "Without API keys only requests to this machine are served, not to 'shop.example.com'.",
    "Use 127.0.0.1 or localhost, create keys (LOOKALIKE_KEYS), or set LOOKALIKE_OPEN=true.",
)
BODY_TOO_LARGE = ProblemType(
    "body-too-large",
    413,
    "Request body too large",
    "The request body has more than 20,971,520 bytes.",
    "Send a smaller file.",
)
BODY_UNSUPPORTED = ProblemType(
    "body-unsupported", 415, "Unsupported Content-Type", "The Content-Type is text/plain.", _SEND_PHOTO
)
INVALID = ProblemType(
    "request-invalid",
    422,
    "Invalid request",
    "top: Input should be less than or equal to 1000 (got 5000).",
    "Correct the value and send the request again.",
)
IMAGE_MISSING = ProblemType("image-missing", 422, "Missing photo", "The form has no file field `image`.", _SEND_PHOTO)
INTERNAL = ProblemType(
    "internal",
    500,
    "Internal error",
    "The service failed to process the request.",
    "Try again; if the problem persists, look up the request id in the service's log.",
)
NOT_READY = ProblemType(
    "not-ready",
    503,
    "Service not ready",
    "The gallery was indexed with another bundle than the service embeds with.",
    "Try again when the operator has served the bundle that indexed the gallery.",
)
ANSWER_TOO_LARGE = ProblemType(
    "answer-too-large",
    422,
    "Answer too large",
    "The answer would have more than 8,388,608 bytes.",
    "Ask for fewer items, and for more by cursor, or leave out attributes and vectors.",
)
STORAGE_FULL = ProblemType(
    "storage-full",
    507,
    "Storage full",
    "Nothing was written to catalogue.sqlite: database or disk is full.",
    "Ask the operator to free space, and send the request again.",
)
READ_ONLY = ProblemType(
    "store-read-only",
    503,
    "Gallery is read-only",
    "Nothing was written to catalogue.sqlite: attempt to write a readonly database.",
    "Ask the operator to make the gallery's folder writable, and send the request again.",
)
OVERLOADED = ProblemType(
    "overloaded",
    503,
    "Service overloaded",
    "64 photos to embed are waiting already.",
    "Send the request again after the time in Retry-After.",
)
BODY_PROBLEMS = (BODY_TOO_LARGE, BODY_TIMEOUT, OVERLOADED)
"""The problems of any request with a body."""
KEY_MISSING = ProblemType(
    "key-missing",
    401,
    "Missing API key",
    "The request has neither Authorization nor X-API-Key.",
    "Send the key as `Authorization: Bearer lk_...`.",
)
KEY_INVALID = ProblemType(
    "key-invalid",
    401,
    "Invalid API key",
    "The key is unknown, expired or revoked.",
    "Ask the operator for a new one.",
)
FORBIDDEN = ProblemType(
    "forbidden", 403, "Missing scope", "The key 'shop' lacks the scope write.", "Use a key with that scope."
)
TOO_MANY_REQUESTS = ProblemType(
    "too-many-requests",
    429,
    "Rate limit exceeded",
    "The limit of this key is 50 requests per second.",
    "Send the request again after the time in Retry-After.",
)
ACCESS_PROBLEMS = (KEY_MISSING, KEY_INVALID, FORBIDDEN, TOO_MANY_REQUESTS)
FILTER_INVALID = ProblemType(
    "filter-invalid",
    422,
    "Invalid filter",
    'filter.price has the unknown operator "under".',
    "Known operators are gte, gt, lte, lt, exists; attributes are not nested.",
)
SEARCH_INVALID = ProblemType(
    "search-invalid",
    422,
    "Invalid search",
    "The cursor belongs to another search.",
    "Send the same query, filter and bounds as for the first page.",
)
ITEM_MISSING = ProblemType("item-missing", 404, "Item not found", "The gallery has no item 'mug-1'.", "Check the id.")
CONFLICT = ProblemType(
    "version-conflict",
    412,
    "Version conflict",
    "Item 'mug-1' was changed since it was read.",
    "Read it again and repeat the change.",
)
JOB_MISSING = ProblemType("job-missing", 404, "Job not found", "The gallery has no job 7.", "List jobs at /v1/jobs.")
JOB_ENDED = ProblemType(
    "job-ended", 409, "Job has ended", "Job 7 is not running: it is done.", "Only a running job can be cancelled."
)
JOB_RUNNING = ProblemType(
    "job-running", 409, "Another job is running", "Job 7 is running.", "Wait until it has ended, or cancel it."
)
BUNDLE_INVALID = ProblemType(
    "bundle-invalid",
    422,
    "Invalid bundle",
    "No bundle at /models/autumn: bundle.json is missing.",
    "Create one with `lookalike export`.",
)
URL_DISABLED = ProblemType(
    "url-disabled", 422, "image_url is disabled", "This service does not fetch photos.", "Send the photo itself."
)
_TOO_MANY_PIXELS = "The image has 9000 x 9000 pixels; the limit is 50,000,000."
IMAGE_PROBLEMS = {
    reason: ProblemType(f"image-{reason.replace('_', '-')}", status, title, detail, remedy)
    for reason, status, title, detail, remedy in (
        ("empty", 422, "Empty photo", "The image is empty (0 bytes).", _SEND_FILE),
        ("unreadable", 422, "Unreadable photo", "The image's header cannot be read.", _SEND_FILE),
        ("truncated", 422, "Truncated photo", "The image is truncated.", _SEND_FILE),
        ("unsupported", 415, "Unsupported photo format", "The bytes are not an image of a known format.", _SEND_FILE),
        ("too_large", 413, "Photo too large", "The image has 31,000,000 bytes.", "Send a smaller file."),
        ("too_many_pixels", 413, "Photo has too many pixels", _TOO_MANY_PIXELS, "Send a smaller picture."),
        ("unreachable", 422, "Photo unreachable", "The image could not be read from its address.", _SEND_FILE),
    )
}
"""By the reason of an ImageError."""
FETCH_PROBLEMS = {
    reason: ProblemType(f"url-{slug}", status, title, detail, "Send the photo itself.")
    for reason, slug, status, title, detail in (
        ("bad_url", "invalid", 422, "Invalid address", "The photo's address must begin with https://."),
        ("host_not_allowed", "host-not-allowed", 422, "Host not allowed", "Photos are not fetched from shop.example."),
        ("host_not_public", "host-not-public", 422, "Host not public", "The host intranet has no public address."),
        ("unreachable", "unreachable", 422, "Host unreachable", "The photo's host could not be reached."),
        ("timeout", "timeout", 422, "Fetching timed out", "The photo did not arrive within 5 seconds."),
        ("too_many_redirects", "too-many-redirects", 422, "Too many redirects", "More than 3 redirects."),
        ("bad_status", "bad-status", 422, "Unexpected status", "The photo's host answered with status 404."),
        ("not_an_image", "not-an-image", 415, "Not an image", "The photo's host sent text/html."),
        ("too_large", "too-large", 413, "Photo too large", "The photo has more than 20,971,520 bytes."),
    )
}
"""By the reason of a FetchError."""
_BY_KIND = {
    BundleMismatch.kind: NOT_READY,
    NotReady.kind: NOT_READY,
    Overloaded.kind: OVERLOADED,
    FilterError.kind: FILTER_INVALID,
    SearchError.kind: SEARCH_INVALID,
    ItemMissing.kind: ITEM_MISSING,
    VersionConflict.kind: CONFLICT,
    JobMissing.kind: JOB_MISSING,
    BundleError.kind: BUNDLE_INVALID,
    StorageFull.kind: STORAGE_FULL,
    StoreBusy.kind: OVERLOADED,
    StoreReadOnly.kind: READ_ONLY,
}
_FORM_REMEDIES = {
    "Too many files": "Send fewer files.",
    "Too many fields": "Send fewer fields.",
    "Part exceeded": "Send a photo as a file, with its name, and shorten the other fields.",
}
_BY_STATUS = {it.status: it for it in (MALFORMED, NOT_FOUND, METHOD_NOT_ALLOWED)}


class ProblemError(HTTPException):
    """A problem of a request. An HTTPException, because FastAPI's own parsing propagates nothing else."""

    def __init__(
        self,
        type: ProblemType,
        detail: str | None = None,
        remedy: str | None = None,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        headers = dict(headers) if retry_after is None else {**headers, "Retry-After": str(retry_after)}
        if type.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(type.status, type.detail if detail is None else detail, headers)
        self.type = type
        self.remedy = type.remedy if remedy is None else remedy


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Makes the response that carries a problem."""
    return JSONResponse(problem.model_dump(), problem.status, headers=headers, media_type=MEDIA_TYPE)


def install_handlers(app: FastAPI) -> None:
    """Makes the app answer known errors with problems; RequestContext answers the unknown ones."""
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(ImageError, _handle_image_error)
    app.add_exception_handler(LookalikeError, _handle_lookalike_error)


def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ProblemError):
        return problem_response(error.type.problem(error.detail, error.remedy, request.state.request_id), error.headers)
    status, path = error.status_code, request.url.path
    type = _BY_STATUS.get(status) or ProblemType(f"http-{status}", status, HTTPStatus(status).phrase)
    detail, remedy = error.detail, type.remedy
    if type is NOT_FOUND:
        detail = f"There is nothing at {path}."
    elif type is METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "GET")
        detail, remedy = f"{path} does not accept {request.method}.", f"Use {allowed}."
    else:
        remedy = next((text for start, text in _FORM_REMEDIES.items() if detail.startswith(start)), remedy)
    return problem_response(type.problem(detail, remedy, request.state.request_id), error.headers)


def _handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    lines = [
        f"{_place(it['loc'])}: {it['msg'].removeprefix('Value error, ')} (got {_shorten(it['input'])})."
        for it in mistakes[:_MAX_REPORTED]
    ]
    if len(mistakes) > _MAX_REPORTED:
        lines.append(f"And {len(mistakes) - _MAX_REPORTED:,} more.")
    return problem_response(INVALID.problem(" ".join(lines), INVALID.remedy, request.state.request_id))


def _place(location: tuple[int | str, ...]) -> str:
    """Formats the field of a body, address or header, such as `searches[1].top`."""
    parts = location[1:] or location
    if parts[0] == "attributes":
        parts = parts[:2]  # what follows is the type that the value was validated as
    return "".join(f"[{it}]" if isinstance(it, int) else f".{it[:80]}" for it in parts).removeprefix(".")


def _shorten(value: object) -> str:
    if isinstance(value, dict | list):  # may be as large as the request
        return "an object" if isinstance(value, dict) else "a list"
    return str(value[:80] if isinstance(value, str | bytes) else value)[:80]


def _handle_image_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ImageError)
    type = IMAGE_PROBLEMS[error.reason]
    return problem_response(type.problem(error.problem, error.remedy, request.state.request_id))


def _handle_lookalike_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LookalikeError)
    type = FETCH_PROBLEMS[error.reason] if isinstance(error, FetchError) else _BY_KIND.get(error.kind)
    if type is None:
        raise error  # an error of the service, not of the request: RequestContext answers it
    headers = {}
    if isinstance(error, StoreBusy):
        headers["Retry-After"] = "1"
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(ceil(error.retry_after))
        if error.close:
            headers["Connection"] = "close"
    return problem_response(type.problem(error.problem, error.remedy, request.state.request_id), headers)
