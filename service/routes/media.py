"""Pictures: the gallery's thumbnails and the photos to try."""

import hashlib
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import FileResponse

from service.problems import INVALID, NOT_FOUND, ProblemError, documented
from service.schemas.search import Example, Examples, shown
from service.state import PHOTO_TYPES, StateDep

router = APIRouter(tags=["pictures"])

_FOREVER = "public, max-age=31536000, immutable"
_EXAMPLES = {"examples": [{"name": "mug-03.jpg", "url": "/examples/mug-03.jpg"}]}


@router.get(
    "/media/{digest}.jpg",
    summary="An image of the gallery, small",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}},
        304: {"description": "The copy with this ETag is current"},
        **documented(NOT_FOUND, INVALID),
    },
)
def media(digest: str, state: StateDep, if_none_match: Annotated[str, Header()] = "") -> Response:
    """The address follows from the image's content, so a copy may be kept for good."""
    thumbnail = state.gallery.thumbnail(digest) if _is_digest(digest) else None
    if thumbnail is None:
        raise ProblemError(
            NOT_FOUND, f"The gallery has no image {digest[:80]}.", "Take the address from a search's answer."
        )
    etag = f'"{hashlib.sha256(thumbnail).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": _FOREVER}
    known = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    if known & {etag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(thumbnail, media_type="image/jpeg", headers=headers)


@router.get(
    "/v1/examples",
    summary="Photos to try the search with",
    responses={200: shown(_EXAMPLES), **documented()},
)
async def examples(request: Request, state: StateDep) -> Examples:
    root = request.scope.get("root_path", "")
    return Examples(examples=[Example(name=name, url=f"{root}/examples/{quote(name)}") for name in state.examples])


@router.get(
    "/examples/{name}",
    summary="A photo to try",
    response_class=FileResponse,
    responses={200: {"content": {"image/*": {}}}, **documented(NOT_FOUND, INVALID)},
)
def example(name: str, state: StateDep) -> FileResponse:
    path = state.examples.get(name)
    if path is None or not path.is_file():
        raise ProblemError(NOT_FOUND, f"There is no example photo {name[:80]}.", "Take the address from /v1/examples.")
    return FileResponse(path, media_type=PHOTO_TYPES[path.suffix.lower()])


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(character in "0123456789abcdef" for character in text)
