"""The wire types of searches and of jobs."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, computed_field, model_validator

from index.gallery.jobs import JobRecord
from index.items import MAX_ID_LENGTH, MAX_TOP, MAX_URL_LENGTH, Attribute
from service.schemas.base import MAX_ENTRIES, RequestBody

DEFAULT_TOP = 12
Include = Literal["attributes", "vectors"]
_Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SearchOptions(RequestBody):
    """The options of any search."""

    model_config = ConfigDict(frozen=True)

    top: int = Field(default=DEFAULT_TOP, ge=1, le=MAX_TOP, description="maximum number of items")
    filter: dict[str, Any] = Field(
        default={},
        description="conditions on the items' attributes",
        examples=[{"category": "mug", "price": {"lt": 20}}],
    )
    min_score: float | None = Field(default=None, ge=-1, le=1, description="minimum score of an item")
    box: tuple[_Fraction, _Fraction, _Fraction, _Fraction] | None = Field(
        default=None, description="left, top, right and bottom of the part to search for, as fractions of the photo"
    )
    exclude: Annotated[list[str], FailFast()] = Field(
        default=[], max_length=1000, description="ids of items to leave out"
    )
    cursor: str | None = Field(default=None, max_length=500, description="continues an earlier search")
    include: list[Include] = Field(
        default=["attributes"], max_length=8, description="optional parts of each item in the answer"
    )

    @model_validator(mode="after")
    def _check_box(self) -> Self:
        if self.box and not (self.box[0] < self.box[2] and self.box[1] < self.box[3]):
            raise ValueError("box: left must be less than right, and top less than bottom")
        return self


class SearchBody(SearchOptions):
    """A search as JSON: exactly one of a photo in base64, its address, or an item of the gallery."""

    image: str | None = Field(default=None, description="a photo in base64", examples=["/9j/4AAQSkZJRg..."])
    image_url: str | None = Field(
        default=None, max_length=MAX_URL_LENGTH, description="address to fetch the photo from, if enabled"
    )
    item_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="find items similar to this one"
    )

    @model_validator(mode="after")
    def _check_query(self) -> Self:
        if sum(query is not None for query in (self.image, self.image_url, self.item_id)) != 1:
            raise ValueError("give exactly one of image, image_url and item_id")
        if self.box and self.item_id is not None:
            raise ValueError("box: allowed with a photo only")
        return self


class BatchBody(RequestBody):
    """Several searches in one request."""

    searches: list[SearchBody] = Field(min_length=1, max_length=MAX_ENTRIES)


class MatchedImage(BaseModel):
    """The image of an item that is most similar to the query."""

    id: str
    url: str = Field(description="address of a thumbnail (JPEG)")


class Match(BaseModel):
    """An item that is similar to the query."""

    id: str
    title: str
    url: str = Field(description="the item's page in the shop; empty when the catalogue has none")
    score: float = Field(description="cosine similarity of the two images' vectors; 1 for the same image")
    attributes: dict[str, Attribute] = Field(description="empty unless they are included")
    image: MatchedImage
    vector: list[float] | None = Field(default=None, description="the image's vector, when vectors are included")


class Milliseconds(BaseModel):
    """The time of each stage."""

    decode: float = Field(description="bytes to upright pixels of the model's input size")
    wait: float = Field(description="in the queue of the model")
    embed: float = Field(description="pixels to a vector, in a batch with photos of other requests")
    search: float = Field(description="vector to items")


class SearchAnswer(BaseModel):
    """Items by descending score."""

    items: list[Match]
    cursor: str | None = Field(description="returns the next items when it is sent with the same search")
    bundle: str = Field(description="id of the bundle whose vectors were compared")
    revision: int = Field(description="the last write to the gallery that the answer includes")
    milliseconds: Milliseconds


class BatchAnswer(BaseModel):
    """The answers in the order of the searches."""

    answers: list[SearchAnswer]


class JobBody(RequestBody):
    """A re-index to start; what each option means is told by `lookalike reindex --help` too."""

    source: str = Field(description="the name of a source in the operator's settings")
    bundle: str | None = Field(
        default=None, description="the name of a bundle in the operator's settings; the live one unless told"
    )
    delete_missing: bool = Field(default=False, description="remove the items and images that left the source")
    max_delete: float = Field(
        default=0.2, ge=0, le=1, description="share of the images beyond which nothing is deleted"
    )
    max_rejects: float = Field(default=1.0, ge=0, le=1, description="share of unusable photos beyond which it fails")
    queries: str | None = Field(default=None, description="the name of a source of labelled photos to test with")
    expect_recall: float | None = Field(
        default=None, ge=0, le=1, description="recall@1 of the queries below which the bundle does not go live"
    )
    force: bool = Field(default=False, description="delete, and go live, beyond the shares and below the recall")

    @model_validator(mode="after")
    def _tested_with_something(self) -> Self:
        if (self.queries is None) != (self.expect_recall is None):
            raise ValueError("queries and expect_recall belong together")
        return self

    def options(self, queries: str | None) -> list[str]:
        """The same for the command line, with the address of the queries."""
        options = ["--max-delete", str(self.max_delete), "--max-rejects", str(self.max_rejects)]
        options += ["--delete-missing"] if self.delete_missing else []
        options += ["--force"] if self.force else []
        return (
            options if queries is None else [*options, "--queries", queries, "--expect-recall", str(self.expect_recall)]
        )


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
