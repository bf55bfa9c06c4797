"""The wire types of searches."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from index.items import MAX_CURSOR_LENGTH, MAX_ID_LENGTH, MAX_TOP, MAX_URL_LENGTH
from index.rankings import MAX_EXAMPLES, Combination, Explanation, FilterDocument, RankingChoice, Window
from service.schemas.base import HINTS, MAX_ENTRIES, Attributes, RequestBody

DEFAULT_LIMIT = 12
Include = TypeAliasType("Include", Literal["attributes", "vectors"])
"""A named type has one schema, which generated clients name as well."""
_Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Box = tuple[_Fraction, _Fraction, _Fraction, _Fraction]


def _check_box(box: _Box) -> _Box:
    if not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError("left must be less than right, and top less than bottom")
    return box


Box = Annotated[_Box, AfterValidator(_check_box)]
"""A part of a photo: left, top, right and bottom, as fractions."""


class SearchOptions(RequestBody):
    """The options of any search."""

    model_config = ConfigDict(frozen=True)

    limit: int = Field(default=DEFAULT_LIMIT, ge=1, le=MAX_TOP, description="maximum number of items")
    filter: FilterDocument = Field(
        default={},
        description="conditions on the items' attributes",
        examples=[{"category": "mug", "price": {"lt": 20}}],
    )
    min_score: float | None = Field(default=None, ge=-1, le=1, description="minimum score of an item")
    box: Box | None = Field(
        default=None, description="left, top, right and bottom of the part to search for, as fractions of the photo"
    )
    exclude: Annotated[list[Annotated[str, Field(max_length=MAX_ID_LENGTH)]], FailFast()] = Field(
        default=[], max_length=1000, description="ids of items to leave out"
    )
    cursor: str | None = Field(default=None, max_length=MAX_CURSOR_LENGTH, description="continues an earlier search")
    include: list[Include] = Field(
        default=["attributes"], max_length=8, description="optional parts of each item in the answer"
    )

    combine: Combination = Field(
        default="mean", description="how several examples are combined: their weighted mean, or the best of them"
    )
    ranking: RankingChoice | None = Field(
        default=None, description="rules for the order of the items, or the name of those that the gallery holds"
    )
    explain: bool = Field(default=False, description="adds to each item why it is where it is")


class _Query(RequestBody):
    """What to search for: exactly one of a photo in base64, its address, or an item of the gallery."""

    image: str | None = Field(default=None, description="a photo in base64", examples=["/9j/4AAQSkZJRg..."])
    image_url: str | None = Field(
        default=None, max_length=MAX_URL_LENGTH, description="address to fetch the photo from, if enabled"
    )
    item_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_ID_LENGTH, description="find items similar to this one"
    )


class SearchExample(_Query):
    """A photo or an item that the wanted items are like or, with a negative weight, unlike."""

    box: Box | None = Field(default=None, description="the part of the photo")
    weight: float = Field(
        default=1.0, ge=-1, le=1, allow_inf_nan=False, description="how much it counts; negative: not like this"
    )

    @model_validator(mode="after")
    def _check_query(self) -> Self:
        if sum(query is not None for query in (self.image, self.image_url, self.item_id)) != 1:
            raise ValueError("give exactly one of image, image_url and item_id")
        if self.box and self.item_id is not None:
            raise ValueError("box: allowed with a photo only")
        if not self.weight:
            raise ValueError("weight: 0 would not count; leave the example out")
        return self


class SearchBody(SearchOptions, _Query):
    """A search as JSON: exactly one of a photo in base64, its address, an item of the gallery, or examples."""

    examples: list[SearchExample] | None = Field(
        default=None, min_length=1, max_length=MAX_EXAMPLES, description="several photos and items to combine"
    )

    @model_validator(mode="after")
    def _check_query(self) -> Self:
        queries = (self.image, self.image_url, self.item_id, self.examples)
        if sum(query is not None for query in queries) != 1:
            raise ValueError("give exactly one of image, image_url, item_id and examples")
        if self.box and (self.item_id is not None or self.examples):
            raise ValueError("box: allowed with one photo only; an example has its own")
        if self.examples and all(example.weight < 0 for example in self.examples):
            raise ValueError("examples: at least one needs a positive weight")
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
    title: str | None
    url: str | None = Field(description="the item's page in the shop")
    score: float = Field(description="cosine similarity of the two images' vectors; 1 for the same image")
    attributes: Attributes = Field(description="empty unless they are included")
    image: MatchedImage
    vector: list[float] | None = Field(default=None, description="the image's vector, when vectors are included")
    explanation: Explanation | None = Field(default=None, description="why it is where it is, when that is asked for")


class Milliseconds(BaseModel):
    """The time of each stage; of several photos, which overlap, the sum."""

    decode: float = Field(description="bytes to upright pixels of the model's input size")
    wait: float = Field(description="in the queue of the model")
    embed: float = Field(description="pixels to a vector, in a batch with photos of other requests")
    search: float = Field(description="vector to items")


class SearchAnswer(BaseModel):
    """Items by descending score, or in the order of the ranking."""

    items: list[Match]
    cursor: str | None = Field(description="returns the next items when it is sent with the same search")
    bundle: str = Field(description="id of the bundle whose vectors were compared")
    revision: int = Field(description="the last write to the gallery that the answer includes")
    milliseconds: Milliseconds
    stale_seconds: float = Field(
        default=0, description="age of what was searched, while the gallery's server cannot be reached; normally 0"
    )
    window: Window | None = Field(
        default=None, description="the candidates that boosts, sort_by, diversity or negative examples acted on"
    )
    hints: list[str] = Field(description=HINTS)


class BatchAnswer(BaseModel):
    """The answers in the order of the searches."""

    answers: list[SearchAnswer]
