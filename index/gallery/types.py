"""The domain objects: what a shop sells, its photos, and what a search answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag, WithJsonSchema

from index._util.models import Frozen

MAX_ATTRIBUTES = 256
MAX_NAME_LENGTH = 256
MAX_TEXT_LENGTH = 4096
MAX_INTEGER = 2**53
"""Numbers are compared as doubles; beyond this, neighbouring integers would become equal."""

# The type of a value decides, and none is turned into another: true is not 1, and "5" stays a text.
Attribute = Annotated[
    Annotated[str, Field(max_length=MAX_TEXT_LENGTH), Tag("str")]
    | Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER), Tag("int")]
    | Annotated[float, Field(allow_inf_nan=False), Tag("float")]
    | Annotated[bool, Tag("bool")],
    Discriminator(
        lambda value: type(value).__name__,
        custom_error_type="attribute_type",
        custom_error_message="Input should be a text, a number, true or false",
    ),
    # The generated schema says oneOf, which every integer breaks: it is a number too.
    WithJsonSchema(
        {"anyOf": [{"type": "string", "maxLength": MAX_TEXT_LENGTH}, {"type": "number"}, {"type": "boolean"}]}
    ),
]
AttributeName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


class Item(Frozen):
    """A product of the catalogue."""

    id: str = Field(min_length=1, max_length=512)
    title: str = ""
    url: str = ""
    attributes: dict[AttributeName, Attribute] = Field(default={}, max_length=MAX_ATTRIBUTES)


class StoredImage(Frozen):
    """One photo of an item; the digest of its bytes decides whether it must be embedded again."""

    id: str = Field(min_length=1, max_length=512)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class StoredItem(NamedTuple):
    """An item as the gallery holds it: with its images, and the number of the change that last touched it."""

    item: Item
    images: list[StoredImage]
    version: int


class NewImage(NamedTuple):
    """An image ready to be stored: its vector for one bundle, and a small JPEG to show."""

    id: str
    digest: str
    vector: NDArray[np.float32]
    thumbnail: bytes


class Shelf(Protocol):
    """Where the items and images of hits are read from when somebody looks at them."""

    def item(self, position: int) -> Item: ...

    def image(self, position: int) -> StoredImage: ...


class Hit:
    """An answer of a search: an item, its best matching image, and the cosine of the two vectors.

    A search finds far faster than items can be unpacked, so that is left until they are asked for.
    """

    __slots__ = ("_position", "_shelf", "score")

    def __init__(self, score: float, shelf: Shelf, position: int) -> None:
        self.score = score
        self._shelf = shelf
        self._position = position

    @property
    def item(self) -> Item:
        return self._shelf.item(self._position)

    @property
    def image(self) -> StoredImage:
        return self._shelf.image(self._position)

    def __repr__(self) -> str:
        return f"Hit({self.score:.4f}, item={self.item.id!r}, image={self.image.id!r})"


@dataclass(frozen=True, slots=True)
class Found:
    """What a search answers: the hits of each query, and the state of the gallery that they reflect."""

    hits: list[list[Hit]]
    bundle_id: str
    generation: str | None
    change: int
    next_page: Callable[[], str] | None = None

    @property
    def cursor(self) -> str | None:
        """Where the next page of a single query begins; none after the last."""
        return self.next_page() if self.next_page else None
