"""What the stores share: how an item, a vector and a digest become a row, and an item again."""

import json
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from index.dates import format_instant
from index.gallery.errors import RESTORE, StoreError
from index.gallery.expiry import is_expired
from index.gallery.types import Item, NewImage
from index.items import EXPIRES_AT, Attribute, parse_attributes

_DIGEST = re.compile(r"[0-9a-f]{64}")


EXPIRY_MARK, EXPIRY_LENGTH = f'"{EXPIRES_AT}": "', len("2026-11-19T10:00:00")
"""What precedes an expiry in the JSON of attributes, and the length of its text up to the seconds, by which the stores
find those that may have expired."""


def find_expired(select: Callable[[str, int], Sequence[tuple[str, str]]], instant: int, limit: int) -> list[str]:
    """Returns the ids of items that have expired at an instant, at most so many.

    `select` returns id and attributes of at most so many items that may have expired, by the text of their expiry. An
    item that has not, because another attribute resembles an expiry, hides none that has.
    """
    until, count = format_instant(instant)[:EXPIRY_LENGTH], limit
    while True:
        rows = select(until, count)
        expired = [item_id for item_id, attributes in rows if is_expired(json.loads(attributes), instant)]
        if len(expired) >= limit or len(rows) < count:
            return expired[:limit]
        count *= 2


def format_attributes(attributes: Mapping[str, Attribute]) -> str:
    """Returns attributes as JSON, the same text for the same attributes."""
    return json.dumps(attributes, sort_keys=True, ensure_ascii=False, allow_nan=False)


def parse_item(item_id: str, title: str, url: str, attributes: str) -> Item:
    """Returns an item without validating it again: it was validated when it was stored."""
    try:
        parsed = parse_attributes(json.loads(attributes))
        return Item.model_construct(id=item_id, title=title, url=url, attributes=parsed)
    except (ValueError, TypeError):
        raise StoreError(f"The store is damaged: the attributes of {item_id!r} are not JSON.", RESTORE) from None


def check_digest(image: NewImage) -> None:
    """Refuses an image whose digest is not a SHA-256."""
    if not _DIGEST.fullmatch(image.digest):
        raise StoreError(
            f"Image {image.id!r} has the digest {image.digest[:80]!r}.", "Pass the SHA-256 of its bytes, in hex."
        )


def check_vector(image: NewImage, bundle_id: str, dimension: int | None) -> int:
    """Refuses an image whose vector is not one of its bundle; returns the number of its dimensions."""
    shape = np.shape(image.vector)
    # Also rejects NaN: every comparison with it is false.
    storable = bool((np.abs(image.vector) <= np.finfo(np.float16).max).all())
    if len(shape) != 1 or not shape[0] or (dimension and shape[0] != dimension) or not storable:
        wanted = f"({dimension},)" if dimension else "(n,)"
        raise StoreError(
            f"Image {image.id!r} has a vector of shape {shape}; bundle {bundle_id} makes finite ones of {wanted}.",
            "Embed it with this bundle.",
        )
    return int(shape[0])


def pack_vector(image: NewImage) -> bytes:
    """Returns a vector in half precision: what the exact index stores, so that a compaction changes no score."""
    return np.asarray(image.vector, "<f2").tobytes()
