"""The domain objects: what a shop sells, its photos, and what a search answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from index._util.models import Frozen
from index.items import MAX_ATTRIBUTES as MAX_ATTRIBUTES
from index.items import MAX_ID_LENGTH as MAX_ID_LENGTH
from index.items import MAX_INTEGER as MAX_INTEGER
from index.items import MAX_NAME_LENGTH as MAX_NAME_LENGTH
from index.items import MAX_TEXT_LENGTH as MAX_TEXT_LENGTH
from index.items import MAX_TOP as MAX_TOP
from index.items import Attribute as Attribute
from index.items import AttributeName as AttributeName
from index.items import Item as Item


class StoredImage(Frozen):
    """One photo of an item; the digest of its bytes decides whether it must be embedded again."""

    id: str = Field(min_length=1, max_length=MAX_ID_LENGTH)
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
