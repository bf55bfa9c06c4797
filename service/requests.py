"""Reading a search: whatever form a request has, one `Asked` comes of it, or a problem that says what is wrong."""

import base64
import binascii
from typing import Annotated, Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import from_json
from starlette.datastructures import UploadFile

from index.gallery.filters import Filter
from index.items import MAX_ID_LENGTH, MAX_TOP, MAX_URL_LENGTH
from service.problems import INVALID, PHOTO_MISSING, UNSUPPORTED_BODY, ProblemError
from service.schemas.responses import Include

DEFAULT_TOP = 12
MAX_GIVEN = 256
"""Searches or photos of a request at most, whatever the settings allow."""
_MOST_KEYS = 32
_MOST_COMMAS = 100_000
"""Of a JSON body: photos in base64 have none, and 16 searches that each leave out 1,000 items have 16,000."""
Shape = TypeVar("Shape", bound=BaseModel)
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Given(BaseModel):
    """What a request gives. Unknown keys are mistakes, each told; too many are refused before that costs much."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > _MOST_KEYS:
            raise ValueError(f"{len(given):,} keys are more than are known")
        return given


class Options(Given):
    """What may be said with any search."""

    model_config = ConfigDict(frozen=True)

    top: int = Field(default=DEFAULT_TOP, ge=1, le=MAX_TOP, description="how many items at most")
    filter: dict[str, Any] = Field(
        default={},
        description="what the items' attributes must be",
        examples=[{"category": "mug", "price": {"lt": 20}}],
    )
    min_score: float | None = Field(default=None, ge=-1, le=1, description="the least likeness that is answered")
    box: tuple[_Share, _Share, _Share, _Share] | None = Field(
        default=None, description="left, top, right and bottom of the part to search for, as shares of the photo"
    )
    exclude: Annotated[list[str], FailFast()] = Field(
        default=[], max_length=1000, description="ids of items to leave out"
    )
    cursor: str | None = Field(default=None, max_length=500, description="continues an earlier answer")
    include: list[Include] = Field(default=["attributes"], max_length=8, description="what each item is told with")

    @model_validator(mode="after")
    def _box_has_an_inside(self) -> "Options":
        if self.box and not (self.box[0] < self.box[2] and self.box[1] < self.box[3]):
            raise ValueError("box: left must be less than right, and top less than bottom")
        return self


class SearchBody(Options):
    """A search as JSON: exactly one of a photo in base64, its address, or an item of the gallery."""

    image: str | None = Field(default=None, description="a photo in base64", examples=["/9j/4AAQSkZJRg..."])
    image_url: str | None = Field(
        default=None, max_length=MAX_URL_LENGTH, description="where to fetch the photo, if enabled"
    )
    item_id: str | None = Field(default=None, min_length=1, max_length=MAX_ID_LENGTH, description="more like this item")

    @model_validator(mode="after")
    def _one_query(self) -> "SearchBody":
        if sum(query is not None for query in (self.image, self.image_url, self.item_id)) != 1:
            raise ValueError("give exactly one of image, image_url and item_id")
        if self.box and self.item_id is not None:
            raise ValueError("box: only a photo has parts")
        return self

    def asked(self) -> "Asked":
        """The same with the photo as bytes."""
        options = Options(**{name: getattr(self, name) for name in Options.model_fields})
        photo = from_base64(self.image) if self.image is not None else None
        return Asked(options=options, photo=photo, image_url=self.image_url, item_id=self.item_id)


class Asked(BaseModel):
    """A search, with its photo as bytes if it brought one."""

    options: Options
    photo: bytes | None = None
    image_url: str | None = None
    item_id: str | None = None

    @property
    def filter(self) -> Filter | None:
        return Filter.parse(self.options.filter) if self.options.filter else None


async def read_asked(request: Request) -> Asked:
    """The search that a request asks for; options come from the address too, and there they win."""
    address = _from_address(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type.startswith("image/"):
        return Asked(options=_options(address), photo=await request.body())
    if media_type == "application/json":
        return _from_json(await request.body(), address)
    if media_type == "multipart/form-data":
        return await _from_form(request, address)
    if not media_type:
        raise ProblemError(PHOTO_MISSING, "The request has neither a body nor a Content-Type.")
    raise ProblemError(UNSUPPORTED_BODY, f"The request's type is {media_type}.")


async def _from_form(request: Request, address: dict[str, Any]) -> Asked:
    async with request.form(max_files=1, max_fields=16) as form:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise ProblemError(PHOTO_MISSING, PHOTO_MISSING.detail)
        fields = {name: form.getlist(name) for name in form if name != "image"}
        texts = {
            name: [whole_text(value) for value in values if isinstance(value, str)] for name, values in fields.items()
        }
        return Asked(options=_options({**_decoded(texts), **address}), photo=await image.read())


async def read_json(request: Request, shape: type[Shape]) -> Shape:
    """The body of a request, for routes to read themselves: FastAPI would read it before it looks at the key."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (media_type.startswith("application/") and media_type.endswith(("/json", "+json"))):
        told = f"The request's type is {media_type}." if media_type else "The request has no Content-Type."
        raise ProblemError(INVALID, told, "Send JSON as application/json.")
    try:
        return shape.model_validate_json(few_values(await request.body()))
    except ValidationError as error:
        raise invalid(error) from None


def few_values(body: bytes) -> bytes:
    """A JSON body with as many values as a request may have: more are refused before a tree is made of them."""
    if (commas := body.count(b",")) > _MOST_COMMAS:
        raise ProblemError(
            INVALID, f"The body has some {commas:,} values; at most {_MOST_COMMAS:,} are read.", "Send fewer."
        )
    return body


def whole_text(text: str) -> str:
    """A text of a form, whose sender may choose an encoding that makes halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ProblemError(INVALID, f"{text[:80]!r} is no text.", "Send the form in UTF-8.") from None
    return text


def _from_json(body: bytes, address: dict[str, Any]) -> Asked:
    few_values(body)
    try:
        document = from_json(body)  # which, unlike Python's own, refuses halves of characters
    except ValueError as error:
        raise ProblemError(INVALID, f"The body is not JSON: {error}.", "Mend it and send the request again.") from None
    if not isinstance(document, dict):
        raise ProblemError(INVALID, "The body is not a JSON object.", 'Send one such as {"item_id": "mug-1"}.')
    try:
        asked = SearchBody.model_validate({**document, **address})
    except ValidationError as error:
        raise invalid(error) from None
    return asked.asked()


def from_base64(text: str) -> bytes:
    """The bytes of a photo; a data address of a browser is understood too."""
    try:
        return base64.b64decode(text.partition("base64,")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise ProblemError(INVALID, "image: this is not base64.", "Encode the photo's bytes in base64.") from None


def _from_address(request: Request) -> dict[str, Any]:
    return _decoded({name: request.query_params.getlist(name) for name in request.query_params})


def _decoded(texts: dict[str, list[str]]) -> dict[str, Any]:
    """Options as they are written in addresses and forms: lists with commas or repeated, the filter as JSON."""
    values: dict[str, Any] = {}
    for name, given in texts.items():
        if name in ("include", "box"):
            values[name] = [part for value in given for part in value.split(",") if part]
        elif name == "exclude":
            values[name] = given
        elif name == "filter":
            try:
                values[name] = from_json(given[-1])
            except ValueError:
                raise ProblemError(
                    INVALID, f"filter: {given[-1][:80]!r} is not JSON.", 'Write one such as {"colour": "red"}.'
                ) from None
        else:
            values[name] = given[-1]
    return values


def _options(values: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> RequestValidationError:
    """The same as FastAPI tells it."""
    return RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()])
