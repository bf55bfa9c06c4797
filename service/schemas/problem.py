"""The body of every error."""

from pydantic import BaseModel, Field


class Problem(BaseModel):
    """An RFC 9457 problem document."""

    type: str = Field(description="identifier of the kind of problem; stable, for programs")
    title: str = Field(description="the kind of problem in words")
    status: int
    detail: str = Field(description="what is wrong with this request")
    remedy: str = Field(description="what to do about it")
    request_id: str = Field(description="identifies the request in the service's log")
