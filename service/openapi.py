"""The OpenAPI document: examples of answers and errors, and the request bodies that FastAPI cannot derive itself.

Routes read their bodies themselves, so that a body is not looked at before the API key is checked.
"""

import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from index.rankings import Ranking, StoredRanking
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
    INDEX_UNAVAILABLE,
    INTERNAL,
    INVALID,
    ITEM_MISSING,
    LIMIT_EXCEEDED,
    MALFORMED,
    MEDIA_TYPE,
    NOT_READY,
    OVERLOADED,
    RANKING_MISSING,
    READ_ONLY,
    SEARCH_INVALID,
    STORAGE_FULL,
    STORE_FAILED,
    STORE_UNAVAILABLE,
    URL_DISABLED,
    ProblemType,
)
from service.schemas.items import ItemBody, ItemPatch, PhotoBody
from service.schemas.jobs import JobBody
from service.schemas.problem import Problem
from service.schemas.search import BatchBody, SearchBody, SearchOptions

Json = dict[str, Any]

NOT_MODIFIED = {"description": "The copy with this ETag is current"}
_PHOTO_PROBLEMS = (NOT_READY, URL_DISABLED, *IMAGE_PROBLEMS.values(), *FETCH_PROBLEMS.values())
SEARCH_PROBLEMS = (
    MALFORMED, ANSWER_TOO_LARGE, *BODY_PROBLEMS, BODY_UNSUPPORTED, IMAGE_MISSING, INVALID, FILTER_INVALID,
    SEARCH_INVALID, ITEM_MISSING, RANKING_MISSING, INDEX_UNAVAILABLE,
    *ACCESS_PROBLEMS, *_PHOTO_PROBLEMS,
)  # fmt: skip
READ_PROBLEMS = (INVALID, OVERLOADED, *ACCESS_PROBLEMS)
"""The problems of a request without a body."""
DELETE_PROBLEMS = (CONFLICT, STORAGE_FULL, READ_ONLY, *READ_PROBLEMS)
WRITE_PROBLEMS = (
    MALFORMED, *BODY_PROBLEMS, BODY_UNSUPPORTED, INVALID, LIMIT_EXCEEDED, CONFLICT, STORAGE_FULL, READ_ONLY,
    *ACCESS_PROBLEMS,
)  # fmt: skip
RANKING_PROBLEMS = (
    *BODY_PROBLEMS, INVALID, FILTER_INVALID, LIMIT_EXCEEDED, CONFLICT, STORAGE_FULL, READ_ONLY, *ACCESS_PROBLEMS,
)  # fmt: skip
IMAGE_WRITE_PROBLEMS = (*WRITE_PROBLEMS, *_PHOTO_PROBLEMS)

PHOTO = {"type": "string", "format": "binary"}
_BASE64 = "/9j/4AAQSkZJRg..."
_BY_ADDRESS = {"image_url": "https://cdn.shop.example/mug-01.jpg"}
_MUGS = {"category": "mug", "price": {"lt": 20}}
_RANKING = {
    "group_by": "product",
    "boosts": [
        {"filter": {"in_stock": True}, "weight": 0.1},
        {"attribute": "margin", "from": 0, "to": 0.5, "weight": 0.05},
    ],
    "diversity": 0.2,
}
RANKING_ANSWER = StoredRanking(
    name="home", version=12, stored=1793523600.5, ranking=Ranking.model_validate(_RANKING)
).model_dump(mode="json")
_MATCH = {
    "id": "mug-03",
    "title": "Black zigzag mug 'Aster'",
    "url": None,
    "score": 0.888108,
    "attributes": {"brand": "Brimwell", "category": "mug", "colour": "black", "pattern": "zigzag", "price": 16.9},
    "image": {
        "id": "photos/mug-03/06.jpg",
        "url": "/media/dced8adde8f3b15dc5b7291858618ed87f594d8062e5d337cd8641d12b40e4c1.jpg",
    },
    "vector": None,
    "explanation": None,
}
SEARCH_ANSWER = {
    "items": [_MATCH],
    "cursor": "qSSibVnSMo_pAAAAAAAAAAAAAAAAAAAAAAABAw",
    "bundle": "0602e88160021fb6",
    "revision": 9,
    "milliseconds": {"decode": 0.99, "wait": 0.01, "embed": 2.24, "search": 0.3},
    "stale_seconds": 0.0,
    "window": None,
    "hints": [],
}
"""The answer in docs/search.md."""
SIMILAR_ITEM_ANSWER = {
    **SEARCH_ANSWER,
    "items": [{**_MATCH, "score": 0.912044}],
    "cursor": "jRwH8muTRepwAAAAAAAAAAAAAAAAAAAAAAABAw",
    "milliseconds": {"decode": 0.0, "wait": 0.0, "embed": 0.0, "search": 0.51},
}
_ITEM = {
    "title": "A red mug",
    "url": "https://shop.example/mug-01",
    "attributes": {"category": "mug", "price": 12.5, "dishwasher": True, "tags": ["new", "gift"]},
    "expires_at": "2099-12-31T23:00:00Z",
}
ITEM_ANSWER = {
    "id": "mug-01",
    **_ITEM,
    "images": [{"id": "front.jpg", "digest": "3f" * 32, "url": f"/media/{'3f' * 32}.jpg"}],
    "version": 7,
}
FACET = {
    "name": "category",
    "values": [{"value": "mug", "count": 12}, {"value": "bowl", "count": 5}],
    "minimum": None,
    "maximum": None,
    "distinct": 2,
}
STATUS = {
    "gallery": {
        "items": 144,
        "images": 1152,
        "unsearchable": 0,
        "revision": 9,
        "index": {
            "engine": "faiss",
            "name": "000000000009-0602e88160021fb6",
            "revision": 9,
            "pending": 0,
            "kind": "exact",
            "recall": 1.0,
            "device": "cpu",
        },
    },
    "bundle": {
        "id": "0602e88160021fb6",
        "backbone": "efficientnet_lite0",
        "loss": "proxy_isa",
        "dimension": 512,
        "data": "sample",
        "metrics": {"recall@1": 0.988, "map@r": 0.854},
        "untrained_metrics": {"recall@1": 0.829, "map@r": 0.517},
    },
    "provider": "CPUExecutionProvider",
    "keys": False,
    "scope": None,
    "urls": False,
    "limits": {"max_body_bytes": 20971520, "max_pixels": 50000000, "max_batch": 16, "max_examples": 16},
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
        if self.openapi_schema is None:
            document = super().openapi()
            document["components"]["schemas"] |= _schemas()
            self.openapi_schema = document
        return self.openapi_schema


def _schemas() -> Json:
    """Returns the schemas of errors and request bodies by name."""
    shapes = (Problem, SearchBody, BatchBody, ItemBody, ItemPatch, PhotoBody, JobBody, Ranking)
    _, described = models_json_schema(
        [(shape, "validation") for shape in shapes], ref_template="#/components/schemas/{model}"
    )
    bodies = {name: _describe_defaults(schema) for name, schema in described["$defs"].items()}
    return {**bodies, "SearchForm": _search_form(), "ItemForm": _ITEM_FORM}


def _describe_defaults(schema: Json) -> Json:
    """Moves the defaults of fields into their descriptions.

    Generated clients would send defaults: those of a query string would replace the options in the body. Generated
    types would require such fields.
    """
    if "properties" not in schema:
        return schema
    fields = {}
    for name, field in schema["properties"].items():
        default = field.get("default")
        fields[name] = {key: value for key, value in field.items() if key != "default"}
        if default:
            described = [field["description"].rstrip("."), f"default {json.dumps(default)}"]
            fields[name]["description"] = "; ".join(described)
    return {**schema, "properties": fields}


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def example_response(example: object, description: str = "") -> Json:
    """Returns an entry of a route's `responses` with an example of its answer."""
    described = {"description": description} if description else {}
    return {**described, "content": {"application/json": {"example": example}}}


def item_response(description: str = "The item as it is stored") -> Json:
    """Returns an entry of a route's `responses` for an item with its ETag."""
    tag = {"ETag": {"description": "the item's version in quotes", "schema": {"type": "string"}}}
    return {**example_response(ITEM_ANSWER, description), "headers": tag}


def ranking_response(description: str = "The ranking as it is stored") -> Json:
    """Returns an entry of a route's `responses` for a ranking with its ETag."""
    tag = {"ETag": {"description": "the version in quotes", "schema": {"type": "string"}}}
    return {**example_response(RANKING_ANSWER, description), "headers": tag}


def error_responses(*types: ProblemType) -> dict[int | str, Json]:
    """Returns the `responses` of a route with these problems and those of every route, each with an example."""
    responses: dict[int | str, Json] = {}
    for type in (*types, STORE_FAILED, STORE_UNAVAILABLE, HOST_NOT_ALLOWED, INTERNAL):
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


def _body(content: Json) -> Json:
    """Returns the `openapi_extra` of a route that reads a body of one of these media types itself."""
    return {"requestBody": {"required": True, "content": content}}


def _content(name: str, examples: Json) -> Json:
    """Returns the description of a body that has a schema of this name, with its examples by name."""
    return {"schema": _reference(name), "examples": {name: {"value": example} for name, example in examples.items()}}


def _options() -> dict[str, Json]:
    """Returns the options of a search as they are written in a query string or form.

    Their lengths are left out: what is too long for a URL is refused before it is parsed.
    """
    parts = _describe_defaults(SearchOptions.model_json_schema())["properties"]
    text = {"type": "string"}
    return {
        "limit": parts["limit"],
        "filter": {**text, "description": parts["filter"]["description"] + ", as JSON"},
        "min_score": {"type": "number", "minimum": -1, "maximum": 1, "description": parts["min_score"]["description"]},
        "box": {**text, "description": parts["box"]["description"] + ", separated by commas"},
        "exclude": {"type": "array", "items": text, "description": parts["exclude"]["description"]},
        "cursor": {**text, "description": parts["cursor"]["description"]},
        "include": {**text, "description": "attributes (the default), vectors, or both separated by a comma"},
        "combine": {**text, "description": parts["combine"]["description"] + "; mean or best"},
        "ranking": {**text, "description": parts["ranking"]["description"] + "; rules as JSON"},
        "explain": {"type": "boolean", "description": parts["explain"]["description"]},
    }


def _search_form() -> Json:
    """Returns the form of a search: the photo as a file, and the options as fields."""
    options = _options()
    options["exclude"]["maxItems"] = 10  # a form has 20 fields at most, and there are nine other options
    photo = {**PHOTO, "description": "the photo, as a file; repeat it to combine several"}
    properties = {"image": photo, **options}
    return {"title": "SearchForm", "type": "object", "required": ["image"], "properties": properties}


_FORM_FIELDS = {
    "image": "(the bytes of photo.jpg)",
    "limit": 5,
    "filter": json.dumps(_MUGS),
    "min_score": 0.2,
    "box": "0.1,0.1,0.9,0.9",
    "exclude": ["mug-02", "mug-07"],
    "include": "attributes,vectors",
    "combine": "best",
    "ranking": json.dumps(_RANKING),
    "explain": True,
}
_ITEM_FORM: Json = {
    "title": "ItemForm",
    "type": "object",
    "required": ["item"],
    "properties": {
        "item": {"type": "string", "description": "the same as JSON", "examples": [json.dumps(_ITEM)]},
        "image": {"type": "array", "items": PHOTO, "description": "photos; the name of each file is its image's id"},
    },
}
_RAW_PHOTO: Json = {
    "schema": {
        **PHOTO,
        "description": "the complete file; its own type, such as image/jpeg, is accepted as well",
    }
}
"""JSON cannot show the bytes of a photo, so a description does. No generator supports the type image/*."""
SEARCH_BODY: Json = {
    **_body(
        {
            "application/json": _content(
                "SearchBody",
                {
                    "similar items": {"item_id": "mug-01", "limit": 5, "filter": _MUGS},
                    "a part of a photo": {"image": _BASE64, "box": [0.1, 0.1, 0.9, 0.9]},
                    "a photo by its address": _BY_ADDRESS,
                    "like these, unlike that": {
                        "examples": [{"item_id": "mug-01"}, {"image": _BASE64}, {"item_id": "mug-02", "weight": -0.5}]
                    },
                    "one per product, varied": {"item_id": "mug-01", "ranking": _RANKING, "explain": True},
                },
            ),
            "multipart/form-data": _content(
                "SearchForm", {"a photo alone": {"image": _FORM_FIELDS["image"]}, "with options": _FORM_FIELDS}
            ),
            "application/octet-stream": _RAW_PHOTO,
        }
    ),
    "parameters": [
        {"name": name, "in": "query", "required": False, "schema": part, "description": part.get("description", "")}
        for name, part in _options().items()
    ],
}
_SEARCHES = [{"image": _BASE64, "limit": 1}, {"item_id": "mug-01", "limit": 1, "filter": _MUGS, "min_score": 0.8}]
BATCH_BODY = _body({"application/json": _content("BatchBody", {"by a photo and by an item": {"searches": _SEARCHES}})})
_ITEM_WITH_IMAGE = {**_ITEM, "images": [{"id": "front.jpg", "image": _BASE64}]}
ITEM_BODY = _body(
    {
        "application/json": _content("ItemBody", {"without images": _ITEM, "with an image": _ITEM_WITH_IMAGE}),
        "multipart/form-data": {"schema": _reference("ItemForm")},
    }
)
IMAGE_BODY = _body(
    {
        "application/json": _content("PhotoBody", {"by its address": _BY_ADDRESS}),
        "application/octet-stream": _RAW_PHOTO,
    }
)
JOB_BODY = _body({"application/json": _content("JobBody", {"nightly": {"source": "shop", "delete_missing": True}})})
RANKING_BODY = _body({"application/json": _content("Ranking", {"one per product, varied": _RANKING})})
_PATCH = _content("ItemPatch", {"a new price": {"attributes": {"price": 9.5, "discount": None}}})
PATCH_BODY = _body({"application/merge-patch+json": _PATCH, "application/json": _PATCH})
