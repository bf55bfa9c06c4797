"""Converts errors to RFC 9457 problem documents: every answer that is not a success is made here."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from index._util.system import LockError
from index._util.validation import explain_errors
from index.embedding.bundle import BundleError
from index.embedding.images import SEND_FILE, ImageError
from index.errors import LookalikeError
from index.gallery.errors import (
    BundleMismatch,
    IndexUnavailable,
    ItemMissing,
    JobMissing,
    LimitExceeded,
    RankingMissing,
    SearchError,
    StorageFull,
    StoreBusy,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
    VersionConflict,
)
from index.gallery.filters import FilterError
from index.rankings import NAME_TAG, RULES_TAG
from service.admission import Overloaded
from service.inference import NotReady
from service.schemas.problem import Problem
from service.url_fetcher import FetchError

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_UNION_TAGS = (NAME_TAG, RULES_TAG)
"""Parts of an error's place that name what was validated, not where it is."""
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

MALFORMED = ProblemType(
    "request-malformed", 400, "Malformed request", "Missing boundary in multipart.", "Correct the form's encoding."
)
NOT_FOUND = ProblemType("not-found", 404, "Not found", "There is nothing at /v1/serch.", "See /docs for the addresses.")
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
HEAD_TOO_LARGE = ProblemType(
    "head-too-large",
    431,
    "Request head too large",
    "The head has more than 65,536 bytes.",
    "Send a shorter address and shorter headers; a long filter fits into the body of a search.",
)
INVALID = ProblemType(
    "request-invalid",
    422,
    "Invalid request",
    "limit must be at most 1,000 (got 5000).",
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
STORE_UNAVAILABLE = ProblemType(
    "store-unavailable",
    503,
    "Gallery cannot be reached",
    "Nothing was written: PostgreSQL reports: connection refused.",
    "Send the request again after the time in Retry-After.",
)
STORE_FAILED = ProblemType(
    "store-failed",
    503,
    "Gallery cannot be used",
    "catalogue.sqlite cannot be read: database disk image is malformed.",
    "Ask the operator to run `lookalike gallery verify`, and to restore a snapshot.",
)
INDEX_UNAVAILABLE = ProblemType(
    "index-unavailable",
    503,
    "Vector index unavailable",
    "Qdrant does not answer at 10.0.0.5:6334.",
    "Send the request again after the time in Retry-After.",
)
OVERLOADED = ProblemType(
    "overloaded",
    503,
    "Service overloaded",
    "64 photos to embed are waiting already.",
    "Send the request again after the time in Retry-After.",
)
KEYS_UNREADABLE = ProblemType(
    "keys-unreadable",
    503,
    "API keys unreadable",
    "The service cannot read its API keys, so it refuses every request.",
    "Ask the operator to repair the key file, and send the request again.",
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
ACCESS_PROBLEMS = (KEY_MISSING, KEY_INVALID, FORBIDDEN, TOO_MANY_REQUESTS, KEYS_UNREADABLE)
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
ITEM_MISSING = ProblemType("item-missing", 404, "Item not found", "The gallery has no item 'mug-01'.", "Check the id.")
CONFLICT = ProblemType(
    "version-conflict",
    412,
    "Version conflict",
    "Item 'mug-01' was changed since it was read.",
    "Read it again and repeat the change.",
)
LIMIT_EXCEEDED = ProblemType(
    "limit-exceeded",
    422,
    "Limit exceeded",
    "Item 'mug-01' would have 257 images; the limit is 256.",
    "Remove some of its images first, or send fewer.",
)
RANKING_MISSING = ProblemType(
    "ranking-missing", 404, "Ranking not found", "The gallery has no ranking 'home'.", "List them at /v1/rankings."
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
        ("empty", 422, "Empty photo", "The image is empty (0 bytes).", SEND_FILE),
        ("unreadable", 422, "Unreadable photo", "The image's header cannot be read.", SEND_FILE),
        ("truncated", 422, "Truncated photo", "The image is truncated.", SEND_FILE),
        ("unsupported", 415, "Unsupported photo format", "This file is not a photo of a known format.", SEND_FILE),
        ("too_large", 413, "Photo too large", "The image has 31,000,000 bytes.", "Send a smaller file."),
        ("too_many_pixels", 413, "Photo has too many pixels", _TOO_MANY_PIXELS, "Send a smaller picture."),
        ("unreachable", 422, "Photo unreachable", "The image could not be read from its address.", SEND_FILE),
        ("forbidden", 422, "Photo not allowed", "The image is outside the folder of its table.", SEND_FILE),
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
    RankingMissing.kind: RANKING_MISSING,
    VersionConflict.kind: CONFLICT,
    LimitExceeded.kind: LIMIT_EXCEEDED,
    JobMissing.kind: JOB_MISSING,
    BundleError.kind: BUNDLE_INVALID,
    IndexUnavailable.kind: INDEX_UNAVAILABLE,
    StorageFull.kind: STORAGE_FULL,
    StoreBusy.kind: OVERLOADED,
    StoreReadOnly.kind: READ_ONLY,
    StoreUnavailable.kind: STORE_UNAVAILABLE,
    StoreError.kind: STORE_FAILED,
    LockError.kind: STORE_FAILED,
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


def invalid_request(
    mistakes: Sequence[Mapping[str, Any]], known: type[BaseModel] | Collection[str] = ()
) -> ProblemError:
    """Returns the problem of a request with these mistakes, as pydantic reports them, and the names that it may use."""
    places = [tuple(part for part in mistake["loc"] if part not in _UNION_TAGS) for mistake in mistakes]
    mistakes = [{**mistake, "loc": place} for mistake, place in zip(mistakes, places, strict=True)]
    lines = [f"{clause}." for clause in explain_errors(mistakes[:_MAX_REPORTED], known)]
    if len(mistakes) > _MAX_REPORTED:
        lines.append(f"And {len(mistakes) - _MAX_REPORTED:,} more.")
    return ProblemError(INVALID, " ".join(lines))


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
        allowed = (error.headers or {}).get("Allow", "GET").replace("GET", "GET, HEAD")
        error.headers = {**(error.headers or {}), "Allow": allowed}
        detail, remedy = f"{path} does not accept {request.method}.", f"Use {allowed}."
    else:
        remedy = next((text for start, text in _FORM_REMEDIES.items() if detail.startswith(start)), remedy)
    return problem_response(type.problem(detail, remedy, request.state.request_id), error.headers)


def _handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Parameters of the path, the query string and headers; `loc` begins with which of them it is.
    invalid = invalid_request([{**mistake, "loc": mistake["loc"][1:]} for mistake in error.errors()])
    return problem_response(INVALID.problem(invalid.detail, invalid.remedy, request.state.request_id))


def _handle_image_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ImageError)
    type = IMAGE_PROBLEMS[error.reason]
    return problem_response(type.problem(error.problem, error.remedy, request.state.request_id))


def _handle_lookalike_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LookalikeError)
    type = FETCH_PROBLEMS[error.reason] if isinstance(error, FetchError) else _BY_KIND.get(error.kind)
    if type is None:
        raise error  # an error of the service, not of the request: RequestContext answers it
    if type in (STORE_FAILED, STORE_UNAVAILABLE):
        log.error("request %s: %s", request.state.request_id, error)
    headers = {}
    if isinstance(error, StoreBusy | StoreUnavailable | IndexUnavailable):
        headers["Retry-After"] = "1"
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(ceil(error.retry_after))
        if error.close:
            headers["Connection"] = "close"
    return problem_response(type.problem(error.problem, error.remedy, request.state.request_id), headers)
