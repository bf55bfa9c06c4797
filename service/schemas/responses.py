"""The bodies of responses. Imports neither FastAPI nor an engine: the HTTP client parses responses with these types."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, computed_field

from index.items import Attribute, Facet
from index.jobs import JobRecord

if TYPE_CHECKING:
    from index.gallery.types import StoredItem

Include = Literal["attributes", "vectors"]


class Problem(BaseModel):
    """The body of every error."""

    type: str = Field(description="what kind of problem it is; stable, for programs")
    title: str = Field(description="the kind in words")
    status: int
    detail: str = Field(description="what was wrong with this request")
    remedy: str = Field(description="what to do about it")
    request_id: str = Field(description="names the request in the service's log")


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


class JobStatus(JobRecord):
    """A job, with how fast it goes."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # so that what is told can be read back

    @computed_field(description="images a second, since the start")  # type: ignore[prop-decorator]
    @property
    def rate(self) -> float:
        return super().rate

    @computed_field(description="what remains at that rate; unknown before the first image")  # type: ignore[prop-decorator]
    @property
    def seconds_left(self) -> float | None:
        return super().seconds_left

    @classmethod
    def of(cls, record: JobRecord) -> Self:
        return cls(**record.model_dump())


class JobsAnswer(BaseModel):
    """Jobs, the newest first."""

    jobs: list[JobStatus]


class ImageAnswer(BaseModel):
    """An image of an item."""

    id: str
    digest: str = Field(description="SHA-256 of the photo that was given")
    url: str = Field(description="a small JPEG")


class ItemAnswer(BaseModel):
    """An item as the gallery holds it."""

    id: str
    title: str
    url: str
    attributes: dict[str, Attribute]
    images: list[ImageAnswer]
    version: int = Field(description="the number of the write that last changed it; the ETag is this in quotes")

    @classmethod
    def of(cls, stored: "StoredItem", media: str) -> Self:
        """A stored item, with its images' addresses below `media`."""
        images = [ImageAnswer(**image.model_dump(), url=f"{media}/{image.digest}.jpg") for image in stored.images]
        return cls(**stored.item.model_dump(), images=images, version=stored.version)


class ItemsAnswer(BaseModel):
    """Items in the order of their ids."""

    items: list[ItemAnswer]
    cursor: str | None = Field(description="asks for the next items when it is sent with the same filter")


class FacetsAnswer(BaseModel):
    """The attributes that items have, as of the last compaction of the gallery."""

    facets: list[Facet] = Field(
        description="each with pairs of a value and the items that have it, the most frequent first"
    )
