"""The batcher and the active model: batches form under load, and a newly activated bundle is followed."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.gallery import open_gallery
from index.gallery.types import NeededBundles
from service.admission import Overloaded
from service.inference import ActiveModel, Batcher, NotReady
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.service.support import block_gallery
from tests.support.tiny_bundle import SIDE, make_tiny_bundle
from tests.support.tiny_gallery import index_source, tiny_photo, write_tiny_source


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path_factory.mktemp("bundle")))


@pytest.fixture(scope="module")
def embedder(bundle: Bundle) -> Embedder:
    return Embedder(bundle, threads=1)


class Gate(Embedder):
    """A real embedder that waits before each batch until it is released, so that a test decides what queues up."""

    def __init__(self, embedder: Embedder) -> None:
        self.__dict__.update(embedder.__dict__)
        self.released = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.on_all_cores: list[bool] = []

    def _run(self, session: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.on_all_cores.append(session is self._wide)
        self.started.release()
        assert self.released.acquire(timeout=10)
        return super()._run(session, pixels)


@pytest.fixture
def gate(embedder: Embedder) -> Iterator[Gate]:
    yield Gate(embedder)


def photos(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def unlimited(waiting: int, seconds_each: float) -> None:
    """Accepts every photo."""


async def wait_for_batch(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.started.acquire, True, 10)


@pytest.mark.anyio
async def test_every_caller_gets_its_own_vector(embedder: Embedder) -> None:
    pixels = photos(40)
    async with Batcher(embedder, check_queue=unlimited) as batcher:
        embeddings = await asyncio.gather(*(batcher.embed(one) for one in pixels))
    np.testing.assert_allclose([embedding.vector for embedding in embeddings], embedder.embed(pixels), atol=1e-6)
    assert all(embedding.waited >= 0 and embedding.computed > 0 for embedding in embeddings)


@pytest.mark.anyio
async def test_a_batch_forms_while_the_previous_one_runs(gate: Gate) -> None:
    sizes: list[int] = []
    gate.preferred_batch = 4  # as on a GPU
    async with Batcher(gate, check_queue=unlimited, on_batch=sizes.append) as batcher:
        first = asyncio.create_task(batcher.embed(photos(1)[0]))
        await wait_for_batch(gate)
        others = [asyncio.create_task(batcher.embed(one)) for one in photos(40)]
        await asyncio.sleep(0)
        assert batcher.waiting == 40
        gate.released.release(11)
        await asyncio.gather(first, *others)
    assert sizes == [1] + 10 * [4]


@pytest.mark.anyio
async def test_on_a_cpu_a_photo_does_not_wait_for_those_behind_it(gate: Gate) -> None:
    sizes: list[int] = []
    async with Batcher(gate, check_queue=unlimited, on_batch=sizes.append) as batcher:
        tasks = [asyncio.create_task(batcher.embed(one)) for one in photos(5)]
        for answered in range(1, 6):
            gate.released.release()
            await asyncio.wait_for(tasks[answered - 1], 10)
            assert sum(task.done() for task in tasks) == answered
    assert sizes == 5 * [1]


@pytest.mark.anyio
async def test_every_lane_takes_its_share_and_does_not_wait_for_others(bundle: Bundle) -> None:
    sizes: list[int] = []
    gate = Gate(Embedder(bundle, threads=2))
    gate.preferred_batch = 4
    async with Batcher(gate, check_queue=unlimited, on_batch=sizes.append) as batcher:
        tasks = [asyncio.create_task(batcher.embed(one)) for one in photos(6)]
        await wait_for_batch(gate)
        await wait_for_batch(gate)
        assert batcher.waiting == 1, "both lanes run at once, and neither has taken all photos"
        gate.released.release(3)
        await asyncio.gather(*tasks)
    assert sizes == [3, 2, 1]
    assert gate.on_all_cores == [False, False, False]


@pytest.mark.anyio
async def test_only_a_photo_that_is_alone_gets_all_cores(bundle: Bundle) -> None:
    gate = Gate(Embedder(bundle, threads=2))
    async with Batcher(gate, check_queue=unlimited) as batcher:
        first = asyncio.create_task(batcher.embed(photos(1)[0], alone=True))
        await wait_for_batch(gate)
        second = asyncio.create_task(batcher.embed(photos(1)[0], alone=True))
        await wait_for_batch(gate)
        gate.released.release(2)
        with_all, on_lane = [(await task).vector for task in (first, second)]
    assert gate.on_all_cores == [True, False], "the cores were not idle any more"
    np.testing.assert_allclose(with_all, on_lane, atol=1e-6)


@pytest.mark.anyio
async def test_a_full_queue_refuses_at_once_and_the_accepted_photos_are_embedded(gate: Gate) -> None:
    def check(waiting: int, seconds_each: float) -> None:
        if waiting >= 2:
            raise Overloaded(f"{waiting} photos are waiting")

    async with Batcher(gate, check_queue=check) as batcher:
        accepted = [asyncio.create_task(batcher.embed(photos(1)[0]))]
        await wait_for_batch(gate)
        accepted += [asyncio.create_task(batcher.embed(one)) for one in photos(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 photos are waiting"):
            await batcher.embed(photos(1)[0])
        gate.released.release(3)
        assert len(await asyncio.gather(*accepted)) == 3


@pytest.mark.anyio
async def test_a_photo_whose_caller_was_cancelled_is_not_embedded(gate: Gate) -> None:
    sizes: list[int] = []
    async with Batcher(gate, check_queue=unlimited, on_batch=sizes.append) as batcher:
        first = asyncio.create_task(batcher.embed(photos(1)[0]))
        await wait_for_batch(gate)
        left, stayed = (asyncio.create_task(batcher.embed(one)) for one in photos(2))
        await asyncio.sleep(0)
        left.cancel()
        gate.released.release(2)
        await asyncio.gather(first, stayed)
    assert sizes == [1, 1]


@pytest.mark.anyio
async def test_closing_finishes_the_accepted_photos(gate: Gate) -> None:
    async with Batcher(gate, check_queue=unlimited) as batcher:
        tasks = [asyncio.create_task(batcher.embed(one)) for one in photos(3)]
        await asyncio.sleep(0)
        gate.released.release(3)
    assert len(await asyncio.gather(*tasks)) == 3
    with pytest.raises(Overloaded):
        await batcher.embed(photos(1)[0])


@pytest.mark.anyio
async def test_an_error_of_the_session_fails_its_batch_and_no_other(embedder: Embedder) -> None:
    async with Batcher(embedder, check_queue=unlimited) as batcher:
        wrong = np.zeros((4, 4, 3), np.uint8)
        with pytest.raises(ValueError, match="expected uint8 pixels"):
            await batcher.embed(wrong)
        assert (await batcher.embed(photos(1)[0])).vector.shape == (48,)


# The active model


@pytest.mark.slow
def test_the_service_follows_a_newly_activated_bundle_and_never_mixes_two(tmp_path: Path) -> None:
    bundle, other = make_tiny_bundle(tmp_path / "one"), make_tiny_bundle(tmp_path / "two", grid=2)
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    first = index_source(source, gallery=gallery, bundle=bundle)
    with serving(Settings(gallery=gallery, threads=1)) as client:
        threads, is_over = ThreadPoolExecutor(2), threading.Event()

        def scores() -> set[tuple[str, float, float]]:
            """Returns the bundle and scores of a search by photo, and of one by item, each paired with its bundle."""
            by_photo = client.post("/v1/search?limit=1", files={"image": tiny_photo(2, 5)}).json()
            assert by_photo["items"][0]["id"] == "ball-blue"
            by_item = client.post("/v1/search?limit=1", json={"item_id": "ball-blue"}).json()
            return {
                (by_photo["bundle"], round(by_photo["items"][0]["score"], 4), 0.0),
                (by_item["bundle"], 0.0, round(by_item["items"][0]["score"], 4)),
            }

        def search_until_over() -> set[tuple[str, float, float]]:
            seen = set()
            while not is_over.is_set():
                seen |= scores()
            return seen

        before = scores()

        seen = [threads.submit(search_until_over) for _ in range(2)]
        second = index_source(source, gallery=gallery, bundle=other)
        deadline = time.monotonic() + 20
        while client.post("/v1/search", files={"image": tiny_photo(0, 0)}).json()["bundle"] != second.bundle_id:
            assert time.monotonic() < deadline, "the service must follow within seconds"
        is_over.set()
        after = scores()
        assert {bundle for bundle, *_ in before} == {first.bundle_id} and not before & after
        assert {bundle for bundle, *_ in after} == {second.bundle_id}
        assert set.union(*(future.result() for future in seen)) <= before | after, "vectors of two bundles never meet"


def test_a_service_without_requests_follows_too(tmp_path: Path) -> None:
    bundle, other = make_tiny_bundle(tmp_path / "one"), make_tiny_bundle(tmp_path / "two", grid=2)
    source, gallery = write_tiny_source(tmp_path / "source"), tmp_path / "gallery"
    first = index_source(source, gallery=gallery, bundle=bundle)
    with serving(Settings(gallery=gallery, threads=1, bundle_poll_seconds=0.05)) as client:
        assert client.get("/v1/status").json()["bundle"]["id"] == first.bundle_id
        second = index_source(source, gallery=gallery, bundle=other)
        deadline = time.monotonic() + 20
        while client.get("/v1/status").json()["bundle"]["id"] != second.bundle_id:
            assert time.monotonic() < deadline, "the service must follow within seconds"


def test_requests_do_not_wait_for_a_gallery_that_cannot_be_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings.model_copy(update={"bundle_poll_seconds": 0.01})) as client:
        blocker = block_gallery(settings, monkeypatch, "active_bundle")
        try:
            assert blocker.started.acquire(timeout=60), "the watcher is stuck in its thread"
            for _ in range(5):
                assert client.post("/v1/search", files={"image": tiny_photo(2, 5)}).status_code == 200
                assert client.get("/readyz").status_code == 200
        finally:
            blocker.released.set()


def test_an_empty_gallery_without_a_bundle_names_the_remedy(tmp_path: Path) -> None:
    with serving(Settings(gallery=tmp_path / "gallery", create=True, threads=1)) as client:
        assert client.get("/healthz").status_code == 200
        problem(client.get("/readyz"), 503, "not-ready")
        body = problem(client.post("/v1/search", files={"image": tiny_photo(0, 0)}), 503, "not-ready")
        assert "lookalike reindex" in body["remedy"]
        source = write_tiny_source(tmp_path / "source")
        index_source(source, gallery=tmp_path / "gallery", bundle=make_tiny_bundle(tmp_path / "bundle"))
        first = client.post("/v1/search", files={"image": tiny_photo(0, 0)})
        assert first.status_code == 200 and first.json()["items"], "the first search waits for the model"
        assert client.get("/readyz").status_code == 200


def test_a_first_bundle_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    gallery, source = tmp_path / "gallery", write_tiny_source(tmp_path / "source")
    with serving(Settings(gallery=gallery, create=True, threads=1)) as client:
        indexed = index_source(source, gallery=gallery, bundle=make_tiny_bundle(tmp_path / "bundle"))
        (gallery / "bundles" / indexed.bundle_id / "model.onnx").unlink()
        body = problem(client.post("/v1/search", files={"image": tiny_photo(0, 0)}), 503, "not-ready")
        assert indexed.bundle_id in body["detail"] and "log" in body["remedy"]


@pytest.mark.anyio
async def test_the_model_of_a_prepared_bundle_is_in_use_once_it_is_activated_and_the_previous_one_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Bundle.load(make_tiny_bundle(tmp_path / name, grid=grid)) for name, grid in (("a", 4), ("b", 2)))
    index_source(write_tiny_source(tmp_path / "source"), gallery=tmp_path / "gallery", bundle=first.directory)
    with open_gallery(tmp_path / "gallery") as gallery:
        settings = Settings(gallery=tmp_path / "gallery", threads=1, bundle_poll_seconds=3600)
        active = ActiveModel(gallery, settings, check_queue=unlimited, on_batch=lambda size: None)
        await active.start()
        assert await active.follow() == NeededBundles(first.id, ()) and active.prepared == []
        gallery.keep_bundle(second)
        job = gallery.jobs.begin("catalogue.csv", second.id)
        assert await active.follow() == NeededBundles(first.id, (second.id,))
        assert active.prepared == [], "a service that is only searched loads no second model"
        model, same = await asyncio.gather(active.load(second.id), active.load(second.id))
        assert model is same and active.prepared == [model] and active.current().bundle.id == first.id
        old = active.current()
        job.update(state="cancelled")
        with old.in_use():
            assert index_source(
                tmp_path / "source" / "catalogue.csv", gallery=tmp_path / "gallery", bundle=second.directory
            )
            monkeypatch.setattr(gallery, "load_bundle", lambda bundle_id: pytest.fail("it was loaded already"))
            await active.follow(wait=False)
            assert active.current() is model and active.prepared == []
            await old.batcher.embed(photos(1)[0])
        await active.close()
        for closed in (old, model):
            with pytest.raises(Overloaded):
                await closed.batcher.embed(photos(1)[0])


@pytest.mark.anyio
async def test_a_model_that_fails_its_first_batch_is_not_used_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, other = (make_tiny_bundle(tmp_path / name, grid=grid) for name, grid in (("a", 4), ("b", 2)))
    source = write_tiny_source(tmp_path / "source")
    first = index_source(source, gallery=tmp_path / "gallery", bundle=bundle)
    with open_gallery(tmp_path / "gallery") as gallery:
        settings = Settings(
            gallery=tmp_path / "gallery", threads=1, bundle_poll_seconds=3600, bundle_retry_seconds=0.01
        )
        active = ActiveModel(gallery, settings, check_queue=unlimited, on_batch=lambda size: None)
        await active.start()
        second = index_source(source, gallery=tmp_path / "gallery", bundle=other)
        with monkeypatch.context() as broken:
            broken.setattr(Embedder, "_run", lambda *_: 1 / 0)
            await active.follow()
            assert active.current().bundle.id == first.bundle_id
            with pytest.raises(NotReady, match=second.bundle_id):
                await active.load(second.bundle_id)
        await asyncio.sleep(0.02)
        await active.follow()
        assert active.current().bundle.id == second.bundle_id
        await active.close()
