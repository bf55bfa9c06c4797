"""Stores, reads, changes and removes items; the next search reflects each change."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import to_json
from starlette.routing import Match
from starlette.types import Scope

from index import items
from index.gallery.filters import Filter
from index.gallery.types import StoredItem
from index.items import MAX_FACETS, MAX_ID_LENGTH, AttributeName
from service import item_writer
from service.answers import AnswerWriter, join_items
from service.auth.dependencies import MaySearch, MayWrite
from service.openapi import (
    DELETE_PROBLEMS,
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
from service.problems import FILTER_INVALID, INDEX_UNAVAILABLE, INVALID, ITEM_MISSING, ProblemError
from service.requests import (
    Conditions,
    KnownQuery,
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
from service.state import AnswerDep, ServiceState, StateDep


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
    response_model=ItemsAnswer,
    dependencies=[MaySearch, KnownQuery],
    responses={
        200: example_response({"items": [ITEM_ANSWER], "cursor": "mug-01", "hints": []}),
        **error_responses(FILTER_INVALID, INDEX_UNAVAILABLE, *READ_PROBLEMS),
    },
)
async def list_items(
    request: Request,
    state: StateDep,
    answer: AnswerDep,
    filter: Annotated[str | SkipJsonSchema[None], Query(description='as JSON, such as `{"price": {"lt": 20}}`')] = None,
    cursor: Annotated[
        str | SkipJsonSchema[None], Query(max_length=MAX_ID_LENGTH, description="continues an earlier list")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="maximum number of items")] = 100,
) -> Response:
    """Items in the order of their ids, those that match a filter; fewer than `limit` when they are large."""
    wanted = Filter.parse(parse_filter_json(filter)) if filter else Filter()
    media, writer = media_address(request), AnswerWriter(answer)
    page = await state.admission.run("list", _list_page, state, wanted, cursor or "", limit, media, writer)
    return Response(page, media_type="application/json")


def _list_page(state: ServiceState, wanted: Filter, after: str, limit: int, media: str, writer: AnswerWriter) -> bytes:
    items: list[bytes] = []
    cursor = None
    for item in state.gallery.iter_items(filter=wanted, after=after):
        if len(items) == limit or writer.size > state.settings.max_answer_bytes:
            cursor = after
            break
        stored = state.gallery.get_item(item.id)
        # An item that was deleted since it was listed is left out, and so is one that no longer matches.
        if stored and wanted.matches(stored.item.attributes):
            items.append(writer.encode(_item_answer(stored, media)))
        after = item.id
    hints = [] if items else state.gallery.filter_hints(wanted)
    return join_items(ItemsAnswer(items=[], cursor=cursor, hints=hints), "items", items)


@router.get(
    "/v1/items/{item_id}",
    summary="Read an item",
    response_model=ItemAnswer,
    dependencies=[MaySearch, KnownQuery],
    responses={200: item_response(), 304: NOT_MODIFIED, **error_responses(ITEM_MISSING, *READ_PROBLEMS)},
)
async def get_item(
    item_id: ItemId, request: Request, state: StateDep, conditions: ConditionsDep, answer: AnswerDep
) -> Response:
    stored = await state.admission.run("read", state.gallery.get_item, item_id)
    if stored is None:
        raise item_writer.item_missing(item_id)
    if conditions.excludes(etag(stored.version)):
        return Response(status_code=304, headers={"ETag": etag(stored.version)})
    response = _respond(request, stored)
    answer.add(len(response.body))
    return response


@router.put(
    "/v1/items/{item_id}",
    summary="Store an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite, KnownQuery],
    openapi_extra=ITEM_BODY,
    responses={
        200: item_response(),
        201: {**item_response("The item is new"), "model": ItemAnswer},
        **error_responses(*IMAGE_WRITE_PROBLEMS),
    },
)
async def put_item(item_id: ItemId, request: Request, state: StateDep, conditions: ConditionsDep) -> Response:
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
    dependencies=[MayWrite, KnownQuery],
    openapi_extra=PATCH_BODY,
    responses={200: item_response(), **error_responses(*WRITE_PROBLEMS, ITEM_MISSING)},
)
async def patch_item(item_id: ItemId, request: Request, state: StateDep, conditions: ConditionsDep) -> Response:
    """A JSON merge patch of title, url and attributes: null removes an attribute, and what is left out stays."""
    state.admission.check("write")
    changes = await read_patch(request)
    result = await item_writer.patch_item(state, item_id, conditions, changes)
    return _respond(request, result.stored)


@router.delete(
    "/v1/items/{item_id}",
    summary="Remove an item",
    status_code=204,
    dependencies=[MayWrite, KnownQuery],
    response_description="The item does not exist any more, or never did",
    responses=error_responses(*DELETE_PROBLEMS),
)
async def delete_item(item_id: ItemId, state: StateDep, conditions: ConditionsDep) -> None:
    """Removes an item with its images. The next search does not find it."""
    await item_writer.delete_item(state, item_id, conditions)


@router.put(
    "/v1/items/{item_id}/images/{image_id}",
    summary="Store an image of an item",
    response_model=ItemAnswer,
    dependencies=[MayWrite, KnownQuery],
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
    dependencies=[MayWrite, KnownQuery],
    response_description="The image does not exist any more, or never did",
    responses=error_responses(*DELETE_PROBLEMS),
)
async def delete_image(item_id: ItemId, image_id: ImageId, state: StateDep, conditions: ConditionsDep) -> None:
    """The item stays, even without images: it is then listed, but no search finds it."""
    await item_writer.delete_image(state, item_id, image_id, conditions)


@router.get(
    "/v1/facets",
    summary="The attributes that items have",
    response_model=FacetsAnswer,
    dependencies=[MaySearch, KnownQuery],
    responses={
        200: example_response({"facets": [FACET], "left_out": []}),
        **error_responses(FILTER_INVALID, INDEX_UNAVAILABLE, *READ_PROBLEMS),
    },
)
async def list_facets(
    state: StateDep,
    answer: AnswerDep,
    name: Annotated[
        list[AttributeName],
        Query(default_factory=list, max_length=MAX_FACETS, description="an attribute; repeat it for several"),
    ],
    filter: Annotated[
        str | SkipJsonSchema[None], Query(description="as JSON: only items that match it are counted")
    ] = None,
    contains: Annotated[
        str | SkipJsonSchema[None],
        Query(min_length=1, max_length=200, description="only values with this text, in any case; needs one `name`"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="maximum number of values per attribute")] = 20,
) -> Response:
    """For a page of filters: each attribute with its most frequent values and the range of its numbers.

    Without names, the attributes that most items have, at most 100. They are counted when the gallery is compacted, so
    the latest writes may be missing.
    """
    if contains and len(name) != 1:
        raise ProblemError(INVALID, f"contains: {len(name)} attributes are named.", "Name the one to search with name.")
    wanted = Filter.parse(parse_filter_json(filter)) if filter else None
    read = partial(state.gallery.facets, limit, name, filter=wanted, contains=contains or "")
    facets = await state.admission.run(
        "list", _facets_page, read, state.settings.max_answer_bytes, AnswerWriter(answer)
    )
    return Response(facets, media_type="application/json")


def _facets_page(read: Callable[[], Iterable[items.Facet]], max_bytes: int, writer: AnswerWriter) -> bytes:
    """Returns the attributes that fit into an answer, and the names of the others."""
    encoded: dict[str, bytes] = {}
    left_out = []
    for facet in read():
        size = 100 + len(facet.name) + sum(len(str(value)) + 32 for value, _ in facet.values)
        if writer.size + size > max_bytes:
            left_out.append(facet.name)
        else:
            encoded[facet.name] = writer.encode(Facet.of(facet))
    facets = [encoded[name] for name in sorted(encoded)]
    return join_items(FacetsAnswer(facets=[], left_out=left_out), "facets", facets)


def _respond(request: Request, stored: StoredItem, *, created: bool = False) -> Response:
    return Response(
        to_json(_item_answer(stored, media_address(request))),
        201 if created else 200,
        headers={"ETag": etag(stored.version)},
        media_type="application/json",
    )


def _item_answer(stored: StoredItem, media: str) -> ItemAnswer:
    """Converts a stored item; its thumbnails are served below `media`."""
    images = [ImageAnswer(**image.model_dump(), url=f"{media}/{image.digest}.jpg") for image in stored.images]
    item = stored.item
    return ItemAnswer(
        id=item.id,
        title=item.title or None,
        url=item.url or None,
        attributes=item.own_attributes,
        expires_at=item.expires_at,
        images=images,
        version=stored.version,
    )
