"""The base class of immutable values."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A value: compared by content, never changed in place; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
