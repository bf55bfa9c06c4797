"""The domain objects: what a shop sells, its photos, and what a search answers."""

from pydantic import BaseModel, ConfigDict, Field

Attribute = str | int | float | bool


class Frozen(BaseModel):
    """A value: compared by content, never changed in place, refusing fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Item(Frozen):
    """A product of the catalogue."""

    id: str = Field(min_length=1, max_length=512)
    title: str = ""
    url: str = ""
    attributes: dict[str, Attribute] = {}


class StoredImage(Frozen):
    """One photo of an item; the digest of its bytes decides whether it must be embedded again."""

    id: str = Field(min_length=1, max_length=512)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class Hit(Frozen):
    """An answer of a search: an item, its best matching image, and the cosine of the two vectors."""

    item: Item
    image: StoredImage
    score: float


class Found(Frozen):
    """What a search answers: the hits of each query, and the state of the gallery that they reflect."""

    hits: list[list[Hit]]
    generation: str | None
    change: int
