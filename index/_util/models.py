"""The base classes of immutable values, and of what clients send."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

_MAX_KEYS = 32


class Frozen(BaseModel):
    """A value: compared by content, never changed in place; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReceivedObject(BaseModel):
    """A JSON object from outside. Unknown keys are reported one by one; too many are refused before that is slow."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_key_count(cls, document: Any) -> Any:
        if isinstance(document, dict) and len(document) > _MAX_KEYS:
            raise ValueError(f"{len(document):,} keys were sent; the limit is {_MAX_KEYS}")
        return document
