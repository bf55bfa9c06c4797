"""The base of request bodies."""

from typing_extensions import TypeAliasType

from index._util.models import ReceivedObject
from index.items import Attribute

MAX_ENTRIES = 256
"""Searches or photos per request that any settings allow."""
HINTS = "why nothing was found, such as a filter on an attribute that no item has"
Attributes = TypeAliasType("Attributes", dict[str, Attribute])
"""The attributes of an item in an answer."""


class RequestBody(ReceivedObject):
    """A JSON body."""
