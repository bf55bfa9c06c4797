"""The OpenAPI document: examples of answers and errors, and the request bodies that FastAPI cannot derive itself.

Routes read their bodies themselves, so that a body is not looked at before the API key is checked.
"""

import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from service.problems import (
    ACCESS_PROBLEMS,
    ANSWER_TOO_LARGE,
    BODY_PROBLEMS,
    BODY_UNSUPPORTED,
    CONFLICT,
    FETCH_PROBLEMS,
    FILTER_INVALID,
    HOST_NOT_ALLOWED,
    IMAGE_MISSING,
    IMAGE_PROBLEMS,
    INTERNAL,
    INVALID,
    ITEM_MISSING,
    MALFORMED,
    MEDIA_TYPE,
    NOT_READY,
    OVERLOADED,
    READ_ONLY,
    SEARCH_INVALID,
    STORAGE_FULL,
    URL_DISABLED,
    ProblemType,
)
from service.schemas.items import ImageBody, ItemBody, ItemPatch, PhotoBody
from service.schemas.jobs import JobBody
from service.schemas.problem import Problem
from service.schemas.search import BatchBody, SearchBody, SearchOptions

Json = dict[str, Any]

NOT_MODIFIED = {"description": "The copy with this ETag is current"}
_PHOTO_PROBLEMS = (NOT_READY, URL_DISABLED, *IMAGE_PROBLEMS.values(), *FETCH_PROBLEMS.values())
SEARCH_PROBLEMS = (
    MALFORMED, ANSWER_TOO_LARGE, *BODY_PROBLEMS, BODY_UNSUPPORTED, IMAGE_MISSING, INVALID, FILTER_INVALID,
    SEARCH_INVALID, ITEM_MISSING,
    *ACCESS_PROBLEMS, *_PHOTO_PROBLEMS,
)  # fmt: skip
READ_PROBLEMS = (INVALID, OVERLOADED, *ACCESS_PROBLEMS)
"""The problems of a request without a body."""
WRITE_PROBLEMS = (
    MALFORMED, *BODY_PROBLEMS, BODY_UNSUPPORTED, INVALID, CONFLICT, STORAGE_FULL, READ_ONLY, *ACCESS_PROBLEMS,
)  # fmt: skip
IMAGE_WRITE_PROBLEMS = (*WRITE_PROBLEMS, *_PHOTO_PROBLEMS)

_PHOTO = {"type": "string", "format": "binary"}
_BASE64 = "/9j/4AAQSkZJRg..."
_BY_ADDRESS = {"image_url": "https://cdn.shop.example/mug-1.jpg"}
_MUGS = {"category": "mug", "price": {"lt": 20}}
_MATCH = {
    "id": "mug-03",
    "title": "Black zigzag mug 'Aster'",
    "url": "",
    "score": 0.888108,
    "attributes": {"brand": "Brimwell", "category": "mug", "colour": "black", "pattern": "zigzag", "price": 16.9},
    "image": {
        "id": "photos/mug-03/06.jpg",
        "url": "/media/dced8adde8f3b15dc5b7291858618ed87f594d8062e5d337cd8641d12b40e4c1.jpg",
    },
    "vector": None,
}
SEARCH_ANSWER = {
    "items": [_MATCH],
    "cursor": "WzEsIC04ODgxMDgsIDIzLCAiYTkyNGEyNmQ1OWQyMzI4ZmU5Il0",
    "bundle": "c24633cb5e86632c",
    "revision": 9,
    "milliseconds": {"decode": 0.99, "wait": 0.01, "embed": 2.24, "search": 0.3},
}
"""The answer in docs/search.md."""
SIMILAR_ITEM_ANSWER = {
    **SEARCH_ANSWER,
    "items": [{**_MATCH, "score": 0.912044}],
    "cursor": "WzEsIC05MTIwNDQsIDIzLCAiOGQxYzA3ZjI2YjkzNDVlYTcwIl0",
    "milliseconds": {"decode": 0.0, "wait": 0.0, "embed": 0.0, "search": 0.51},
}
_ITEM = {
    "title": "A red mug",
    "url": "https://shop.example/mug-1",
    "attributes": {"category": "mug", "price": 12.5, "dishwasher": True},
}
ITEM_ANSWER = {
    "id": "mug-1",
    **_ITEM,
    "images": [{"id": "front.jpg", "digest": "3f" * 32, "url": f"/media/{'3f' * 32}.jpg"}],
    "version": 7,
}
FACET = {"name": "category", "values": [["mug", 12], ["bowl", 5]], "minimum": None, "maximum": None, "distinct": 2}
STATUS = {
    "gallery": {
        "items": 144,
        "images": 1152,
        "revision": 9,
        "index": {
            "engine": "faiss",
            "name": "000000000009-c24633cb5e86632c",
            "revision": 9,
            "pending": 0,
            "kind": "exact",
            "recall": 1.0,
        },
    },
    "bundle": {
        "id": "c24633cb5e86632c",
        "backbone": "efficientnet_lite0",
        "loss": "proxy_isa",
        "dimension": 512,
        "data": "sample",
        "metrics": {"recall@1": 0.988, "map@r": 0.854},
        "untrained_metrics": {"recall@1": 0.829, "map@r": 0.517},
    },
    "provider": "CPUExecutionProvider",
    "keys": False,
    "urls": False,
    "limits": {"max_body_bytes": 20971520, "max_pixels": 50000000, "max_batch": 16},
}
METRICS = """\
# HELP lookalike_requests_total Requests answered; status 499: the client left.
# TYPE lookalike_requests_total counter
lookalike_requests_total{method="POST",route="/v1/search",status="200"} 1027.0
# HELP lookalike_gallery_items Items in the gallery.
# TYPE lookalike_gallery_items gauge
lookalike_gallery_items 144.0
# HELP lookalike_ready 1 while /readyz reports that searches can be answered.
# TYPE lookalike_ready gauge
lookalike_ready 1.0
"""


class DescribedApp(FastAPI):
    """FastAPI whose document also holds the schemas that only errors and hand-written bodies refer to."""

    def openapi(self) -> Json:
        document = super().openapi()
        for shape in (Problem, ImageBody):
            document["components"]["schemas"][shape.__name__] = shape.model_json_schema()
        return document


def example_response(example: object, description: str = "") -> Json:
    """Returns an entry of a route's `responses` with an example of its answer."""
    described = {"description": description} if description else {}
    return {**described, "content": {"application/json": {"example": example}}}


def item_response(description: str = "The item as it is stored") -> Json:
    """Returns an entry of a route's `responses` for an item with its ETag."""
    tag = {"ETag": {"description": "the item's version in quotes", "schema": {"type": "string"}}}
    return {**example_response(ITEM_ANSWER, description), "headers": tag}


def error_responses(*types: ProblemType) -> dict[int | str, Json]:
    """Returns the `responses` of a route with these problems and those of every route, each with an example."""
    responses: dict[int | str, Json] = {}
    for type in (*types, HOST_NOT_ALLOWED, INTERNAL):
        example = type.problem(type.detail, type.remedy, request_id="5f0c2a4e9b7d4c1f")
        response = responses.setdefault(
            type.status,
            {
                "description": HTTPStatus(type.status).phrase,
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}},
            },
        )
        examples = response["content"][MEDIA_TYPE]["examples"]
        examples[type.slug] = {"summary": type.title, "value": example.model_dump()}
    return responses


def _schema(shape: type[BaseModel]) -> Json:
    schema = shape.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return schema


def _body(content: Json) -> Json:
    """Returns the `openapi_extra` of a route that reads a body of one of these media types itself."""
    return {"requestBody": {"required": True, "content": content}}


def _content(schema: Json, examples: Json) -> Json:
    """Returns the description of a body of one media type, with its examples by name."""
    return {"schema": schema, "examples": {name: {"value": example} for name, example in examples.items()}}


def _options() -> dict[str, Json]:
    """Returns the options of a search as they are written in a query string or form."""
    parts = SearchOptions.model_json_schema()["properties"]
    text = {"type": "string"}
    return {
        "top": parts["top"],
        "filter": {**text, "description": parts["filter"]["description"] + ", as JSON"},
        "min_score": {"type": "number", "minimum": -1, "maximum": 1, "description": parts["min_score"]["description"]},
        "box": {**text, "description": parts["box"]["description"] + ", separated by commas"},
        "exclude": {"type": "array", "items": text, "maxItems": 1000, "description": parts["exclude"]["description"]},
        "cursor": {**text, "maxLength": 500, "description": parts["cursor"]["description"]},
        "include": {**text, "description": "attributes, vectors, or both separated by a comma"},
    }


def _search_form() -> Json:
    """Returns the form of a search: the photo as a file, and the options as fields."""
    options = _options()
    options["exclude"]["maxItems"] = 10  # a form has 16 fields at most, and there are six other options
    photo = {**_PHOTO, "description": "the photo, as a file"}
    fields = {
        "image": "(the bytes of photo.jpg)",
        "top": 5,
        "filter": json.dumps(_MUGS),
        "min_score": 0.2,
        "box": "0.1,0.1,0.9,0.9",
        "exclude": ["mug-2", "mug-7"],
        "include": "attributes,vectors",
    }
    schema = {"type": "object", "required": ["image"], "properties": {"image": photo, **options}}
    return _content(schema, {"a photo alone": {"image": fields["image"]}, "with options": fields})


def _batch_content() -> Json:
    schema = BatchBody.model_json_schema()
    schema["properties"]["searches"]["items"] = schema.pop("$defs")["SearchBody"]
    searches = [{"image": _BASE64, "top": 1}, {"item_id": "mug-1", "top": 1, "filter": _MUGS, "min_score": 0.8}]
    return _content(schema, {"by a photo and by an item": {"searches": searches}})


SEARCH_BODY: Json = {
    **_body(
        {
            "multipart/form-data": _search_form(),
            # JSON cannot show the bytes of a photo, so a description does.
            "image/*": {"schema": {**_PHOTO, "description": "the complete file, as `curl --data-binary @photo.jpg`"}},
            "application/json": _content(
                _schema(SearchBody),
                {
                    "similar items": {"item_id": "mug-1", "top": 5, "filter": _MUGS},
                    "a part of a photo": {"image": _BASE64, "box": [0.1, 0.1, 0.9, 0.9]},
                    "a photo by its address": _BY_ADDRESS,
                },
            ),
        }
    ),
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": part, "description": part.get("description", "")}
        for name, part in _options().items()
    ],
}
BATCH_BODY = _body({"application/json": _batch_content()})
_ITEM_WITH_IMAGE = {**_ITEM, "images": [{"id": "front.jpg", "image": _BASE64}]}
_ITEM_FIELDS = {
    "item": {"type": "string", "description": "the same as JSON", "examples": [json.dumps(_ITEM)]},
    "image": {"type": "array", "items": _PHOTO, "description": "photos; the name of each file is its image's id"},
}
ITEM_BODY = _body(
    {
        "application/json": _content(_schema(ItemBody), {"without images": _ITEM, "with an image": _ITEM_WITH_IMAGE}),
        "multipart/form-data": {"schema": {"type": "object", "required": ["item"], "properties": _ITEM_FIELDS}},
    }
)
IMAGE_BODY = _body(
    {
        "image/*": {"schema": _PHOTO},
        "application/json": _content(_schema(PhotoBody), {"by its address": _BY_ADDRESS}),
    }
)
_NIGHTLY = {"source": "shop", "delete_missing": True}
JOB_BODY = _body({"application/json": _content(JobBody.model_json_schema(), {"nightly": _NIGHTLY})})
_PATCH = _content(_schema(ItemPatch), {"a new price": {"attributes": {"price": 9.5, "discount": None}}})
PATCH_BODY = _body({"application/merge-patch+json": _PATCH, "application/json": _PATCH})
