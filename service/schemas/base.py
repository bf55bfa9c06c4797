"""The base of request bodies."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import TypeAliasType

from index.items import Attribute

MAX_ENTRIES = 256
"""Searches or photos per request that any settings allow."""
_MAX_KEYS = 32
HINTS = "why nothing was found, such as a filter on an attribute that no item has"
Attributes = TypeAliasType("Attributes", dict[str, Attribute])
"""The attributes of an item in an answer."""


class RequestBody(BaseModel):
    """A JSON body. Unknown keys are reported one by one; too many are refused before that becomes expensive."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_key_count(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > _MAX_KEYS:
            raise ValueError(f"{len(body):,} keys were sent; the limit is {_MAX_KEYS}")
        return body
