"""Serves pictures: the gallery's thumbnails and the sample photos."""

import hashlib
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import FileResponse
from pydantic.json_schema import SkipJsonSchema

from service.openapi import NOT_MODIFIED, PHOTO, error_responses, example_response
from service.problems import INVALID, NOT_FOUND, OVERLOADED, ProblemError
from service.requests import Conditions, KnownQuery, parse_etags
from service.schemas.media import Example, Examples
from service.state import PHOTO_TYPES, AnswerDep, StateDep

router = APIRouter(tags=["pictures"])

_EXAMPLES = {"examples": [{"name": "mug-03.jpg", "url": "/examples/mug-03.jpg"}]}


@router.get(
    "/media/{digest}.jpg",
    summary="The thumbnail of an image",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {"schema": PHOTO}}},
        304: NOT_MODIFIED,
        **error_responses(NOT_FOUND, INVALID, OVERLOADED),
    },
)
async def get_thumbnail(
    digest: str,
    request: Request,
    state: StateDep,
    answer: AnswerDep,
    if_none_match: Annotated[str | SkipJsonSchema[None], Header()] = None,
) -> Response:
    """The address is derived from the image's content: a copy never becomes outdated, but outlives a deletion."""
    thumbnail = await state.admission.run("read", state.gallery.thumbnail, digest) if _is_digest(digest) else None
    if thumbnail is None:
        raise ProblemError(
            NOT_FOUND, f"The gallery has no image {digest[:80]}.", "Take the address from the answer of a search."
        )
    answer.add(len(thumbnail))
    etag = f'"{hashlib.sha256(thumbnail).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": f"public, max-age={state.settings.media_max_age}, immutable"}
    if Conditions(None, parse_etags(request, "if-none-match") or frozenset()).excludes(etag):
        return Response(status_code=304, headers=headers)
    return Response(thumbnail, media_type="image/jpeg", headers=headers)


@router.get(
    "/v1/examples",
    summary="Sample photos to search with",
    dependencies=[KnownQuery],
    responses={200: example_response(_EXAMPLES), **error_responses(INVALID)},
)
async def list_examples(request: Request, state: StateDep) -> Examples:
    root = request.scope.get("root_path", "")
    return Examples(examples=[Example(name=name, url=f"{root}/examples/{quote(name)}") for name in state.examples])


@router.get(
    "/examples/{name}",
    summary="A sample photo",
    response_class=FileResponse,
    responses={200: {"content": {"image/*": {"schema": PHOTO}}}, **error_responses(NOT_FOUND, INVALID)},
)
def get_example(name: str, state: StateDep) -> FileResponse:
    path = state.examples.get(name)
    if path is None or not path.is_file():
        raise ProblemError(NOT_FOUND, f"There is no sample photo {name[:80]}.", "Take the address from /v1/examples.")
    return FileResponse(path, media_type=PHOTO_TYPES[path.suffix.lower()])


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(character in "0123456789abcdef" for character in text)
