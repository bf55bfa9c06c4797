"""Items, their attributes and facets, and the limits that hold for every way in: HTTP, tables and Python.

Imports neither NumPy nor an engine, so that the HTTP client can use the same types as the gallery.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema

from index._util.models import Frozen
from index.dates import format_instant, parse_zoned

MAX_ID_LENGTH = 512
MAX_TITLE_LENGTH = 1000
MAX_URL_LENGTH = 2000
MAX_ATTRIBUTES = 256
MAX_NAME_LENGTH = 256
MAX_TEXT_LENGTH = 4096
MAX_LIST_LENGTH = 256
"""Values of one attribute; their texts together have at most MAX_TEXT_LENGTH characters."""
MAX_INTEGER = 2**53
"""Numbers are compared as doubles; beyond this, neighbouring integers would compare equal."""
EXPIRES_AT = "expires_at"
"""The attribute that holds when an item expires."""
MAX_IMAGES_PER_ITEM = 256
"""A search by an item compares all its images with the gallery; one request sends at most as many photos."""
MAX_ATTRIBUTE_NAMES = 10_000
"""Distinct names of attributes in a gallery: each is a column of the index."""
MAX_FACETS = 100
"""Attributes that one list of facets describes."""
MAX_TOP = 1000
"""Items that one search may return; its cursor returns the next ones."""
MAX_CURSOR_LENGTH = 11_000
"""A cursor holds the keys of up to MAX_TOP items, of 8 bytes in the largest gallery, in base64."""

_VALUE_SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": MAX_TEXT_LENGTH},
    {"type": "number"},
    {"type": "boolean"},
]
_LIST_SCHEMA = {"type": "array", "items": {"anyOf": _VALUE_SCHEMAS}, "maxItems": MAX_LIST_LENGTH}

_Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH), Tag("str")]
_Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER), Tag("int")]
_Float = Annotated[float, Field(allow_inf_nan=False), Tag("float")]
_Boolean = Annotated[bool, Tag("bool")]

# Discriminated by type, so that no value is converted: true is not 1, and "5" stays a string.
Value = Annotated[
    _Text | _Integer | _Float | _Boolean,
    Discriminator(
        lambda value: type(value).__name__,
        custom_error_type="value_type",
        custom_error_message="must be a text, a number, true or false",
    ),
    # The generated schema has oneOf, which rejects integers because they match both int and float.
    WithJsonSchema({"anyOf": _VALUE_SCHEMAS}),
]
"""A single value of an attribute."""


def _distinct(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Returns the values without those that equal an earlier one: 5.0 equals 5, but true does not equal 1."""
    length = sum(len(value) for value in values if isinstance(value, str))
    if length > MAX_TEXT_LENGTH:
        raise ValueError(f"the texts of the list have {length:,} characters; the limit is {MAX_TEXT_LENGTH:,}")
    found: dict[tuple[bool, Value], Value] = {}
    for value in values:
        found.setdefault((isinstance(value, bool), value), value)
    return tuple(found.values())


_List = Annotated[tuple[Value, ...], Field(max_length=MAX_LIST_LENGTH), AfterValidator(_distinct), Tag("list")]

Attribute = Annotated[
    _Text | _Integer | _Float | _Boolean | _List,
    Discriminator(
        lambda value: "list" if isinstance(value, list | tuple) else type(value).__name__,
        custom_error_type="attribute_type",
        custom_error_message="must be a text, a number, true, false or a list of them",
    ),
    WithJsonSchema({"anyOf": [*_VALUE_SCHEMAS, _LIST_SCHEMA]}),
]
"""What an item has as an attribute: a value, or several. With an empty list it does not have the attribute."""
AttributeName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


def check_expiry(value: object) -> str:
    """Returns when an item expires as a date and time in UTC; raises ValueError for another value."""
    instant = parse_zoned(value) if isinstance(value, str) else None
    if instant is None:
        raise ValueError("must be a date, or a date and time with its time zone, such as 2026-11-19T10:00:00Z")
    return format_instant(instant)


def _check_attributes(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    """Returns the attributes without empty lists, and the expiry in its canonical form."""
    kept = {name: value for name, value in attributes.items() if value != ()}
    if len(kept.keys() - {EXPIRES_AT}) > MAX_ATTRIBUTES:
        raise ValueError(f"must have at most {MAX_ATTRIBUTES} items besides {EXPIRES_AT}, not {len(kept):,}")
    if EXPIRES_AT in kept:
        try:
            kept[EXPIRES_AT] = check_expiry(kept[EXPIRES_AT])
        except ValueError as error:
            raise ValueError(f"{EXPIRES_AT} {error}") from None
    return kept


class Item(Frozen):
    """A product: id, title, URL and attributes."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    title: str = Field(default="", max_length=MAX_TITLE_LENGTH)
    url: str = Field(default="", max_length=MAX_URL_LENGTH)
    attributes: Annotated[dict[AttributeName, Attribute], AfterValidator(_check_attributes)] = Field(
        default={},
        max_length=MAX_ATTRIBUTES + 1,  # the expiry
    )

    @property
    def expires_at(self) -> str | None:
        """When the item expires: from then on the gallery answers as if it did not exist."""
        value = self.attributes.get(EXPIRES_AT)
        return value if isinstance(value, str) else None

    @property
    def own_attributes(self) -> dict[str, Attribute]:
        """The attributes without the expiry."""
        return {name: value for name, value in self.attributes.items() if name != EXPIRES_AT}


def values_of(attribute: Attribute | None) -> tuple[Value, ...]:
    """Returns the values of an attribute: none if the item does not have it."""
    if isinstance(attribute, tuple):
        return attribute
    return () if attribute is None else (attribute,)


def parse_attributes(document: dict[str, Any]) -> dict[str, Attribute]:
    """Returns the attributes of an item that was validated before, from decoded JSON."""
    for name, value in document.items():
        if type(value) is list:
            document[name] = tuple(value)
    return document


class Facet(Frozen):
    """The values of an attribute: the most frequent with their counts, and the range of the numbers."""

    name: str
    values: list[tuple[Value, int]]
    minimum: int | float | None
    maximum: int | float | None
    distinct: int
