"""The shapes of the API's answers."""

from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from service.problems import INVALID, ProblemError
from service.requests import MAX_GIVEN, Asked, Given, SearchBody
from service.schemas.responses import BatchAnswer as BatchAnswer
from service.schemas.responses import BundleStatus as BundleStatus
from service.schemas.responses import GalleryStatus as GalleryStatus
from service.schemas.responses import JobsAnswer as JobsAnswer
from service.schemas.responses import JobStatus as JobStatus
from service.schemas.responses import Limits as Limits
from service.schemas.responses import Match as Match
from service.schemas.responses import MatchedImage as MatchedImage
from service.schemas.responses import Milliseconds as Milliseconds
from service.schemas.responses import SearchAnswer as SearchAnswer
from service.schemas.responses import Status as Status


def shown(example: object, description: str = "") -> dict[str, Any]:
    """How a route's `responses` show an answer."""
    told = {"description": description} if description else {}
    return {**told, "content": {"application/json": {"example": example}}}


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


class JobBody(Given):
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
