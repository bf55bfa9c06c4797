"""The record of a job, as the job log stores it and the HTTP API returns it.

Imports neither NumPy nor an engine, so that the HTTP client can use it.
"""

from typing import Literal

from pydantic import Field

from index._util.models import Frozen

JobState = Literal["running", "done", "partial", "failed", "cancelled", "interrupted"]


class JobRecord(Frozen):
    """One re-index job, from its start to its end."""

    id: int = 0
    source: str
    bundle_id: str
    state: JobState = "running"
    stage: str = Field(default="checking", description="what it does now: checking, embedding, deleting, building")
    started: float = Field(description="seconds since 1970")
    updated: float
    seconds: float = Field(default=0, description="time from the start to the last update, whatever the clock shows")
    total: int = Field(default=0, description="images of the source; 0 until it was checked")
    done: int = 0
    embedded: int = 0
    unchanged: int = 0
    rejected: int = 0
    deleted: int = 0
    missing: int = Field(default=0, description="images without a vector of the new bundle when it was activated")
    revision: int | None = Field(default=None, description="the gallery's revision when the job ended")
    message: str = ""

    @property
    def rate(self) -> float:
        """Images per second since the start; 0 if the time is not known."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end at the current rate; unknown before the first image."""
        return (self.total - self.done) / self.rate if self.rate and self.state == "running" else None
