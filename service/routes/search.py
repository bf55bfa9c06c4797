"""The search: a photo or an item in, the items that look like it out."""

import json
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import anyio.to_thread
import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray

from index.gallery.filters import Filter
from index.gallery.types import Found, Hit
from service.auth.dependencies import MaySearch
from service.problems import (
    ACCESS,
    BODIES,
    FETCHES,
    FILTER,
    IMAGES,
    INVALID,
    ITEM_MISSING,
    MALFORMED,
    NOT_READY,
    PHOTO_MISSING,
    SEARCH,
    UNSUPPORTED_BODY,
    URL_OFF,
    documented,
)
from service.requests import Asked, Options, SearchBody, read_asked, read_json
from service.schemas.search import BatchAnswer, BatchBody, Match, MatchedImage, SearchAnswer, shown
from service.search_pipeline import find_photo, milliseconds, photo_bytes, while_connected
from service.state import ServiceState, StateDep

router = APIRouter(tags=["search"], dependencies=[MaySearch])

_PHOTO = {"type": "string", "format": "binary"}
_ERRORS = (
    MALFORMED, *BODIES, UNSUPPORTED_BODY, PHOTO_MISSING, INVALID, FILTER, SEARCH, NOT_READY, URL_OFF, ITEM_MISSING,
    *ACCESS, *IMAGES.values(), *FETCHES.values(),
)  # fmt: skip
_MATCH = {
    "id": "mug-03",
    "title": "Black zigzag mug 'Aster'",
    "url": "",
    "score": 0.868677,
    "attributes": {"brand": "Brimwell", "category": "mug", "colour": "black", "pattern": "zigzag", "price": 16.9},
    "image": {
        "id": "photos/mug-03/06.jpg",
        "url": "/media/dced8adde8f3b15dc5b7291858618ed87f594d8062e5d337cd8641d12b40e4c1.jpg",
    },
    "vector": None,
}
_FOUND = {
    "items": [_MATCH],
    "cursor": "WzEsIC04Njg2NzcsIDIzLCAiMjA4ZTUzOThhZDMwODczY2ZhIl0",
    "bundle": "90025e0b3c7c4321",
    "generation": "000000000009-90025e0b3c7c4321",
    "change": 9,
    "milliseconds": {"decode": 1.8, "wait": 0.03, "embed": 5.18, "search": 0.55},
}
"""The answer that docs/search.md shows."""
_FOUND_ALIKE = {
    **_FOUND,
    "items": [{**_MATCH, "score": 0.912044}],
    "cursor": "WzEsIC05MTIwNDQsIDIzLCAiOGQxYzA3ZjI2YjkzNDVlYTcwIl0",
    "milliseconds": {"decode": 0.0, "wait": 0.0, "embed": 0.0, "search": 0.51},
}
_BASE64 = "/9j/4AAQSkZJRg..."
_MUGS = {"category": "mug", "price": {"lt": 20}}


def _batch_body() -> dict[str, Any]:
    schema = BatchBody.model_json_schema()
    schema["properties"]["searches"]["items"] = schema.pop("$defs")["SearchBody"]
    searches = [{"image": _BASE64, "top": 1}, {"item_id": "mug-1", "top": 1, "filter": _MUGS, "min_score": 0.8}]
    shown = {"like a photo and like an item": {"value": {"searches": searches}}}
    content = {"application/json": {"schema": schema, "examples": shown}}
    return {"requestBody": {"required": True, "content": content}}


def _body() -> dict[str, Any]:
    """The forms that a search may have; FastAPI cannot derive them from a route that reads its body itself."""
    schema = SearchBody.model_json_schema(ref_template="#/components/schemas/{model}")
    return {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": _form(),
                # JSON cannot show the bytes of a photo, so words do.
                "image/*": {"schema": {**_PHOTO, "description": "the whole file, as `curl --data-binary @photo.jpg`"}},
                "application/json": {
                    "schema": schema,
                    "examples": {
                        "more like this": {"value": {"item_id": "mug-1", "top": 5, "filter": _MUGS}},
                        "a part of a photo": {"value": {"image": _BASE64, "box": [0.1, 0.1, 0.9, 0.9]}},
                        "a photo by its address": {"value": {"image_url": "https://cdn.shop.example/mug-1.jpg"}},
                    },
                },
            },
        },
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": part, "description": part.get("description", "")}
            for name, part in _address_options().items()
        ],
    }


def _form() -> dict[str, Any]:
    """The photo as a file, and options in fields as they stand in addresses."""
    options = _address_options()
    options["exclude"]["maxItems"] = 10  # a form has 16 fields at most, and there are six other options
    photo = {**_PHOTO, "description": "the photo, as a file"}
    schema = {"type": "object", "required": ["image"], "properties": {"image": photo, **options}}
    fields = {
        "image": "(the bytes of photo.jpg)",
        "top": 5,
        "filter": json.dumps(_MUGS),
        "min_score": 0.2,
        "box": "0.1,0.1,0.9,0.9",
        "exclude": ["mug-2", "mug-7"],
        "include": "attributes,vectors",
    }
    shown = {
        "a photo alone": {"value": {"image": fields["image"]}},
        "with options": {"value": fields},
    }
    return {"schema": schema, "examples": shown}


def _address_options() -> dict[str, dict[str, Any]]:
    parts = Options.model_json_schema()["properties"]
    text = {"type": "string"}
    return {
        "top": parts["top"],
        "filter": {**text, "description": parts["filter"]["description"] + ", as JSON"},
        "min_score": {"type": "number", "minimum": -1, "maximum": 1, "description": parts["min_score"]["description"]},
        "box": {**text, "description": parts["box"]["description"] + ", with commas"},
        "exclude": {"type": "array", "items": text, "maxItems": 1000, "description": parts["exclude"]["description"]},
        "cursor": {**text, "maxLength": 500, "description": parts["cursor"]["description"]},
        "include": {**text, "description": "attributes, vectors, or both with a comma"},
    }


@router.post(
    "/v1/search",
    summary="Find the items that look like a photo, or like an item",
    responses={200: shown(_FOUND), **documented(*_ERRORS)},
    openapi_extra=_body(),
)
async def search(request: Request, state: StateDep) -> SearchAnswer:
    """The photo is the file field `image` of a form, the whole body with its own `image/...` type, or base64 in JSON;
    JSON may also name the photo's address, where that is enabled, or an item of the gallery. Options stand in the
    address, the form or the JSON.
    """
    state.check_permits()
    asked = await read_asked(request)
    with state.permit():
        return await while_connected(request, _answer(state, asked, _media(request)))


@router.post(
    "/v1/search/batch",
    summary="Find the items that look like each of several photos",
    responses={200: shown({"answers": [_FOUND, _FOUND_ALIKE]}), **documented(*_ERRORS)},
    openapi_extra=_batch_body(),
)
async def search_batch(request: Request, state: StateDep) -> BatchAnswer:
    """Each search is answered as it would be alone, in the order given; the first problem is that of the whole."""
    state.check_permits()
    searches = (await read_json(request, BatchBody)).asked(state.settings.max_batch)
    with state.permit():
        return await while_connected(request, _answer_all(state, searches, _media(request)))


async def _answer_all(state: ServiceState, searches: list[Asked], media: str) -> BatchAnswer:
    # One after the other: the photos of one request must not crowd out those of others.
    return BatchAnswer(answers=[await _answer(state, asked, media) for asked in searches])


async def _answer(state: ServiceState, asked: Asked, media: str) -> SearchAnswer:
    options, bounds = asked.options, _bounds(asked.options, asked.filter)
    if asked.item_id is not None:
        like = partial(state.gallery.search_item, asked.item_id, **bounds)
        listed = await anyio.to_thread.run_sync(_list, state, like, options, media, limiter=state.searchers)
        looked = None
    else:
        photo = await photo_bytes(state, asked.photo, asked.image_url)

        def near(vectors: NDArray[np.float32], bundle_id: str) -> _Listed:
            search = partial(state.gallery.search, vectors, bundle_id=bundle_id, **bounds)
            return _list(state, search, options, media)

        listed, looked = await find_photo(state, photo, options.box, near)
    found = listed.found
    state.telemetry.stage("search", listed.seconds)
    state.telemetry.saw(found.generation, found.change)
    return SearchAnswer(
        items=listed.items,
        cursor=found.cursor,
        bundle=found.bundle_id,
        generation=found.generation,
        change=found.change,
        milliseconds=milliseconds(looked, listed.seconds),
    )


class _Listed(NamedTuple):
    """What a search found, how it is told, and the seconds that finding it took."""

    found: Found
    items: list[Match]
    seconds: float


def _list(state: ServiceState, search: Callable[[], Found], options: Options, media: str) -> _Listed:
    """Searches and reads the items at one go: every change of threads costs as much as a search."""
    begun = perf_counter()
    found = search()
    seconds = perf_counter() - begun
    items = [_match(state, hit, options, found.bundle_id, media) for hit in found.hits[0]]
    return _Listed(found, items, seconds)


def _bounds(options: Options, wanted: Filter | None) -> dict[str, Any]:
    return {
        "top": options.top,
        "filter": wanted,
        "min_score": options.min_score,
        "exclude": options.exclude,
        "cursor": options.cursor,
    }


def _match(state: ServiceState, hit: Hit, options: Options, bundle: str, media: str) -> Match:
    item, image = hit.item, hit.image
    vector = None
    if "vectors" in options.include:
        stored = state.gallery.item_vectors(item.id, bundle).get(image.id)
        vector = None if stored is None else stored.tolist()
    return Match(
        id=item.id,
        title=item.title,
        url=item.url,
        score=hit.score,
        attributes=item.attributes if "attributes" in options.include else {},
        image=MatchedImage(id=image.id, url=f"{media}/{image.digest}.jpg"),
        vector=vector,
    )


def _media(request: Request) -> str:
    return f"{request.scope.get('root_path', '')}/media"
