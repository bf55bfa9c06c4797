"""Re-indexing jobs: the body that starts one, and how one is returned."""

import re
from datetime import UTC, datetime
from typing import Self

from pydantic import AwareDatetime, BaseModel, Field
from typing_extensions import TypeAliasType

from index import jobs
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


_FOLDERS = re.compile(r"(?<![\w./:-])(?:(?:file|local)://)?/(?:[^\s/,;:'\"]+/)+", re.IGNORECASE)


JobState = TypeAliasType("JobState", jobs.JobState)


class JobStatus(BaseModel):
    """A re-indexing job. Absolute paths are shortened to the names of their files."""

    id: int
    source: str = Field(description="the operator's name of the source")
    bundle_id: str
    state: JobState
    stage: str = Field(description="what it does now: checking, embedding, deleting, building")
    started: AwareDatetime
    updated: AwareDatetime
    seconds: float = Field(description="time from the start to the last update, whatever the clock shows")
    total: int = Field(description="images of the source; 0 until it was checked")
    done: int
    embedded: int
    unchanged: int
    rejected: int
    deleted: int
    missing: int = Field(description="images without a vector of the new bundle when it was activated")
    revision: int | None = Field(description="the gallery's revision when the job ended")
    message: str | None
    rate: float = Field(description="images per second since the start")
    seconds_left: float | None = Field(description="estimated seconds until the end; null before the first image")

    @classmethod
    def of(cls, record: JobRecord) -> Self:
        shown = {
            "source": _FOLDERS.sub("", record.source),
            "message": _FOLDERS.sub("", record.message) or None,
            "started": datetime.fromtimestamp(record.started, UTC),
            "updated": datetime.fromtimestamp(record.updated, UTC),
            "rate": record.rate,
            "seconds_left": record.seconds_left,
        }
        return cls(**{**record.model_dump(), **shown})


class JobsAnswer(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobStatus]
