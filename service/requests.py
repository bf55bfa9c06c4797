"""Parses HTTP requests (multipart, raw image or JSON) into values; raises a problem that names the mistake."""

import asyncio
import base64
import binascii
from collections.abc import Coroutine, Iterable
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import unquote

import anyio
import anyio.lowlevel
from fastapi import Depends, Header, Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile

from index.gallery.filters import Filter
from index.gallery.types import Bounds
from index.items import EXPIRES_AT, MAX_ID_LENGTH, Item
from index.rankings import MAX_EXAMPLES
from service.problems import BODY_UNSUPPORTED, IMAGE_MISSING, INVALID, ProblemError, invalid_request
from service.schemas.items import ItemBody, ItemPatch, PhotoBody
from service.schemas.search import BatchBody, Box, SearchBody, SearchOptions

_MAX_VALUES = 100_000
"""Values of a JSON body, counted by its commas and brackets: each takes up to 250 bytes of memory, and an empty list is
two bytes of JSON. Photos in base64 have none of them, and 16 searches that exclude 1,000 items each have 16,000."""
_EXAMPLES_PER_SEARCH = 4
"""Photos and items that the searches of a batch may have on average."""
_MAX_FIELDS = 20
"""Fields of a form: ten excluded ids, and the other options."""
Shape = TypeVar("Shape", bound=BaseModel)
Result = TypeVar("Result")


class Photo(NamedTuple):
    """A photo that came with a request, or the address to fetch it from."""

    data: bytes | None = None
    url: str | None = None


class QueryExample(NamedTuple):
    """A photo, or a part of it, or an item of the gallery that a search is for; or not, with a negative weight."""

    photo: Photo = Photo()
    item_id: str | None = None
    box: Box | None = None
    weight: float = 1.0


class SearchRequest(NamedTuple):
    """A search: its options, and the examples that it is for."""

    options: SearchOptions
    filter: Filter | None
    examples: list[QueryExample]

    @property
    def bounds(self) -> Bounds:
        """The options that the gallery applies, as its keyword arguments."""
        options = self.options
        return {
            "top": options.limit,
            "filter": self.filter,
            "min_score": options.min_score,
            "exclude": options.exclude,
            "cursor": options.cursor,
            "ranking": options.ranking,
            "explain": options.explain,
        }

    @classmethod
    def from_options(cls, options: SearchOptions, examples: list[QueryExample]) -> "SearchRequest":
        """Makes a request whose filter is parsed now: unlike a parsed one, its document may be as large as the body."""
        filter = Filter.parse(options.filter) if options.filter else None
        return cls(options.model_copy(update={"filter": {}}), filter, examples)

    @classmethod
    def from_body(cls, body: SearchBody) -> "SearchRequest":
        """Makes a request of a JSON body, whose photos are decoded."""
        options = SearchOptions.model_construct(**{name: getattr(body, name) for name in SearchOptions.model_fields})
        if body.examples is None:
            photo = Photo(_decode_base64(body.image), body.image_url)
            return cls.from_options(options, [QueryExample(photo, body.item_id, body.box)])
        examples = [
            QueryExample(Photo(_decode_base64(one.image), one.image_url), one.item_id, one.box, one.weight)
            for one in body.examples
        ]
        return cls.from_options(options, examples)


class ItemWrite(NamedTuple):
    """What an item becomes; without photos its images stay."""

    body: ItemBody
    photos: dict[str, Photo] | None

    def item(self, item_id: str) -> Item:
        body = self.body
        expiry = {EXPIRES_AT: body.expires_at} if body.expires_at else {}
        return Item(id=item_id, title=body.title or "", url=body.url or "", attributes={**body.attributes, **expiry})


class Conditions(NamedTuple):
    """The ETags of If-Match and If-None-Match; an empty header is no condition."""

    if_match: frozenset[str] | None
    if_none_match: frozenset[str]

    def matches(self, tag: str | None) -> bool:
        """Whether If-Match allows an item with this ETag, or with None one that does not exist."""
        return self.if_match is None or (tag is not None and bool({tag, "*"} & self.if_match))

    def excludes(self, tag: str) -> bool:
        """Whether If-None-Match names this ETag, compared weakly, or any."""
        return bool({tag, "*"} & {known.removeprefix("W/") for known in self.if_none_match})


async def read_conditions(
    request: Request,
    if_match: Annotated[
        str | SkipJsonSchema[None], Header(description='only if the ETag is one of these, such as `"7"`')
    ] = None,
    if_none_match: Annotated[
        str | SkipJsonSchema[None], Header(description="not if the ETag is one of these; `*` for any")
    ] = None,
) -> Conditions:
    """Reads the headers of a request, which may span several lines; the parameters only describe them."""
    return Conditions(parse_etags(request, "if-match"), parse_etags(request, "if-none-match") or frozenset())


def parse_etags(request: Request, header: str) -> frozenset[str] | None:
    """Returns the ETags that a header lists, or None without such a header or with an empty one."""
    lines = [line for line in request.headers.getlist(header) if line.strip()]
    return frozenset(tag for line in lines for part in line.split(",") if (tag := part.strip())) if lines else None


async def check_query(request: Request) -> None:
    """Refuses options in the query string that the OpenAPI document does not describe for the route."""
    if not request.query_params:
        return
    operation = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise invalid_request([{"type": "extra_forbidden", "loc": (name,)} for name in unknown], known)


KnownQuery = Depends(check_query)
"""The dependency of routes that refuse unknown options; after the one that checks the key."""


def etag(version: int) -> str:
    """Returns the ETag of an item's version."""
    return f'"{version}"'


def media_address(request: Request) -> str:
    """Returns the address below which thumbnails are served."""
    return f"{request.scope.get('root_path', '')}/media"


class ClientLeft(Exception):
    """The client closed the connection before it got an answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits the work; cancels it and raises ClientLeft when the client closes the connection before."""
    with anyio.CancelScope() as scope:  # a thread that has begun is waited for: it holds memory that is counted
        watcher = asyncio.create_task(_cancel_on_disconnect(request, scope))
        try:
            return await work
        finally:
            watcher.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()
    raise ClientLeft


async def _cancel_on_disconnect(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


# Searches


async def read_search(request: Request) -> SearchRequest:
    """Reads a search; options in the query string win over those in the body."""
    query = _parse_options(request.query_params.multi_items())
    media_type = _media_type(request)
    if _is_photo(media_type):
        options = validate(SearchOptions, query)
        return SearchRequest.from_options(options, [QueryExample(Photo(await request.body()), box=options.box)])
    if media_type == "application/json":
        return SearchRequest.from_body(validate(SearchBody, {**_parse_object(await request.body()), **query}))
    if media_type == "multipart/form-data":
        return await _read_search_form(request, query)
    if not media_type:
        raise ProblemError(IMAGE_MISSING, "The request has neither a body nor a Content-Type.")
    raise ProblemError(BODY_UNSUPPORTED, f"The Content-Type is {media_type}.")


async def read_batch(request: Request, max_batch: int) -> list[SearchRequest]:
    """Reads the searches of a batch."""
    searches = (await read_json(request, BatchBody)).searches
    if len(searches) > max_batch:
        raise ProblemError(INVALID, f"searches: {len(searches)} were sent; the limit is {max_batch}.", "Send fewer.")
    examples, limit = sum(len(body.examples or [1]) for body in searches), _EXAMPLES_PER_SEARCH * max_batch
    if examples > limit:
        problem = f"searches: they have {examples} photos and items together; the limit is {limit}."
        raise ProblemError(INVALID, problem, "Send fewer in one request.")
    return [SearchRequest.from_body(body) for body in searches]


async def _read_search_form(request: Request, query: dict[str, Any]) -> SearchRequest:
    _check_charset(request)
    async with request.form(max_files=MAX_EXAMPLES, max_fields=_MAX_FIELDS) as form:
        images = form.getlist("image")
        if not images or not all(isinstance(image, UploadFile) for image in images):
            raise ProblemError(IMAGE_MISSING)
        fields = [(name, value) for name, value in form.multi_items() if name != "image" and isinstance(value, str)]
        options = validate(SearchOptions, {**_parse_options(fields), **query})
        if options.box and len(images) > 1:
            raise ProblemError(
                INVALID, "box: allowed with one photo only.", "Send examples as JSON, each with its own box."
            )
        photos = [Photo(await image.read()) for image in images if isinstance(image, UploadFile)]
        return SearchRequest.from_options(options, [QueryExample(photo, box=options.box) for photo in photos])


def _parse_options(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Parses options of a query string or form: lists with commas or repeated, the filter as JSON."""
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name in ("include", "box"):
            values.setdefault(name, []).extend(part for part in text.split(",") if part)
        elif name == "exclude":
            values.setdefault(name, []).append(text)
        else:
            values[name] = text
    if "filter" in values:
        values["filter"] = parse_filter_json(values["filter"])
    if values.get("ranking", "").lstrip().startswith("{"):
        values["ranking"] = _parse_option_json("ranking", values["ranking"], '{"group_by": "product"}')
    return values


def parse_filter_json(text: str) -> Any:
    """Parses a filter that is written as JSON in a query string or form."""
    return _parse_option_json("filter", text, '{"colour": "red"}')


def _parse_option_json(name: str, text: str, example: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        raise ProblemError(INVALID, f"{name}: {text[:80]!r} is not JSON.", f"Write one such as {example}.") from None


# Items


async def read_item(request: Request, max_photos: int) -> ItemWrite:
    """Reads an item, sent as JSON or as a form with files."""
    media_type = _media_type(request)
    files: list[tuple[str, Photo]] = []
    if media_type == "application/json":
        body = _parse_json(ItemBody, await request.body())
    elif media_type == "multipart/form-data":
        _check_charset(request)
        async with request.form(max_files=max_photos + 1, max_fields=max_photos + 1) as form:
            body, files = await _read_item_form(form)
    else:
        raise _unsupported(media_type, "Send JSON, or a form with the field `item` and files `image`.")
    photos = [(image.id, _photo(image)) for image in body.images or ()] + files
    if len(photos) > max_photos:
        raise ProblemError(INVALID, f"images: {len(photos)} were sent; the limit is {max_photos}.", "Send fewer.")
    by_id = dict(photos)
    if len(by_id) < len(photos):
        raise ProblemError(INVALID, "images: two have the same id.", "Give each photo of an item a unique id.")
    has_photos = body.images is not None or bool(files)
    # Without the photos in base64, which were decoded.
    return ItemWrite(body.model_copy(update={"images": None}), by_id if has_photos else None)


async def _read_item_form(form: FormData) -> tuple[ItemBody, list[tuple[str, Photo]]]:
    """Reads the item in the field `item`, and the photos in the files `image`."""
    text = form.get("item")
    if text is None:
        raise ProblemError(INVALID, "The form has no field `item`.", "Add it, with the item as JSON, at least {}.")
    body = _parse_json(ItemBody, await text.read() if isinstance(text, UploadFile) else text.encode())
    files = []
    for file in form.getlist("image"):
        name = file.filename if isinstance(file, UploadFile) else None
        if not name or len(name) > MAX_ID_LENGTH or not isinstance(file, UploadFile):
            problem = f"A file `image` of the form has the name {(name or '')[:80]!r}."
            raise ProblemError(INVALID, problem, f"Name it by the image's id, of 1 to {MAX_ID_LENGTH} characters.")
        files.append((name, Photo(await file.read())))
    return body, files


async def read_patch(request: Request) -> ItemPatch:
    """Reads a JSON merge patch of an item."""
    media_type = _media_type(request)
    if media_type not in ("application/merge-patch+json", "application/json"):
        raise _unsupported(media_type, "Send a JSON merge patch as application/merge-patch+json.")
    return _parse_json(ItemPatch, await request.body())


async def read_photo(request: Request) -> Photo:
    """Reads a photo, sent as the body itself or within JSON."""
    media_type = _media_type(request)
    if _is_photo(media_type):
        return Photo(await request.body())
    if media_type == "application/json":
        return _photo(_parse_json(PhotoBody, await request.body()))
    raise _unsupported(media_type, "Send the photo itself with its own type (image/...), or JSON.")


def decode_path(text: str) -> str:
    """Decodes a part of a path that was percent-encoded."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ProblemError(
            INVALID,
            f"The path contains {text[:80]}, which is not UTF-8.",
            "Encode the id as UTF-8, then percent-encode it.",
        ) from None


# Bodies


async def read_json(request: Request, shape: type[Shape]) -> Shape:
    """Reads a JSON body. Routes call this themselves, because FastAPI would read the body before it checks the key."""
    media_type = _media_type(request)
    if not (media_type.startswith("application/") and media_type.endswith(("/json", "+json"))):
        problem = f"The Content-Type is {media_type}." if media_type else "The request has no Content-Type."
        raise ProblemError(INVALID, problem, "Send JSON as application/json.")
    return _parse_json(shape, await request.body())


def validate(shape: type[Shape], values: dict[str, Any]) -> Shape:
    """Makes a value of the given shape, or raises the problem of the request that led to it."""
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error.errors(), shape) from None


def _parse_json(shape: type[Shape], body: bytes) -> Shape:
    _check_value_count(body)
    try:
        # Unlike Python's own parser, pydantic's refuses lone surrogates, which could not be stored.
        return shape.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error.errors(), shape) from None


def _parse_object(body: bytes) -> dict[str, Any]:
    _check_value_count(body)
    try:
        document = from_json(body)
    except ValueError as error:
        raise ProblemError(INVALID, f"The body is not JSON: {error}.", "Correct it and send it again.") from None
    if not isinstance(document, dict):
        raise ProblemError(INVALID, "The body is not a JSON object.", 'Send one such as {"item_id": "mug-01"}.')
    return document


def _check_value_count(body: bytes) -> None:
    """Refuses a JSON body with too many values before objects are made of them."""
    if (count := sum(map(body.count, (b",", b"[", b"{")))) > _MAX_VALUES:
        raise ProblemError(
            INVALID, f"The body has about {count:,} values; the limit is {_MAX_VALUES:,}.", "Send fewer."
        )


def _photo(body: PhotoBody) -> Photo:
    return Photo(_decode_base64(body.image), body.image_url)


def _decode_base64(text: str | None) -> bytes | None:
    """Decodes a photo in base64 or in a data URL."""
    if text is None:
        return None
    try:
        return base64.b64decode(text.partition("base64,")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise ProblemError(INVALID, "image: this is not base64.", "Encode the photo's bytes in base64.") from None


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_photo(media_type: str) -> bool:
    """Whether a body is a photo itself; generated clients send bytes as application/octet-stream."""
    return media_type.startswith("image/") or media_type == "application/octet-stream"


def _check_charset(request: Request) -> None:
    """Refuses a form in another encoding than UTF-8: the parser would use any codec that Python knows."""
    _, parameters = parse_options_header(request.headers.get("content-type", ""))
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1").lower()
    if charset not in ("utf-8", "utf8"):
        raise ProblemError(INVALID, f"The form has the charset {charset[:80]!r}.", "Send the form in UTF-8.")


def _unsupported(media_type: str, remedy: str) -> ProblemError:
    problem = f"The Content-Type is {media_type}." if media_type else "The request has no Content-Type."
    return ProblemError(BODY_UNSUPPORTED, problem, remedy)
