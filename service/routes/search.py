"""The search: a photo in, the items that look like it out."""

from time import perf_counter
from typing import Annotated, Any

import anyio.to_thread
import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field, TypeAdapter, ValidationError
from starlette.datastructures import UploadFile

from index import images
from service.backend import Backend, Serving
from service.problems import (
    BODY_TOO_LARGE,
    IMAGES,
    INVALID,
    MALFORMED,
    NOT_READY,
    PHOTO_MISSING,
    UNSUPPORTED_BODY,
    ProblemError,
    documented,
)
from service.schemas import Match, MatchedImage, Milliseconds, SearchAnswer

router = APIRouter(tags=["search"])

DEFAULT_TOP = 12
_Top = Annotated[int, Field(ge=1, le=100)]
_PHOTO = {"type": "string", "format": "binary"}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image"],
                    "properties": {
                        "image": _PHOTO,
                        "top": {"type": "integer", "minimum": 1, "maximum": 100, "default": DEFAULT_TOP},
                    },
                }
            },
            "image/*": {"schema": _PHOTO},
        },
    }
}


@router.post(
    "/v1/search",
    summary="Find the items that look like a photo",
    responses=documented(
        MALFORMED, BODY_TOO_LARGE, UNSUPPORTED_BODY, PHOTO_MISSING, INVALID, NOT_READY, *IMAGES.values()
    ),
    openapi_extra=_BODY,
)
async def search(
    request: Request,
    serving: Serving,
    top: Annotated[
        int | None, Query(ge=1, le=100, description=f"how many items at most; {DEFAULT_TOP} unless told")
    ] = None,
) -> SearchAnswer:
    """The photo is the file field `image` of a form, or the whole body with its own `image/...` type."""
    photo, form_top = await _read(request)
    wanted = top or form_top or DEFAULT_TOP
    media = f"{request.scope.get('root_path', '')}/media"
    return await anyio.to_thread.run_sync(_find, serving, photo, wanted, media, limiter=serving.workers)


async def _read(request: Request) -> tuple[bytes, int | None]:
    """The photo's bytes, and `top` when the form carries it."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type.startswith("image/"):
        return await request.body(), None
    if not media_type:
        raise ProblemError(PHOTO_MISSING, "The request has neither a body nor a Content-Type.")
    if media_type != "multipart/form-data":
        raise ProblemError(UNSUPPORTED_BODY, f"The request's type is {media_type}.")
    async with request.form(max_files=1, max_fields=8) as form:
        image, top = form.get("image"), form.get("top")
        if not isinstance(image, UploadFile):
            raise ProblemError(PHOTO_MISSING, PHOTO_MISSING.detail)
        return await image.read(), None if top is None else _checked(top)


def _checked(top: object) -> int:
    try:
        return TypeAdapter(_Top).validate_python(top)
    except ValidationError as error:
        raise RequestValidationError([{**fault, "loc": ("body", "top")} for fault in error.errors()]) from None


def _find(backend: Backend, photo: bytes, top: int, media: str) -> SearchAnswer:
    """The whole walk from bytes to items; it blocks, so it runs in a worker thread."""
    begun = perf_counter()
    pixels = images.load_pixels(photo, backend.bundle.preprocessing, backend.settings.image_limits)
    decoded = perf_counter()
    vectors = backend.embedder.embed(pixels[np.newaxis])
    embedded = perf_counter()
    answer = backend.gallery.search(vectors, bundle_id=backend.bundle.id, top=top)
    found = perf_counter()
    return SearchAnswer(
        items=[
            Match(
                id=hit.item.id,
                title=hit.item.title,
                url=hit.item.url,
                score=hit.score,
                attributes=hit.item.attributes,
                image=MatchedImage(id=hit.image.id, url=f"{media}/{hit.image.digest}.jpg"),
            )
            for hit in answer.hits[0]
        ],
        bundle=backend.bundle.id,
        generation=answer.generation,
        milliseconds=Milliseconds(
            decode=_ms(decoded - begun), embed=_ms(embedded - decoded), search=_ms(found - embedded)
        ),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
