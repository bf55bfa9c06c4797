"""Stores, reads, changes and removes items; the next search reflects each change."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from index.gallery.filters import Filter
from index.gallery.types import StoredItem
from index.items import MAX_ID_LENGTH
from service import item_writer
from service.auth.dependencies import MaySearch, MayWrite
from service.openapi import (
    FACET,
    IMAGE_BODY,
    IMAGE_WRITE_PROBLEMS,
    ITEM_ANSWER,
    ITEM_BODY,
    NOT_MODIFIED,
    PATCH_BODY,
    READ_PROBLEMS,
    WRITE_PROBLEMS,
    error_responses,
    example_response,
    item_response,
)
from service.problems import CONFLICT, FILTER_INVALID, ITEM_MISSING
from service.requests import (
    Conditions,
    decode_path,
    etag,
    media_address,
    parse_filter_json,
    read_conditions,
    read_item,
    read_patch,
    read_photo,
)
from service.schemas.items import Facet, FacetsAnswer, ImageAnswer, ItemAnswer, ItemsAnswer
from service.search_pipeline import item_bytes
from service.state import ServiceState, StateDep


class _RawPathRoute(APIRoute):
    """A route that matches the path before percent-decoding, where %2F is a part of an id and not its end."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if "raw_path" not in scope:
            return super().matches(scope)
        match, found = super().matches({**scope, "path": scope["raw_path"].decode("latin-1")})
        if match is not Match.NONE:
            found["path_params"] = {name: decode_path(value) for name, value in found["path_params"].items()}
        return match, found


router = APIRouter(tags=["items"], route_class=_RawPathRoute)

ItemId = Annotated[str, Path(max_length=MAX_ID_LENGTH, description="percent-encoded; a slash within it as %2F")]
ImageId = Annotated[str, Path(max_length=MAX_ID_LENGTH, description="percent-encoded likewise")]
ConditionsDep = Annotated[Conditions, Depends(read_conditions)]


@router.get(
    "/v1/items",
    summary="List items",
    dependencies=[MaySearch],
    responses={
        200: example_response({"items": [ITEM_ANSWER], "cursor": "mug-1"}),
        **error_responses(FILTER_INVALID, *READ_PROBLEMS),
    },
)
async def list_items(
    request: Request,
    state: StateDep,
    filter: Annotated[str, Query(description='as JSON, such as `{"price": {"lt": 20}}`')] = "{}",
    cursor: Annotated[str, Query(max_length=MAX_ID_LENGTH, description="continues an earlier list")] = "",
    count: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ItemsAnswer:
    """Items in the order of their ids, those that match a filter."""
    wanted = Filter.parse(parse_filter_json(filter))
    return await state.admission.run("list", _list_page, state, wanted, cursor, count, media_address(request))


def _list_page(state: ServiceState, wanted: Filter, after: str, count: int, media: str) -> ItemsAnswer:
    page = state.gallery.scan(filter=wanted, after=after, count=count)
    items, size, cursor = [], 0, page.after
    for number, item in enumerate(page.items, 1):
        stored = state.gallery.get_item(item.id)
        if stored:  # an item that was deleted since it was listed is left out
            items.append(_item_answer(stored, media))
            size += item_bytes(item.title, item.url, item.attributes) + 300 * len(stored.images)
        if size > state.settings.max_answer_bytes and number < len(page.items):
            cursor = item.id  # a shorter page
            break
    return ItemsAnswer(items=items, cursor=cursor)


@router.get(
    "/v1/items/{item_id}",
    summary="Read an item",
    response_model=ItemAnswer,
    dependencies=[MaySearch],
    responses={200: item_response(), 304: NOT_MODIFIED, **error_responses(ITEM_MISSING, *READ_PROBLEMS)},
)
async def read(item_id: ItemId, request: Request, state: StateDep, conditions: ConditionsDep) -> Response:
    stored = await state.admission.run("read", state.gallery.get_item, item_id)
    if stored is None:
        raise item_writer.item_missing(item_id)
    if conditions.excludes(etag(stored.version)):
        return Response(status_code=304, headers={"ETag": etag(stored.version)})
    return _respond(request, stored)


@router.put(
    "/v1/items/{item_id}",
    summary="Store an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite],
    openapi_extra=ITEM_BODY,
    responses={
        200: item_response(),
        201: {**item_response("The item is new"), "model": ItemAnswer},
        **error_responses(*IMAGE_WRITE_PROBLEMS),
    },
)
async def put(item_id: ItemId, request: Request, state: StateDep, conditions: ConditionsDep) -> Response:
    """Replaces title, url and attributes. With images the item's become exactly those; without, they stay.

    Sending the same request again changes nothing. Every search after the answer reflects the write.
    """
    state.admission.check("write")
    write = await read_item(request, state.settings.max_batch)
    result = await item_writer.put_item(state, item_id, conditions, write)
    return _respond(request, result.stored, created=result.created)


@router.patch(
    "/v1/items/{item_id}",
    summary="Change some fields of an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite],
    openapi_extra=PATCH_BODY,
    responses={200: item_response(), **error_responses(*WRITE_PROBLEMS, ITEM_MISSING)},
)
async def patch(item_id: ItemId, request: Request, state: StateDep, conditions: ConditionsDep) -> Response:
    """A JSON merge patch of title, url and attributes: null removes an attribute, and what is left out stays."""
    state.admission.check("write")
    changes = await read_patch(request)
    result = await item_writer.patch_item(state, item_id, conditions, changes)
    return _respond(request, result.stored)


@router.delete(
    "/v1/items/{item_id}",
    summary="Remove an item",
    status_code=204,
    dependencies=[MayWrite],
    response_description="The item does not exist any more, or never did",
    responses=error_responses(CONFLICT, *READ_PROBLEMS),
)
async def delete(item_id: ItemId, state: StateDep, conditions: ConditionsDep) -> None:
    """Removes an item with its images. The next search does not find it."""
    await item_writer.delete_item(state, item_id, conditions)


@router.put(
    "/v1/items/{item_id}/images/{image_id}",
    summary="Store an image of an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite],
    openapi_extra=IMAGE_BODY,
    responses={
        200: item_response(),
        201: {**item_response("The image is new"), "model": ItemAnswer},
        **error_responses(*IMAGE_WRITE_PROBLEMS, ITEM_MISSING),
    },
)
async def put_image(
    item_id: ItemId, image_id: ImageId, request: Request, state: StateDep, conditions: ConditionsDep
) -> Response:
    """Adds a photo to an item that exists, or replaces the one with this id; other images stay.

    ETag and conditions are those of the item.
    """
    state.admission.check("write")
    photo = await read_photo(request)
    result = await item_writer.put_image(state, item_id, image_id, conditions, photo)
    return _respond(request, result.stored, created=result.has_new_images)


@router.delete(
    "/v1/items/{item_id}/images/{image_id}",
    summary="Remove an image of an item",
    status_code=204,
    dependencies=[MayWrite],
    response_description="The image does not exist any more, or never did",
    responses=error_responses(CONFLICT, *READ_PROBLEMS),
)
async def delete_image(item_id: ItemId, image_id: ImageId, state: StateDep, conditions: ConditionsDep) -> None:
    """The item stays, even without images: it is then listed, but no search finds it."""
    await item_writer.delete_image(state, item_id, image_id, conditions)


@router.get(
    "/v1/facets",
    summary="The attributes that items have",
    dependencies=[MaySearch],
    responses={200: example_response({"facets": [FACET]}), **error_responses(*READ_PROBLEMS)},
)
async def facets(
    state: StateDep,
    count: Annotated[int, Query(ge=1, le=1000, description="maximum number of values per attribute")] = 20,
) -> FacetsAnswer:
    """For a page of filters: each attribute with its most frequent values and the range of its numbers.

    They are counted when the gallery is compacted, so the latest writes may be missing.
    """
    counted = await state.admission.run("list", state.gallery.facets, count)
    return FacetsAnswer(facets=[Facet(**facet.model_dump()) for facet in counted])


def _respond(request: Request, stored: StoredItem, *, created: bool = False) -> Response:
    return Response(
        _item_answer(stored, media_address(request)).model_dump_json(),
        201 if created else 200,
        headers={"ETag": etag(stored.version)},
        media_type="application/json",
    )


def _item_answer(stored: StoredItem, media: str) -> ItemAnswer:
    """Converts a stored item; its thumbnails are served below `media`."""
    images = [ImageAnswer(**image.model_dump(), url=f"{media}/{image.digest}.jpg") for image in stored.images]
    return ItemAnswer(**stored.item.model_dump(), images=images, version=stored.version)
