"""The base of request bodies."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

MAX_ENTRIES = 256
"""Searches or photos per request that any settings allow."""
_MAX_KEYS = 32


class RequestBody(BaseModel):
    """A JSON body. Unknown keys are reported one by one; too many are refused before that becomes expensive."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_key_count(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > _MAX_KEYS:
            raise ValueError(f"{len(body):,} keys were sent; the limit is {_MAX_KEYS}")
        return body
