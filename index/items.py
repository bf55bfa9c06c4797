"""Items, their attributes and facets, and the limits that hold for every way in: HTTP, tables and Python.

Imports neither NumPy nor an engine, so that the HTTP client can use the same types as the gallery.
"""

from typing import Annotated

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from index._util.models import Frozen

MAX_ID_LENGTH = 512
MAX_TITLE_LENGTH = 1000
MAX_URL_LENGTH = 2000
MAX_ATTRIBUTES = 256
MAX_NAME_LENGTH = 256
MAX_TEXT_LENGTH = 4096
MAX_INTEGER = 2**53
"""Numbers are compared as doubles; beyond this, neighbouring integers would compare equal."""
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

# Discriminated by type, so that no value is converted: true is not 1, and "5" stays a string.
Attribute = Annotated[
    Annotated[str, Field(max_length=MAX_TEXT_LENGTH), Tag("str")]
    | Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER), Tag("int")]
    | Annotated[float, Field(allow_inf_nan=False), Tag("float")]
    | Annotated[bool, Tag("bool")],
    Discriminator(
        lambda value: type(value).__name__,
        custom_error_type="attribute_type",
        custom_error_message="must be a text, a number, true or false",
    ),
    # The generated schema has oneOf, which rejects integers because they match both int and float.
    WithJsonSchema(
        {"anyOf": [{"type": "string", "maxLength": MAX_TEXT_LENGTH}, {"type": "number"}, {"type": "boolean"}]}
    ),
]
AttributeName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


class Item(Frozen):
    """A product: id, title, URL and attributes."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
    title: str = Field(default="", max_length=MAX_TITLE_LENGTH)
    url: str = Field(default="", max_length=MAX_URL_LENGTH)
    attributes: dict[AttributeName, Attribute] = Field(default={}, max_length=MAX_ATTRIBUTES)


class Facet(Frozen):
    """The values of an attribute: the most frequent with their counts, and the range of the numbers."""

    name: str
    values: list[tuple[Attribute, int]]
    minimum: int | float | None
    maximum: int | float | None
    distinct: int
