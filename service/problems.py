"""Errors to RFC 9457 problem documents: every answer that is not a success is made here."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from index.gallery import BundleMismatch
from index.images import ImageError

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """The body of every error."""

    type: str = Field(description="what kind of problem it is; stable, for programs")
    title: str = Field(description="the kind in words")
    status: int
    detail: str = Field(description="what was wrong with this request")
    remedy: str = Field(description="what to do about it")
    request_id: str = Field(description="names the request in the service's log")


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
    "top: Input should be less than or equal to 100 (got 500).",
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
_BY_STATUS = {kind.status: kind for kind in (MALFORMED, NOT_FOUND, METHOD_NOT_ALLOWED)}


class ProblemError(HTTPException):
    """A problem to answer with. FastAPI lets an HTTPException out of its own parsing, and nothing else."""

    def __init__(self, kind: Kind, detail: str, remedy: str | None = None) -> None:
        super().__init__(kind.status, detail)
        self.kind = kind
        self.remedy = kind.remedy if remedy is None else remedy


def answer(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response that carries a problem."""
    return JSONResponse(problem.model_dump(), problem.status, headers=headers, media_type=MEDIA_TYPE)


def documented(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these kinds, each with an example body."""
    responses: dict[int | str, dict[str, Any]] = {}
    for kind in (*kinds, INTERNAL):
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
    app.add_exception_handler(BundleMismatch, _from_mismatch)


def _from_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ProblemError):
        return answer(error.kind.problem(error.detail, error.remedy, request.state.request_id))
    status, path = error.status_code, request.url.path
    kind = _BY_STATUS.get(status) or Kind(f"http-{status}", status, HTTPStatus(status).phrase)
    detail, remedy = error.detail, kind.remedy
    if kind is NOT_FOUND:
        detail = f"There is nothing at {path}."
    elif kind is METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "GET")
        detail, remedy = f"{path} does not take {request.method}.", f"Use {allowed}."
    return answer(kind.problem(detail, remedy, request.state.request_id), error.headers)


def _from_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = [f"{it['loc'][-1]}: {it['msg']} (got {str(it['input'])[:80]})." for it in error.errors()]
    return answer(INVALID.problem(" ".join(faults), INVALID.remedy, request.state.request_id))


def _from_image(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ImageError)
    return answer(IMAGES[error.reason].problem(error.problem, error.remedy, request.state.request_id))


def _from_mismatch(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BundleMismatch)
    return answer(NOT_READY.problem(error.problem, error.remedy, request.state.request_id))
