"""Errors to RFC 9457 problem documents: every answer that is not a success is made here."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from index.embedding.bundle import BundleError
from index.embedding.images import ImageError
from index.errors import LookalikeError
from index.gallery import BundleMismatch, ItemMissing
from index.gallery.filters import FilterError
from index.gallery.jobs import JobMissing
from index.gallery.search import SearchError
from index.gallery.store.sqlite import VersionConflict
from service.inference import Overloaded
from service.live_model import NotReady
from service.schemas.responses import Problem as Problem
from service.url_fetcher import FetchError

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True)
class Kind:
    """A kind of problem, with the detail and remedy that the API's description shows as an example."""

    slug: str
    status: int
    title: str
    detail: str = ""
    remedy: str = ""

    def problem(self, detail: str, remedy: str, request_id: str) -> Problem:
        """A problem of this kind that one request had."""
        detail = detail.encode(errors="replace").decode()  # JSON may bring halves of characters
        return Problem(
            type=f"/problems/{self.slug}",
            title=self.title,
            status=self.status,
            detail=detail,
            remedy=remedy,
            request_id=request_id,
        )


_HOW = "Send a form with the file field `image`, or the photo itself with its own type (image/...)."
_WHOLE = "Send a whole JPEG, PNG, WebP, GIF or BMP file."

MALFORMED = Kind(
    "request-malformed",
    400,
    "The request cannot be read",
    "Missing boundary in multipart.",
    "Mend the form's encoding.",
)
NOT_FOUND = Kind(
    "not-found",
    404,
    "Nothing is here",
    "There is nothing at /v1/serch.",
    "See /openapi.json for what the service answers.",
)
METHOD_NOT_ALLOWED = Kind(
    "method-not-allowed",
    405,
    "The address takes another method",
    "/v1/search does not take GET.",
    "Use POST.",
)
BODY_TOO_SLOW = Kind(
    "body-too-slow",
    408,
    "The request takes too long to arrive",
    "1,000 bytes of the request came in time, and no end.",
    "Send it again, at one go; a smaller photo arrives sooner.",
)
HOST_UNKNOWN = Kind(
    "host-unknown",
    421,
    "The service does not go by this name",
    "Without API keys the service answers to this machine's names only, not to 'shop.example.com'.",
    "Ask for 127.0.0.1 or localhost, make keys (LOOKALIKE_KEYS), or set LOOKALIKE_OPEN=true.",
)
BODY_TOO_LARGE = Kind(
    "body-too-large",
    413,
    "The request is too large",
    "The request has more than 20,971,520 bytes.",
    "Send a smaller file.",
)
UNSUPPORTED_BODY = Kind(
    "body-unsupported",
    415,
    "The request is not of a type that holds a photo",
    "The request's type is text/plain.",
    _HOW,
)
INVALID = Kind(
    "request-invalid",
    422,
    "A value is out of range",
    "top: Input should be less than or equal to 1000 (got 5000).",
    "Correct the value and send the request again.",
)
PHOTO_MISSING = Kind(
    "photo-missing",
    422,
    "There is no photo in the request",
    "The form has no file field `image`.",
    _HOW,
)
INTERNAL = Kind(
    "internal",
    500,
    "The service failed",
    "The service failed to answer.",
    "Try again; if it happens again, look up the request id in the service's log.",
)
NOT_READY = Kind(
    "not-ready",
    503,
    "The service is not ready",
    "The gallery was indexed with another bundle than the service embeds with.",
    "Try again when the operator has served the bundle that indexed the gallery.",
)
OVERLOADED = Kind(
    "overloaded",
    503,
    "The service has too much to do",
    "64 photos are waiting already.",
    "Send the request again after the time in Retry-After.",
)
BODIES = (BODY_TOO_LARGE, BODY_TOO_SLOW, OVERLOADED)
"""What may become of any request with a body."""
KEY_MISSING = Kind(
    "key-missing",
    401,
    "The request has no API key",
    "Neither Authorization nor X-API-Key is sent.",
    "Send the key as `Authorization: Bearer lk_...`.",
)
KEY_WRONG = Kind(
    "key-wrong",
    401,
    "The API key is not valid",
    "The key is unknown, expired or revoked.",
    "Ask the operator for a new one.",
)
FORBIDDEN = Kind(
    "forbidden",
    403,
    "The API key may not do this",
    "The key 'shop' lacks the scope write.",
    "Use a key with that scope.",
)
TOO_MANY = Kind(
    "too-many-requests",
    429,
    "The API key sends too many requests",
    "This key may send 50 requests a second.",
    "Send the request again after the time in Retry-After.",
)
ACCESS = (KEY_MISSING, KEY_WRONG, FORBIDDEN, TOO_MANY)
FILTER = Kind(
    "filter-invalid",
    422,
    "The filter says nothing sensible",
    'filter.price has the unknown operator "under".',
    "Known are gte, gt, lte, lt, exists; attributes are not nested.",
)
SEARCH = Kind(
    "search-invalid",
    422,
    "The search cannot be answered as it was asked",
    "The cursor belongs to another search.",
    "Ask with the same query, filter and bounds as for the first page.",
)
ITEM_MISSING = Kind(
    "item-missing",
    404,
    "The gallery has no such item",
    "The gallery has no item 'mug-1'.",
    "Check the id.",
)
CONFLICT = Kind(
    "version-conflict",
    412,
    "The item was changed by somebody else",
    "Item 'mug-1' was changed since it was read.",
    "Read it again and repeat the change.",
)
JOB_MISSING = Kind("job-missing", 404, "There is no such job", "The gallery has no job 7.", "List them at /v1/jobs.")
JOB_ENDED = Kind(
    "job-ended", 409, "The job has ended already", "Job 7 is not running: it is done.", "There is nothing to cancel."
)
JOB_RUNNING = Kind(
    "job-running", 409, "Another job is running", "Job 7 is running.", "Wait until it has ended, or cancel it."
)
BUNDLE = Kind(
    "bundle-unusable",
    422,
    "The bundle cannot be used",
    "No bundle at /models/autumn: bundle.json is missing.",
    "Make one with `lookalike export`.",
)
URL_OFF = Kind(
    "url-off",
    422,
    "Photos are not fetched from addresses",
    "This service does not fetch photos from addresses.",
    "Send the photo itself.",
)
IMAGES = {
    "empty": Kind("image-empty", 422, "The photo is empty", "The image is empty (0 bytes).", _WHOLE),
    "unreadable": Kind(
        "image-unreadable", 422, "The photo cannot be read", "The image's header cannot be read.", _WHOLE
    ),
    "truncated": Kind("image-truncated", 422, "The photo is cut off", "The image is truncated.", _WHOLE),
    "unsupported": Kind(
        "image-unsupported",
        415,
        "The photo's format is unknown",
        "The bytes are not an image of a known format.",
        _WHOLE,
    ),
    "too_large": Kind(
        "image-too-large",
        413,
        "The photo is too large",
        "The image has 31,000,000 bytes.",
        "Send a smaller file.",
    ),
    "too_many_pixels": Kind(
        "image-too-many-pixels",
        413,
        "The photo has too many pixels",
        "The image has 9000 x 9000 pixels; the limit is 50,000,000.",
        "Send a smaller picture.",
    ),
}
FETCHES = {
    reason: Kind(f"url-{reason.replace('_', '-')}", status, title, detail, "Send the photo itself.")
    for reason, status, title, detail in (
        ("bad_url", 422, "The photo's address is not one", "The address does not begin with https."),
        ("host_not_allowed", 422, "The photo's host is not allowed", "Photos are not fetched from shop.example.com."),
        (
            "host_not_public",
            422,
            "The photo's host is not public",
            "intranet.example.com is not public.",
        ),
        ("unreachable", 422, "The photo's host is unreachable", "The photo's host could not be reached, or broke off."),
        ("timeout", 422, "The photo came too slowly", "The photo did not arrive within 5 seconds."),
        ("too_many_redirects", 422, "The photo's address leads too far", "More than 3 redirects were followed."),
        ("bad_status", 422, "There is no photo at the address", "The photo's host answered 404."),
        ("not_an_image", 415, "What is at the address is no photo", "The host sent text/html."),
        ("too_large", 413, "The photo at the address is too large", "The photo has more than 20,971,520 bytes."),
    )
}
_BY_KIND = {
    BundleMismatch.kind: NOT_READY,
    NotReady.kind: NOT_READY,
    Overloaded.kind: OVERLOADED,
    FilterError.kind: FILTER,
    SearchError.kind: SEARCH,
    ItemMissing.kind: ITEM_MISSING,
    VersionConflict.kind: CONFLICT,
    JobMissing.kind: JOB_MISSING,
    BundleError.kind: BUNDLE,
}
_FORM_REMEDIES = {
    "Too many files": "Send fewer files.",
    "Too many fields": "Send fewer fields.",
    "Part exceeded": "Send a photo as a file, with its name, and shorten the other fields.",
}
_MOST_FAULTS = 10
_BY_STATUS = {kind.status: kind for kind in (MALFORMED, NOT_FOUND, METHOD_NOT_ALLOWED)}


class ProblemError(HTTPException):
    """A problem to answer with. FastAPI lets an HTTPException out of its own parsing, and nothing else."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        remedy: str | None = None,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] = {},
    ) -> None:
        headers = dict(headers) if retry_after is None else {**headers, "Retry-After": str(retry_after)}
        if kind.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(kind.status, detail, headers)
        self.kind = kind
        self.remedy = kind.remedy if remedy is None else remedy


def answer(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response that carries a problem."""
    return JSONResponse(problem.model_dump(), problem.status, headers=headers, media_type=MEDIA_TYPE)


def documented(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these kinds, and those of every route, each with an example."""
    responses: dict[int | str, dict[str, Any]] = {}
    for kind in (*kinds, HOST_UNKNOWN, INTERNAL):
        example = kind.problem(kind.detail, kind.remedy, request_id="5f0c2a4e9b7d4c1f")
        response = responses.setdefault(
            kind.status,
            {
                "description": HTTPStatus(kind.status).phrase,
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}},
            },
        )
        examples = response["content"][MEDIA_TYPE]["examples"]
        examples[kind.slug] = {"summary": kind.title, "value": example.model_dump()}
    return responses


def install(app: FastAPI) -> None:
    """Has the app answer the errors it knows with problems; what it does not know, RequestContext answers."""
    app.add_exception_handler(HTTPException, _from_http)
    app.add_exception_handler(RequestValidationError, _from_validation)
    app.add_exception_handler(ImageError, _from_image)
    app.add_exception_handler(LookalikeError, _from_ours)


def _from_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ProblemError):
        return answer(error.kind.problem(error.detail, error.remedy, request.state.request_id), error.headers)
    status, path = error.status_code, request.url.path
    kind = _BY_STATUS.get(status) or Kind(f"http-{status}", status, HTTPStatus(status).phrase)
    detail, remedy = error.detail, kind.remedy
    if kind is NOT_FOUND:
        detail = f"There is nothing at {path}."
    elif kind is METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "GET")
        detail, remedy = f"{path} does not take {request.method}.", f"Use {allowed}."
    else:
        remedy = next((told for begin, told in _FORM_REMEDIES.items() if detail.startswith(begin)), remedy)
    return answer(kind.problem(detail, remedy, request.state.request_id), error.headers)


def _from_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    told = [f"{_place(it['loc'])}: {it['msg']} (got {_shown(it['input'])})." for it in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        told.append(f"And {len(faults) - _MOST_FAULTS:,} more.")
    return answer(INVALID.problem(" ".join(told), INVALID.remedy, request.state.request_id))


def _place(location: tuple[int | str, ...]) -> str:
    """Where in a request: the field of its body, address or headers, such as `searches[1].top`."""
    parts = location[1:] or location
    if parts[0] == "attributes":
        parts = parts[:2]  # what follows is the type that the value was taken for
    return "".join(f"[{it}]" if isinstance(it, int) else f".{it[:80]}" for it in parts).removeprefix(".")


def _shown(value: object) -> str:
    if isinstance(value, dict | list):  # which may be as large as the request
        return "an object" if isinstance(value, dict) else "a list"
    return str(value[:80] if isinstance(value, str | bytes) else value)[:80]


def _from_image(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ImageError)
    return answer(IMAGES[error.reason].problem(error.problem, error.remedy, request.state.request_id))


def _from_ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LookalikeError)
    kind = _BY_KIND.get(error.kind)
    if isinstance(error, FetchError):
        kind = FETCHES[error.reason]
    if kind is None:
        raise error  # a fault of the service, not of the request: told as such
    headers = {"Retry-After": str(ceil(error.retry_after))} if isinstance(error, Overloaded) else None
    return answer(kind.problem(error.problem, error.remedy, request.state.request_id), headers)
