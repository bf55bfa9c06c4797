"""The shapes of the API's answers."""

from typing import Any

from pydantic import BaseModel, Field

from index.gallery.types import Attribute
from service.problems import INVALID, ProblemError
from service.requests import MAX_GIVEN, Asked, Given, SearchBody


def shown(example: object, description: str = "") -> dict[str, Any]:
    """How a route's `responses` show an answer."""
    told = {"description": description} if description else {}
    return {**told, "content": {"application/json": {"example": example}}}


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
    attributes: dict[str, Attribute] = Field(description="empty unless they are included")
    image: MatchedImage
    vector: list[float] | None = Field(default=None, description="of the image, when vectors are included")


class Milliseconds(BaseModel):
    """Where the time went."""

    decode: float = Field(description="bytes to upright pixels of the model's size")
    wait: float = Field(description="for the model, while it worked for others")
    embed: float = Field(description="pixels to a vector, in a batch with those of others")
    search: float = Field(description="the vector to items")


class SearchAnswer(BaseModel):
    """Items by falling likeness."""

    items: list[Match]
    cursor: str | None = Field(description="asks for the next items when it is sent with the same search")
    bundle: str = Field(description="the id of the model that compared")
    generation: str | None = Field(description="the index that was searched, with all changes since it was built")
    change: int = Field(description="the number of the newest write to the gallery that the answer reflects")
    milliseconds: Milliseconds


class BatchBody(Given):
    """Several searches in one request."""

    searches: list[SearchBody] = Field(min_length=1, max_length=MAX_GIVEN)

    def asked(self, most: int) -> list[Asked]:
        """Each of them, if there are not too many."""
        if len(self.searches) > most:
            raise ProblemError(
                INVALID, f"searches: {len(self.searches)} were sent; the limit is {most}.", "Send fewer."
            )
        return [search.asked() for search in self.searches]


class BatchAnswer(BaseModel):
    """The answers in the order of the searches."""

    answers: list[SearchAnswer]


class GalleryStatus(BaseModel):
    """What can be found."""

    items: int
    images: int
    change: int = Field(description="the number of the newest write")
    generation: str | None
    pending: int = Field(description="changes since the generation was built; searches see them all the same")
    kind: str | None = Field(description="of the index: exact, hnsw or ivf")
    recall: float | None = Field(description="recall@10 of the index against exact search, measured at its build")


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
    max_batch: int


class Status(BaseModel):
    """The state of the service."""

    gallery: GalleryStatus
    bundle: BundleStatus | None = Field(description="none in an empty gallery that was given no bundle")
    provider: str | None = Field(description="what the model runs on")
    keys: bool = Field(description="whether requests need an API key")
    urls: bool = Field(description="whether photos may be given by address")
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
