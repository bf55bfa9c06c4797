"""Fixtures: galleries on every pair of store and vector index."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from index.gallery import Gallery, open_gallery
from tests.support.qdrant import Cluster, open_gallery_on, run_cluster

from .memory import MemoryData, MemoryIndex, MemoryStore
from .reference import BUNDLE, TRIO, ReferenceGallery, Shop, make_entries


class OpenEngine(Protocol):
    """Opens the test's gallery; each call returns another handle of the same one, as another process would have."""

    def __call__(self) -> Gallery: ...


CLUSTER_ENGINES = ["sqlite-qdrant"] if os.environ.get("CLUSTER") else []
"""Only `make test-cluster` runs the contract tests on these: they take minutes."""


@pytest.fixture(scope="session")
def qdrant_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of Qdrant; skips where the server is not installed."""
    with run_cluster(tmp_path_factory.mktemp("qdrant")) as cluster:
        yield cluster


@pytest.fixture(
    params=["sqlite-faiss", "memory", *(pytest.param(it, marks=pytest.mark.slow) for it in CLUSTER_ENGINES)]
)
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenEngine]:
    """Opens one gallery any number of times; the test runs once per pair of store and vector index."""
    handles: list[Gallery] = []
    data = MemoryData()
    prefix = f"test-{secrets.token_hex(4)}"
    cluster = request.getfixturevalue("qdrant_cluster") if request.param in CLUSTER_ENGINES else None

    def open_handle() -> Gallery:
        if request.param == "memory":
            store = MemoryStore(data)
            handles.append(Gallery(store, MemoryIndex(store), address="memory"))
        elif cluster:
            handles.append(open_gallery_on(cluster.address(prefix), tmp_path / "gallery"))
        else:
            handles.append(open_gallery(tmp_path / "gallery", create=not handles))
        return handles[-1]

    yield open_handle
    for gallery in handles:
        gallery.close()
    if cluster:
        cluster.drop(prefix)


@pytest.fixture
def gallery(open_engine: OpenEngine) -> Gallery:
    """An empty gallery."""
    return open_engine()


@pytest.fixture
def trio(gallery: Gallery) -> Gallery:
    """A gallery with a mug, a shoe and a bag, and an index of them."""
    gallery.upsert(TRIO, BUNDLE)
    gallery.activate(BUNDLE)
    return gallery


@pytest.fixture
def shop(gallery: Gallery) -> Shop:
    """A gallery with an index of half of its items; the other half is in the delta."""
    entries = make_entries(160)
    gallery.upsert(entries[:80], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert(entries[80:], BUNDLE)
    return Shop(gallery, ReferenceGallery(entries), entries[7][1][0].vector)
