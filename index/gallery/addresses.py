"""Gallery addresses: a folder, a PostgreSQL schema, or a PostgreSQL schema and a Qdrant cluster.

gallery
postgresql://shop@db1:5432,db2:5432/shops?schema=toys
postgresql://shop@db1/shops?schema=toys qdrant://node1:6334,node2:6334/toys
"""

import re
from pathlib import Path
from typing import NamedTuple

from index.errors import LookalikeError

_STORES = ("postgresql://", "postgres://")
_INDEXES = ("qdrant://", "qdrants://")
_USER_INFO = re.compile(r"(://[^:/?\s]*):\S*@")
_SECRETS = re.compile(r"([?&](?:password|sslpassword|passfile|api_key|key)=)[^&\s]*")


class Address(NamedTuple):
    """The parts of a gallery's address."""

    store: str
    """A folder or the URL of a database."""
    vectors: str | None = None
    """The URL of a vector engine; None for FAISS."""

    @property
    def is_folder(self) -> bool:
        return "://" not in self.store


def parse_address(address: str | Path) -> Address:
    """Splits an address into the parts of the store and of the vector index; opens neither."""
    text = str(address)
    if "://" not in text:
        return Address(text)
    store, *others = text.split()
    if not store.startswith(_STORES) or len(others) > 1 or not all(one.startswith(_INDEXES) for one in others):
        raise LookalikeError(
            f"The address {redact(text)} names an unknown engine.",
            "Name a folder, postgresql://..., or 'postgresql://... qdrant://...'.",
        )
    return Address(store, others[0] if others else None)


def redact(address: str | Path) -> str:
    """Returns an address without its passwords, for messages and logs."""
    return _SECRETS.sub(r"\1***", _USER_INFO.sub(r"\1:***@", str(address)))
