"""Re-indexing jobs: the body that starts one, and how one is returned."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, computed_field

from index.ingest.options import CommonOptions
from index.jobs import JobRecord
from service.schemas.base import RequestBody


class JobBody(RequestBody, CommonOptions):
    """A re-indexing job to start. A request names sources and bundles of the operator's settings, never paths."""

    source: str = Field(description="Name of a source in the operator's settings.")
    bundle: str | None = Field(
        default=None, description="Name of a bundle in the operator's settings. Default: the active one."
    )
    queries: str | None = Field(
        default=None,
        description="Name of a source of labelled photos to test the bundle with before it is activated.",
    )


class JobStatus(JobRecord):
    """A job, with its rate and its remaining time."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # clients parse responses that include computed fields

    @computed_field(description="images per second since the start")  # type: ignore[prop-decorator]
    @property
    def rate(self) -> float:
        return super().rate

    @computed_field(description="estimated seconds until the end; null before the first image")  # type: ignore[prop-decorator]
    @property
    def seconds_left(self) -> float | None:
        return super().seconds_left

    @classmethod
    def of(cls, record: JobRecord) -> Self:
        return cls(**record.model_dump())


class JobsAnswer(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobStatus]
