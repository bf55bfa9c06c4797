"""Expiry: from the instant in its attribute `expires_at` on, no answer contains an item; maintenance removes it.

What has expired is hidden by a condition that is added to filters, and only while something in a view has expired.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from index.dates import parse_instant
from index.gallery.filters import Filter, Range
from index.items import EXPIRES_AT, Attribute


def current_instant() -> int:
    """Returns the microseconds since 1970."""
    return time.time_ns() // 1000


def expiry_of(attributes: Mapping[str, Attribute]) -> int | None:
    """Returns the instant at which an item with these attributes expires; None if it never does."""
    value = attributes.get(EXPIRES_AT)
    return parse_instant(value) if isinstance(value, str) else None


def is_expired(attributes: Mapping[str, Attribute], instant: int) -> bool:
    """Whether an item with these attributes has expired at an instant."""
    expiry = expiry_of(attributes)
    return expiry is not None and expiry <= instant


def hide_expired(filter: Filter | None, instant: int) -> Filter:
    """Returns a filter that items match which match another one, and have not expired at an instant."""
    expired = Filter(((EXPIRES_AT, Range("date", (("lte", instant),))),))
    wanted = filter or Filter()
    return replace(wanted, negated=(*wanted.negated, expired))
