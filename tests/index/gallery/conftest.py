"""The galleries that the tests of this folder open."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from index.gallery import Gallery, open_gallery

from .memory import MemoryData, MemoryIndex, MemoryStore
from .reference import BUNDLE, TRIO, PlainGallery, Shop, shop


class OpenEngine(Protocol):
    """Opens the test's gallery; each call another handle of the same one, as another process would have."""

    def __call__(self) -> Gallery: ...


@pytest.fixture(params=["sqlite-faiss", "memory"])
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenEngine]:
    """Opens one new gallery, any number of times, for each pair of store and vector index."""
    opened: list[Gallery] = []
    data = MemoryData()

    def open_again() -> Gallery:
        if request.param == "memory":
            store = MemoryStore(data)
            opened.append(Gallery(store, MemoryIndex(store), address="memory"))
        else:
            opened.append(open_gallery(tmp_path / "gallery", create=not opened))
        return opened[-1]

    yield open_again
    for gallery in opened:
        gallery.close()


@pytest.fixture
def gallery(open_engine: OpenEngine) -> Gallery:
    """An empty gallery."""
    return open_engine()


@pytest.fixture
def trio(gallery: Gallery) -> Gallery:
    """A mug, a shoe and a bag, activated."""
    gallery.upsert(TRIO, BUNDLE)
    gallery.activate(BUNDLE)
    return gallery


@pytest.fixture
def stocked(gallery: Gallery) -> Shop:
    """Half of it compacted, half not."""
    entries = shop(160)
    gallery.upsert(entries[:80], BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert(entries[80:], BUNDLE)
    return Shop(gallery, PlainGallery(entries), entries[7][1][0].vector)
