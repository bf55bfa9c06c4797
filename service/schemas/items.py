"""The shapes of writing items: what a request may give, and how a stored item is told."""

from typing import Annotated, Any, NamedTuple, Self

from fastapi import Request
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from starlette.datastructures import FormData, UploadFile

from index.items import (
    MAX_ATTRIBUTES,
    MAX_ID_LENGTH,
    MAX_TITLE_LENGTH,
    MAX_URL_LENGTH,
    Attribute,
    AttributeName,
    Item,
)
from service.problems import INVALID, UNSUPPORTED_BODY, ProblemError
from service.requests import MAX_GIVEN, Given, Shape, few_values, from_base64, invalid, whole_text
from service.schemas.responses import FacetsAnswer as FacetsAnswer
from service.schemas.responses import ImageAnswer as ImageAnswer
from service.schemas.responses import ItemAnswer as ItemAnswer
from service.schemas.responses import ItemsAnswer as ItemsAnswer


def _few(attributes: Any) -> Any:
    """Refuses what cannot be right, before each mistake within is looked for; a change may remove all and add all."""
    if isinstance(attributes, dict) and len(attributes) > 2 * MAX_ATTRIBUTES:
        raise ValueError(f"{len(attributes):,} are given; an item has at most {MAX_ATTRIBUTES}")
    return attributes


class Photo(NamedTuple):
    """A photo that came with a request, or the address where it is fetched."""

    data: bytes | None = None
    url: str | None = None


class PhotoBody(Given):
    """A photo in JSON: in base64, or by its address where that is enabled."""

    image: str | None = Field(default=None, description="a photo in base64", examples=["/9j/4AAQSkZJRg..."])
    image_url: str | None = Field(
        default=None, max_length=MAX_URL_LENGTH, description="where to fetch the photo, if enabled"
    )

    @model_validator(mode="after")
    def _one_photo(self) -> Self:
        if (self.image is None) == (self.image_url is None):
            raise ValueError("give exactly one of image and image_url")
        return self

    def photo(self) -> Photo:
        """The same as bytes, or as an address."""
        return Photo(from_base64(self.image) if self.image is not None else None, self.image_url)


class GivenImage(PhotoBody):
    """A photo with the name that it has among those of its item."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)


class ItemBody(Given):
    """An item to store. What is left out becomes empty, save for the images, which stay unless they are given."""

    title: str = Field(default="", max_length=MAX_TITLE_LENGTH)
    url: str = Field(default="", max_length=MAX_URL_LENGTH, description="the item's page in the shop")
    attributes: Annotated[dict[AttributeName, Attribute], BeforeValidator(_few)] = Field(
        default={}, max_length=MAX_ATTRIBUTES
    )
    images: list[GivenImage] | None = Field(
        default=None, max_length=MAX_GIVEN, description="what the item's images become, all of them"
    )


class ItemPatch(Given):
    """A JSON merge patch of an item: what is null is emptied or, of the attributes, removed."""

    title: str | None = Field(default=None, max_length=MAX_TITLE_LENGTH)
    url: str | None = Field(default=None, max_length=MAX_URL_LENGTH)
    attributes: Annotated[dict[AttributeName, Attribute | None] | None, BeforeValidator(_few)] = None

    def applied(self, item: Item) -> Item:
        """The item as it becomes."""
        values: dict[str, Any] = {name: getattr(self, name) or "" for name in self.model_fields_set - {"attributes"}}
        if "attributes" in self.model_fields_set:
            merged = {**item.attributes, **self.attributes} if self.attributes is not None else {}
            values["attributes"] = {name: value for name, value in merged.items() if value is not None}
        return checked(Item, {**item.model_dump(), **values})


class GivenItem(NamedTuple):
    """What a request says an item becomes; photos are none when its images stay."""

    body: ItemBody
    photos: dict[str, Photo] | None

    def item(self, item_id: str) -> Item:
        return Item(id=item_id, title=self.body.title, url=self.body.url, attributes=self.body.attributes)


async def read_item(request: Request, most_photos: int) -> GivenItem:
    """The item of a request, which comes as JSON or as a form with files."""
    media_type = _media_type(request)
    if media_type == "application/json":
        body = _parsed(ItemBody, await request.body())
        photos = [(image.id, image.photo()) for image in body.images or ()]
        given = body.images is not None
    elif media_type == "multipart/form-data":
        async with request.form(max_files=most_photos + 1, max_fields=most_photos + 1) as form:
            body, photos = await _from_form(form)
        given = body.images is not None or bool(photos)
    else:
        raise _unsupported(media_type, "Send JSON, or a form with the field `item` and files `image`.")
    if len(photos) > most_photos:
        raise ProblemError(INVALID, f"images: {len(photos)} were sent; the limit is {most_photos}.", "Send fewer.")
    named = dict(photos)
    if len(named) < len(photos):
        raise ProblemError(INVALID, "images: two have the same id.", "Give each photo of an item an id of its own.")
    return GivenItem(body, named if given else None)


async def _from_form(form: FormData) -> tuple[ItemBody, list[tuple[str, Photo]]]:
    """The item of the field `item`, and its photos: those of the files and those that the field names."""
    text = form.get("item")
    if text is None:
        raise ProblemError(INVALID, "The form has no field `item`.", "Add it, with the item as JSON; {} is one.")
    body = _parsed(ItemBody, await text.read() if isinstance(text, UploadFile) else whole_text(text).encode())
    photos = [(image.id, image.photo()) for image in body.images or ()]
    for file in form.getlist("image"):
        name = file.filename if isinstance(file, UploadFile) else None
        if not name or len(name) > MAX_ID_LENGTH or not isinstance(file, UploadFile):
            told = f"A file `image` of the form has the name {(name or '')[:80]!r}."
            raise ProblemError(INVALID, told, f"Name it by the image's id, of 1 to {MAX_ID_LENGTH} characters.")
        photos.append((whole_text(name), Photo(await file.read())))
    return body, photos


async def read_patch(request: Request) -> ItemPatch:
    """The changes of a request, which are JSON by either of two names."""
    media_type = _media_type(request)
    if media_type not in ("application/merge-patch+json", "application/json"):
        raise _unsupported(media_type, "Send a JSON merge patch as application/merge-patch+json.")
    return _parsed(ItemPatch, await request.body())


async def read_photo(request: Request) -> Photo:
    """The photo of a request, which is the body itself, or within JSON."""
    media_type = _media_type(request)
    if media_type.startswith("image/"):
        return Photo(await request.body())
    if media_type == "application/json":
        return _parsed(PhotoBody, await request.body()).photo()
    raise _unsupported(media_type, "Send the photo itself with its own type (image/...), or JSON.")


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _unsupported(media_type: str, remedy: str) -> ProblemError:
    told = f"The request's type is {media_type}." if media_type else "The request has no Content-Type."
    return ProblemError(UNSUPPORTED_BODY, told, remedy)


def _parsed(shape: type[Shape], text: bytes) -> Shape:
    try:
        # Unlike Python's own parser it refuses halves of characters, which could not be stored.
        return shape.model_validate_json(few_values(text))
    except ValidationError as error:
        raise invalid(error) from None


def checked(shape: type[Shape], values: dict[str, Any]) -> Shape:
    """A value that a request leads to, or the problem of the request."""
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        raise invalid(error) from None
