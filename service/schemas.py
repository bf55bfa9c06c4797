"""The shapes of the API's answers."""

from pydantic import BaseModel, Field

from index.items import Attribute


class MatchedImage(BaseModel):
    """The image of an item that resembles the photo most."""

    id: str
    url: str = Field(description="a small JPEG")


class Match(BaseModel):
    """An item that resembles the photo."""

    id: str
    title: str
    url: str = Field(description="the item's page in the shop; empty when the catalogue has none")
    score: float = Field(description="the cosine of the two images' vectors; 1 is the same image")
    attributes: dict[str, Attribute]
    image: MatchedImage


class Milliseconds(BaseModel):
    """Where the time went."""

    decode: float = Field(description="bytes to upright pixels of the model's size")
    embed: float = Field(description="pixels to a vector")
    search: float = Field(description="the vector to items")


class SearchAnswer(BaseModel):
    """Items by falling likeness."""

    items: list[Match]
    bundle: str = Field(description="the id of the model that compared")
    generation: str | None = Field(description="the index that was searched")
    milliseconds: Milliseconds


class GalleryStatus(BaseModel):
    """What can be found."""

    items: int
    images: int
    generation: str | None


class BundleStatus(BaseModel):
    """The model that compares, and how well it does on products it never saw in training."""

    id: str
    backbone: str
    loss: str
    dimension: int
    data: str
    metrics: dict[str, float] = Field(description="such as recall@1, as shares of 1")
    untrained_metrics: dict[str, float] = Field(description="the same before training")


class Limits(BaseModel):
    """What a request may hold."""

    max_body_bytes: int
    max_pixels: int


class Status(BaseModel):
    """The state of the service."""

    gallery: GalleryStatus
    bundle: BundleStatus
    provider: str = Field(description="what the model runs on")
    limits: Limits


class Health(BaseModel):
    """The answer to a probe."""

    status: str = "ok"


class Example(BaseModel):
    """A photo to try the search with."""

    name: str
    url: str


class Examples(BaseModel):
    """The photos that the operator offers."""

    examples: list[Example]
