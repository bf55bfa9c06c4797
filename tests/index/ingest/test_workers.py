"""Tests of the workers of one machine: outcomes in order, rejects among them, no thread left behind."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import ImageError, Region, decode_cost, decode_for_model, digest, load_part, load_pixels
from index.gallery.types import Item, NewImage
from index.ingest.embedding_plan import Reject, Unchanged
from index.ingest.sources import Source, SourceImage
from index.ingest.workers import LocalWorkers
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, tiny_photo, write_tiny_source


def image(number: int, place: str) -> SourceImage:
    return SourceImage(Item(id=f"item-{number}"), f"image-{number}", place, str(Path(place).parent))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path_factory.mktemp("bundle"), resize=40))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with a hundred photos and a file that is not a photo."""
    for number in range(100):
        (tmp_path / str(number)).write_bytes(tiny_photo(number % len(COLOURS), number))
    (tmp_path / "text").write_bytes(b"not an image")
    return tmp_path


@pytest.fixture
def workers(bundle: Bundle) -> Iterator[LocalWorkers]:
    workers = LocalWorkers(bundle, cores=2)
    yield workers
    workers.close()


def test_outcomes_and_rejects_come_in_the_order_of_the_chunk(
    workers: LocalWorkers, bundle: Bundle, photos: Path
) -> None:
    places = [str(photos / str(number)) for number in range(100)]
    places[0] = places[50] = str(photos / "text")
    places[7] = str(photos / "missing.jpg")
    outcomes: list[Any] = workers.submit([image(n, place) for n, place in enumerate(places)], {}).result(60)
    names = [outcome.id if isinstance(outcome, NewImage) else outcome.image_id for outcome in outcomes]
    assert names == [f"image-{number}" for number in range(100)]
    reasons = {n: outcome.reason for n, outcome in enumerate(outcomes) if not isinstance(outcome, NewImage)}
    assert reasons == {0: "unsupported", 7: "unreadable", 50: "unsupported"}
    embedder = Embedder(bundle, threads=1)
    for number in (1, 8, 49, 51, 99):
        expected = embedder.embed(load_pixels((photos / str(number)).read_bytes(), bundle.preprocessing)[None])[0]
        np.testing.assert_allclose(outcomes[number].vector, expected, atol=1e-6)


def test_a_region_is_embedded_alone_and_told_apart_by_its_digest(
    workers: LocalWorkers, bundle: Bundle, tmp_path: Path
) -> None:
    picture = Image.new("RGB", (400, 200), "red")
    picture.paste("blue", (200, 0, 400, 200))
    picture.save(tmp_path / "photo.jpg", quality=95)
    data, place = (tmp_path / "photo.jpg").read_bytes(), str(tmp_path / "photo.jpg")
    regions = [Region(0.5, 0, 1, 1), Region(200, 0, 400, 200, in_pixels=True), None, Region(900, 0, 910, 9, True)]
    images = [image(n, place)._replace(region=region) for n, region in enumerate(regions)]
    share, pixels, whole, outside = workers.submit(images, {}).result(60)
    assert isinstance(share, NewImage) and isinstance(pixels, NewImage) and isinstance(whole, NewImage)
    part = load_part(data, bundle.preprocessing, (0.5, 0, 1, 1))
    expected = Embedder(bundle, threads=1).embed(part[None])[0]
    for found in (share, pixels):
        np.testing.assert_allclose(found.vector, expected, atol=1e-3)
        with Image.open(io.BytesIO(found.thumbnail)) as thumbnail:
            assert thumbnail.size[0] == thumbnail.size[1]
            assert np.abs(np.asarray(thumbnail.convert("RGB")).mean((0, 1)) - (0, 0, 255)).max() < 20
    assert whole.digest == digest(data)
    assert len({whole.digest, share.digest, pixels.digest}) == 3
    assert isinstance(outside, Reject)
    assert outside.reason == "empty"
    digests = (share.digest, pixels.digest, whole.digest)
    known = {(f"item-{n}", f"image-{n}"): name for n, name in enumerate(digests)}
    assert workers.submit(images[:3], known).result(60) == [Unchanged(f"image-{n}") for n in range(3)]


def test_chunk_without_a_usable_photo_has_only_rejects(workers: LocalWorkers, photos: Path) -> None:
    assert workers.submit([], {}).result(60) == []
    text = str(photos / "text")
    outcomes: list[Any] = workers.submit([image(1, text), image(2, text)], {}).result(60)
    assert [outcome.reason for outcome in outcomes] == ["unsupported"] * 2


def test_unexpected_error_reaches_the_caller(
    workers: LocalWorkers, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the decoder is broken")

    monkeypatch.setattr("index.ingest.workers.decode_for_model", fail)
    with pytest.raises(RuntimeError, match="the decoder is broken"):
        workers.submit([image(1, str(photos / "1")), image(2, str(photos / "2"))], {}).result(60)


def test_photo_over_the_limit_is_rejected_unread(workers: LocalWorkers, tmp_path: Path) -> None:
    with (tmp_path / "vast.jpg").open("wb") as file:
        file.truncate(2**40)
    [outcome] = workers.submit([image(1, str(tmp_path / "vast.jpg"))], {}).result(60)
    assert not isinstance(outcome, (NewImage, ImageError)) and getattr(outcome, "reason", None) == "too_large"


def test_closed_workers_leave_no_thread_behind(bundle: Bundle, photos: Path) -> None:
    before = set(threading.enumerate())
    workers = LocalWorkers(bundle, cores=2)
    pending = [workers.submit([image(n, str(photos / str(n))) for n in range(64)], {}) for _ in range(6)]
    workers.close()
    assert all(future.done() for future in pending)
    del workers, pending
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_unchanged_photos_are_not_embedded(tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    chunk = list(Source([write_tiny_source(tmp_path / "source")]))[:4]
    Path(chunk[1].place).write_bytes(b"not a photo")
    data = [Path(image.place).read_bytes() for image in chunk]
    workers = LocalWorkers(bundle, cores=1)
    try:
        known = {(chunk[2].item.id, chunk[2].image_id): digest(data[2])}
        first, bad, unchanged, last = workers.submit(chunk, known).result(timeout=30)
    finally:
        workers.close()
    assert isinstance(bad, Reject) and (bad.item_id, bad.place) == (chunk[1].item.id, chunk[1].place)
    assert unchanged == Unchanged(chunk[2].image_id)
    embedder = Embedder(bundle, threads=1)
    for outcome, image, photo in ((first, chunk[0], data[0]), (last, chunk[3], data[3])):
        assert isinstance(outcome, NewImage) and (outcome.id, outcome.digest) == (image.image_id, digest(photo))
        expected = embedder.embed(load_pixels(photo, bundle.preprocessing)[None])[0]
        np.testing.assert_allclose(outcome.vector, expected, atol=1e-5)


def test_photo_that_needs_more_memory_than_there_is_becomes_a_reject(bundle: Bundle, photos: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (1000, 1000)).save(out, "WEBP")
    (photos / "huge").write_bytes(out.getvalue())
    workers = LocalWorkers(bundle, cores=2, max_decode_bytes=10_000_000)
    try:
        places = [str(photos / name) for name in ("1", "huge", "2")]
        first, huge, last = workers.submit([image(n, place) for n, place in enumerate(places)], {}).result(60)
    finally:
        workers.close()
    assert isinstance(first, NewImage) and isinstance(last, NewImage)
    assert isinstance(huge, Reject) and huge.reason == "too_many_pixels"
    assert "bytes of memory; the limit is 10,000,000" in huge.problem


def test_photos_that_fill_the_memory_are_decoded_one_after_the_other(
    bundle: Bundle, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, peak, lock, decode = 0, 0, threading.Lock(), decode_for_model

    def count_and_decode(*args: Any) -> Any:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1
        return decode(*args)

    monkeypatch.setattr("index.ingest.workers.decode_for_model", count_and_decode)
    cost = max(decode_cost((photos / str(number)).read_bytes()) for number in range(20))
    for budget, expected in ((cost, 1), (20 * cost, 5)):
        peak = 0
        workers = LocalWorkers(bundle, cores=4, max_decode_bytes=budget)
        try:
            outcomes = workers.submit([image(n, str(photos / str(n))) for n in range(20)], {}).result(60)
        finally:
            workers.close()
        assert all(isinstance(outcome, NewImage) for outcome in outcomes)
        assert peak == 1 if expected == 1 else 1 < peak <= expected
