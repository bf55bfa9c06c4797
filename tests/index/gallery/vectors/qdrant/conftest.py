"""Fixtures: galleries on a real cluster."""

import secrets
from collections.abc import Iterator

import pytest

from tests.support.qdrant import Cluster


@pytest.fixture(scope="module")
def address(qdrant_cluster: Cluster) -> Iterator[str]:
    """An address with a prefix of the module's own."""
    prefix = f"test-{secrets.token_hex(4)}"
    yield qdrant_cluster.address(prefix)
    qdrant_cluster.drop(prefix)
