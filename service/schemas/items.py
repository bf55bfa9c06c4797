"""The wire types of items."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from typing_extensions import TypeAliasType

from index import items
from index.items import (
    EXPIRES_AT,
    MAX_ATTRIBUTES,
    MAX_ID_LENGTH,
    MAX_TITLE_LENGTH,
    MAX_URL_LENGTH,
    Attribute,
    AttributeName,
    Value,
    check_expiry,
)
from service.schemas.base import HINTS, MAX_ENTRIES, Attributes, RequestBody

_EXPIRES_AT = (
    "a date, which is its start in UTC, or a date and time with its time zone: from then on no answer contains the "
    "item; null for never"
)


def _check_attribute_count(attributes: Any) -> Any:
    """Refuses far too many attributes before each is validated; a patch may remove all and add as many."""
    if isinstance(attributes, dict) and EXPIRES_AT in attributes:
        raise ValueError(f"{EXPIRES_AT} is a field of the item, not one of its attributes")
    if isinstance(attributes, dict) and len(attributes) > 2 * MAX_ATTRIBUTES:
        raise ValueError(f"{len(attributes):,} were sent; an item has at most {MAX_ATTRIBUTES}")
    return attributes


NewAttributes = TypeAliasType(
    "NewAttributes",
    Annotated[
        dict[AttributeName, Attribute], Field(max_length=MAX_ATTRIBUTES), BeforeValidator(_check_attribute_count)
    ],
)
AttributeChanges = TypeAliasType(
    "AttributeChanges", Annotated[dict[AttributeName, Attribute | None], BeforeValidator(_check_attribute_count)]
)


Expiry = Annotated[str, Field(max_length=40), AfterValidator(check_expiry)]


class PhotoBody(RequestBody):
    """A photo in JSON: in base64, or by its address where that is enabled."""

    image: str | None = Field(default=None, description="a photo in base64", examples=["/9j/4AAQSkZJRg..."])
    image_url: str | None = Field(
        default=None, max_length=MAX_URL_LENGTH, description="address to fetch the photo from, if enabled"
    )

    @model_validator(mode="after")
    def _check_photo(self) -> Self:
        if (self.image is None) == (self.image_url is None):
            raise ValueError("give exactly one of image and image_url")
        return self


class ImageBody(PhotoBody):
    """A photo with the id that it has within its item."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)


class ItemBody(RequestBody):
    """An item to store. Fields that are left out become empty, except the images, which then stay."""

    title: str | None = Field(default=None, max_length=MAX_TITLE_LENGTH)
    url: str | None = Field(default=None, max_length=MAX_URL_LENGTH, description="the item's page in the shop")
    attributes: NewAttributes = {}
    expires_at: Expiry | None = Field(default=None, description=_EXPIRES_AT, examples=["2026-12-01T00:00:00Z"])
    images: list[ImageBody] | None = Field(
        default=None, max_length=MAX_ENTRIES, description="all images that the item then has"
    )


class ItemPatch(RequestBody):
    """A JSON merge patch of an item: null empties a field or removes an attribute, and so does an empty list."""

    title: str | None = Field(default=None, max_length=MAX_TITLE_LENGTH)
    url: str | None = Field(default=None, max_length=MAX_URL_LENGTH)
    attributes: AttributeChanges | None = None
    expires_at: Expiry | None = Field(default=None, description=_EXPIRES_AT)

    def changes(self, attributes: Mapping[str, Attribute]) -> dict[str, Any]:
        """Returns the fields that change, with their new values, of an item that has these attributes.

        The expiry is one of the attributes.
        """
        given = self.model_fields_set
        values: dict[str, Any] = {name: getattr(self, name) or "" for name in given - {"attributes", EXPIRES_AT}}
        merged: dict[str, Attribute | None] = {**attributes}
        if "attributes" in given:
            kept = attributes if self.attributes is not None else {EXPIRES_AT: attributes.get(EXPIRES_AT)}
            merged = {**kept, **(self.attributes or {})}
        if EXPIRES_AT in given:
            merged[EXPIRES_AT] = self.expires_at
        return {**values, "attributes": {name: value for name, value in merged.items() if value is not None}}


class ImageAnswer(BaseModel):
    """An image of an item."""

    id: str
    digest: str = Field(description="SHA-256 of the photo's bytes")
    url: str = Field(description="address of a thumbnail (JPEG)")


class ItemAnswer(BaseModel):
    """An item as the gallery holds it."""

    id: str
    title: str | None
    url: str | None = Field(description="the item's page in the shop")
    attributes: Attributes
    expires_at: str | None = Field(description="when the item expires, in UTC; null if it never does")
    images: list[ImageAnswer]
    version: int = Field(description="the revision that last changed the item; the ETag is this number in quotes")


class ItemsAnswer(BaseModel):
    """Items in the order of their ids."""

    items: list[ItemAnswer]
    cursor: str | None = Field(description="returns the next items when it is sent with the same filter")
    hints: list[str] = Field(description=HINTS)


class FacetValue(BaseModel):
    """A value of an attribute."""

    value: Value
    count: int = Field(description="the number of items that have it and match the filter")


class Facet(BaseModel):
    """An attribute: its most frequent values, and the range of its numbers."""

    name: str
    values: list[FacetValue] = Field(description="the most frequent first")
    minimum: float | None
    maximum: float | None
    distinct: int = Field(description="the number of values, also of those beyond `limit`")

    @classmethod
    def of(cls, facet: items.Facet) -> Self:
        values = [FacetValue(value=value, count=count) for value, count in facet.values]
        return cls(**{**facet.model_dump(exclude={"values"}), "values": values})


class FacetsAnswer(BaseModel):
    """The attributes of items, as of the last compaction of the gallery."""

    facets: list[Facet]
    left_out: list[str] = Field(description="attributes whose values would make the answer too large")
