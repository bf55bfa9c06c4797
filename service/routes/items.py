"""Items one by one: stored, read, changed and removed, each change found by the very next search."""

import json
from functools import partial
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.routing import Match
from starlette.types import Scope

from index.gallery.filters import Filter
from index.gallery.types import StoredItem
from index.items import MAX_ID_LENGTH, Item
from service.auth.dependencies import MaySearch, MayWrite
from service.item_writer import Conditions, conditions, in_thread, missing, remove, store, tag_of
from service.problems import (
    ACCESS,
    BODIES,
    CONFLICT,
    FETCHES,
    FILTER,
    IMAGES,
    INVALID,
    ITEM_MISSING,
    MALFORMED,
    NOT_READY,
    OVERLOADED,
    UNSUPPORTED_BODY,
    URL_OFF,
    ProblemError,
    documented,
)
from service.schemas.items import (
    FacetsAnswer,
    ItemAnswer,
    ItemBody,
    ItemPatch,
    ItemsAnswer,
    PhotoBody,
    read_item,
    read_patch,
    read_photo,
)
from service.schemas.search import shown
from service.state import ServiceState, StateDep


class _AsSent(APIRoute):
    """A route that reads the address as it was sent, where %2F is a part of an id and not the end of it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if "raw_path" not in scope:
            return super().matches(scope)
        match, found = super().matches({**scope, "path": scope["raw_path"].decode("latin-1")})
        if match is not Match.NONE:
            found["path_params"] = {name: _decoded(value) for name, value in found["path_params"].items()}
        return match, found


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ProblemError(
            INVALID, f"The address holds {text[:80]}, which is no text.", "Encode the id as UTF-8, then with percents."
        ) from None


router = APIRouter(tags=["items"], route_class=_AsSent)

ItemId = Annotated[str, Path(max_length=MAX_ID_LENGTH, description="percent-encoded; a slash within it as %2F")]
ImageId = Annotated[str, Path(max_length=MAX_ID_LENGTH, description="likewise")]
Wanted = Annotated[Conditions, Depends(conditions)]

_PHOTO = {"type": "string", "format": "binary"}
_ITEM = {
    "title": "A red mug",
    "url": "https://shop.example/mug-1",
    "attributes": {"category": "mug", "price": 12.5, "dishwasher": True},
}
_STORED = {
    "id": "mug-1",
    **_ITEM,
    "images": [{"id": "front.jpg", "digest": "3f" * 32, "url": f"/media/{'3f' * 32}.jpg"}],
    "version": 7,
}
_FACET = {
    "name": "category",
    "values": [["mug", 12], ["bowl", 5]],
    "minimum": None,
    "maximum": None,
    "distinct": 2,
}
_WRITE = (MALFORMED, *BODIES, INVALID, CONFLICT, *ACCESS)
_PHOTOS = (UNSUPPORTED_BODY, NOT_READY, URL_OFF, *IMAGES.values(), *FETCHES.values())
_TAG = {"ETag": {"description": "the item's version in quotes", "schema": {"type": "string"}}}


def _shown(example: object, description: str = "The item as it is stored") -> dict[str, Any]:
    """An item as an answer, with its example."""
    return {**shown(example, description), "headers": _TAG}


def _bodies(content: dict[str, Any]) -> dict[str, Any]:
    """The forms of a body that a route reads itself."""
    return {"requestBody": {"required": True, "content": content}}


def _schema(shape: type[BaseModel]) -> dict[str, Any]:
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return schema


_ITEM_BODIES = _bodies(
    {
        "application/json": {
            "schema": _schema(ItemBody),
            "examples": {
                "without images": {"value": _ITEM},
                "with an image": {"value": {**_ITEM, "images": [{"id": "front.jpg", "image": "/9j/4AAQSkZJRg..."}]}},
            },
        },
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["item"],
                "properties": {
                    "item": {"type": "string", "description": "the same as JSON", "examples": [json.dumps(_ITEM)]},
                    "image": {
                        "type": "array",
                        "items": _PHOTO,
                        "description": "photos; the name of each file is its image's id",
                    },
                },
            }
        },
    }
)
_IMAGE_BODIES = _bodies(
    {
        "image/*": {"schema": _PHOTO},
        "application/json": {
            "schema": _schema(PhotoBody),
            "examples": {"by its address": {"value": {"image_url": "https://cdn.shop.example/mug-1.jpg"}}},
        },
    }
)
_PATCH = {
    "schema": _schema(ItemPatch),
    "examples": {"a new price": {"value": {"attributes": {"price": 9.5, "discount": None}}}},
}
_PATCH_BODIES = _bodies({"application/merge-patch+json": _PATCH, "application/json": _PATCH})


@router.get(
    "/v1/items",
    summary="List items",
    dependencies=[MaySearch],
    responses={
        200: shown({"items": [_STORED], "cursor": "mug-1"}),
        **documented(INVALID, FILTER, OVERLOADED, *ACCESS),
    },
)
async def list_items(
    request: Request,
    state: StateDep,
    filter: Annotated[str, Query(description='as JSON, such as `{"price": {"lt": 20}}`')] = "{}",
    cursor: Annotated[str, Query(max_length=MAX_ID_LENGTH, description="continues an earlier answer")] = "",
    count: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ItemsAnswer:
    """Items in the order of their ids, those that match a filter."""
    wanted = _filter(filter)
    return await state.listed(partial(_page, state, wanted, cursor, count, _media(request)))


def _filter(text: str) -> Filter:
    try:
        return Filter.parse(from_json(text))
    except ValueError:
        raise ProblemError(
            INVALID, f"filter: {text[:80]!r} is not JSON.", 'Write one such as {"colour": "red"}.'
        ) from None


def _page(state: ServiceState, wanted: Filter, after: str, count: int, media: str) -> ItemsAnswer:
    found = state.gallery.scan(filter=wanted, after=after, count=count)
    stored = [state.gallery.stored(item.id) for item in found.items]
    # One that was deleted since it was found is none.
    return ItemsAnswer(items=[ItemAnswer.of(one, media) for one in stored if one], cursor=found.after)


@router.get(
    "/v1/items/{item_id}",
    summary="Read an item",
    response_model=ItemAnswer,
    dependencies=[MaySearch],
    responses={
        200: _shown(_STORED),
        304: {"description": "The copy with this ETag is current"},
        **documented(ITEM_MISSING, INVALID, *ACCESS),
    },
)
async def read(item_id: ItemId, request: Request, state: StateDep, wanted: Wanted) -> Response:
    stored = await in_thread(state, state.gallery.stored, item_id)
    if stored is None:
        raise missing(item_id)
    if wanted.holds(stored):
        return Response(status_code=304, headers={"ETag": tag_of(stored.version)})
    return _answer(request, stored)


@router.put(
    "/v1/items/{item_id}",
    summary="Store an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite],
    openapi_extra=_ITEM_BODIES,
    responses={
        200: _shown(_STORED),
        201: {**_shown(_STORED, "The item is new"), "model": ItemAnswer},
        **documented(*_WRITE, *_PHOTOS),
    },
)
async def put(item_id: ItemId, request: Request, state: StateDep, wanted: Wanted) -> Response:
    """Replaces title, url and attributes. With images the item's become exactly those; without, they stay.

    The same request again changes nothing. When it is answered, every search reflects it.
    """
    state.check_permits()
    given = await read_item(request, state.settings.max_batch)
    item, replaced = given.item(item_id), given.photos is not None
    with state.permit():
        written = await store(state, item_id, wanted, lambda seen: item, given.photos or {}, only=replaced)
    return _answer(request, written.stored, created=written.created)


@router.patch(
    "/v1/items/{item_id}",
    summary="Change some of an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite],
    openapi_extra=_PATCH_BODIES,
    responses={200: _shown(_STORED), **documented(*_WRITE, UNSUPPORTED_BODY, ITEM_MISSING)},
)
async def patch(item_id: ItemId, request: Request, state: StateDep, wanted: Wanted) -> Response:
    """A JSON merge patch of title, url and attributes: null removes an attribute, and what is left out stays."""
    changes = await read_patch(request)
    written = await store(state, item_id, wanted, lambda seen: changes.applied(_existing(item_id, seen)))
    return _answer(request, written.stored)


@router.delete(
    "/v1/items/{item_id}",
    summary="Remove an item",
    status_code=204,
    dependencies=[MayWrite],
    responses={204: {"description": "The item is gone, or was never there"}, **documented(INVALID, CONFLICT, *ACCESS)},
)
async def delete(item_id: ItemId, state: StateDep, wanted: Wanted) -> None:
    """With its images. The next search does not find it."""
    await remove(state, item_id, wanted, lambda expected: state.gallery.delete([item_id], expected=expected))


@router.put(
    "/v1/items/{item_id}/images/{image_id}",
    summary="Store an image of an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite],
    openapi_extra=_IMAGE_BODIES,
    responses={
        200: _shown(_STORED),
        201: {**_shown(_STORED, "The image is new"), "model": ItemAnswer},
        **documented(*_WRITE, *_PHOTOS, ITEM_MISSING),
    },
)
async def put_image(item_id: ItemId, image_id: ImageId, request: Request, state: StateDep, wanted: Wanted) -> Response:
    """Adds a photo to an item that exists, or puts it in the place of the one with this id; others stay.

    ETag and conditions are those of the item.
    """
    state.check_permits()
    photos = {image_id: await read_photo(request)}
    with state.permit():
        written = await store(state, item_id, wanted, lambda seen: _existing(item_id, seen), photos)
    return _answer(request, written.stored, created=written.new_images)


@router.delete(
    "/v1/items/{item_id}/images/{image_id}",
    summary="Remove an image of an item",
    status_code=204,
    dependencies=[MayWrite],
    responses={204: {"description": "The image is gone, or was never there"}, **documented(INVALID, CONFLICT, *ACCESS)},
)
async def delete_image(item_id: ItemId, image_id: ImageId, state: StateDep, wanted: Wanted) -> None:
    """The item stays, even without images: it is listed then, but no search finds it."""
    gallery = state.gallery
    await remove(state, item_id, wanted, lambda expected: gallery.delete_images(item_id, [image_id], expected=expected))


@router.get(
    "/v1/facets",
    summary="The attributes that items have",
    dependencies=[MaySearch],
    responses={
        200: shown({"facets": [_FACET]}),
        **documented(INVALID, *ACCESS),
    },
)
async def facets(
    state: StateDep,
    count: Annotated[int, Query(ge=1, le=1000, description="values of each at most")] = 20,
) -> FacetsAnswer:
    """What a page of filters offers: each attribute with its most frequent values and the span of its numbers.

    They are counted when the gallery is compacted, so the newest writes may be missing.
    """
    return FacetsAnswer(facets=await in_thread(state, state.gallery.facets, count))


def _existing(item_id: str, seen: StoredItem | None) -> Item:
    if seen is None:
        raise missing(item_id)
    return seen.item


def _answer(request: Request, stored: StoredItem, *, created: bool = False) -> Response:
    answer = ItemAnswer.of(stored, _media(request))
    return Response(
        answer.model_dump_json(),
        201 if created else 200,
        headers={"ETag": tag_of(stored.version)},
        media_type="application/json",
    )


def _media(request: Request) -> str:
    return f"{request.scope.get('root_path', '')}/media"
