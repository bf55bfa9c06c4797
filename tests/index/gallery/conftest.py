"""Fixtures: galleries on every pair of store and vector index."""

import os
import secrets
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Protocol

import pytest

from index.gallery import Gallery, open_gallery
from tests.support.postgres import PostgresServer
from tests.support.qdrant import QUICK_OPTIONS, Cluster, run_cluster

from .memory import MemoryData, MemoryIndex, MemoryStore
from .reference import BUNDLE, TRIO, ReferenceGallery, Shop, make_entries


class OpenEngine(Protocol):
    """Opens the test's gallery; each call returns another handle of the same one, as another process would have."""

    def __call__(self) -> Gallery: ...


_schemas = count(1)


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The address of a new gallery in PostgreSQL: a schema of its own."""
    schema = f"test_{next(_schemas)}"
    yield f"{postgres.url()}?schema={schema}"
    postgres.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


@pytest.fixture(scope="session")
def qdrant_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of Qdrant; skips where the server is not installed."""
    with run_cluster(tmp_path_factory.mktemp("qdrant")) as cluster:
        yield cluster


ENGINES = ["sqlite-faiss", "memory", "postgres-faiss"]
if os.environ.get("CLUSTER"):
    # Only for `make test-cluster`: on three nodes of Qdrant these tests take minutes.
    ENGINES.append("postgres-qdrant")


@pytest.fixture(params=ENGINES)
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenEngine]:
    """Opens one gallery any number of times; the test runs once per pair of store and vector index."""
    handles: list[Gallery] = []
    data = MemoryData()
    address: str | Path = tmp_path / "gallery"
    prefix = f"test-{secrets.token_hex(4)}"
    cluster: Cluster | None = None
    if request.param.startswith("postgres"):
        address = request.getfixturevalue("postgres_url")
    if request.param == "postgres-qdrant":
        cluster = request.getfixturevalue("qdrant_cluster")
        address = f"{address} {cluster.address(prefix, QUICK_OPTIONS)}"

    def open_handle() -> Gallery:
        if request.param == "memory":
            store = MemoryStore(data)
            handles.append(Gallery(store, MemoryIndex(store), address="memory"))
        else:
            handles.append(open_gallery(address, create=not handles, cache=tmp_path / "cache"))
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
