"""Tests of the workers of one machine: outcomes in order, rejects among them, no thread left behind."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.embedding import Bundle, Embedder, ImageError, ImageLimits, load_pixels, read_file
from index.gallery.types import Item, NewImage
from index.ingest.sources import SourceImage
from index.ingest.workers import LocalWorkers
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, tiny_photo


class MemorySource:
    """A source whose photos are held in memory, by place; `broken` raises what no source should."""

    def __init__(self, photos: dict[str, bytes]) -> None:
        self._photos = photos

    def read(self, place: str, limits: ImageLimits) -> bytes:
        if place == "broken":
            raise RuntimeError("the source is broken")
        return self._photos[place] if place in self._photos else read_file(Path(place), limits)


def image(number: int, place: str) -> SourceImage:
    return SourceImage(Item(id=f"item-{number}"), f"image-{number}", place)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path_factory.mktemp("bundle"), resize=40))


@pytest.fixture
def photos() -> dict[str, bytes]:
    photos = {str(number): tiny_photo(number % len(COLOURS), number) for number in range(100)}
    return photos | {"text": b"not an image"}


@pytest.fixture
def workers(bundle: Bundle, photos: dict[str, bytes]) -> Iterator[LocalWorkers]:
    source: Any = MemorySource(photos)
    workers = LocalWorkers(source, bundle, cores=2)
    yield workers
    workers.close()


def test_outcomes_and_rejects_come_in_the_order_of_the_chunk(
    workers: LocalWorkers, bundle: Bundle, photos: dict[str, bytes], tmp_path: Path
) -> None:
    places = [str(number) for number in range(100)]
    places[0] = places[50] = "text"
    places[7] = str(tmp_path / "missing.jpg")
    outcomes: list[Any] = workers.submit([image(n, place) for n, place in enumerate(places)], {}).result(60)
    names = [outcome.id if isinstance(outcome, NewImage) else outcome.image_id for outcome in outcomes]
    assert names == [f"image-{number}" for number in range(100)]
    reasons = {n: outcome.reason for n, outcome in enumerate(outcomes) if not isinstance(outcome, NewImage)}
    assert reasons == {0: "unsupported", 7: "unreadable", 50: "unsupported"}
    embedder = Embedder(bundle, threads=1)
    for number in (1, 8, 49, 51, 99):
        expected = embedder.embed(load_pixels(photos[str(number)], bundle.preprocessing)[None])[0]
        np.testing.assert_allclose(outcomes[number].vector, expected, atol=1e-6)


def test_chunk_without_a_usable_photo_has_only_rejects(workers: LocalWorkers) -> None:
    assert workers.submit([], {}).result(60) == []
    outcomes: list[Any] = workers.submit([image(1, "text"), image(2, "text")], {}).result(60)
    assert [outcome.reason for outcome in outcomes] == ["unsupported"] * 2


def test_unexpected_error_of_the_source_reaches_the_caller(workers: LocalWorkers) -> None:
    with pytest.raises(RuntimeError, match="the source is broken"):
        workers.submit([image(1, "1"), image(2, "broken")], {}).result(60)


def test_photo_over_the_limit_is_rejected_unread(workers: LocalWorkers, tmp_path: Path) -> None:
    with (tmp_path / "vast.jpg").open("wb") as file:
        file.truncate(2**40)
    [outcome] = workers.submit([image(1, str(tmp_path / "vast.jpg"))], {}).result(60)
    assert not isinstance(outcome, (NewImage, ImageError)) and getattr(outcome, "reason", None) == "too_large"


def test_closed_workers_leave_no_thread_behind(bundle: Bundle, photos: dict[str, bytes]) -> None:
    before = set(threading.enumerate())
    source: Any = MemorySource(photos)
    workers = LocalWorkers(source, bundle, cores=2)
    pending = [workers.submit([image(n, str(n)) for n in range(64)], {}) for _ in range(6)]
    workers.close()
    assert all(future.done() for future in pending)
    del workers, pending
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()
