"""The batcher: everybody gets their own vector, batches form under load, and an overload is told at once."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from service.inference import Batcher, Overloaded
from tests.support.tiny_bundle import SIDE, make_tiny_bundle

pytestmark = pytest.mark.anyio


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
    """A real embedder that waits for a sign before each batch, so that a test decides what queues up."""

    def __init__(self, embedder: Embedder) -> None:
        self.__dict__.update(embedder.__dict__)
        self.sign = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.on_all_cores: list[bool] = []

    def _run(self, session: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        self.on_all_cores.append(session is self._wide)
        self.begun.release()
        assert self.sign.acquire(timeout=10)
        return super()._run(session, pixels)


@pytest.fixture
def gate(embedder: Embedder) -> Iterator[Gate]:
    yield Gate(embedder)


def photos(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


async def begun(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.begun.acquire, True, 10)


async def test_everyone_gets_their_own_vector(embedder: Embedder) -> None:
    pixels = photos(40)
    async with Batcher(embedder, most_waiting=100) as batcher:
        answers = await asyncio.gather(*(batcher.embed(one) for one in pixels))
    np.testing.assert_allclose([answer.vector for answer in answers], embedder.embed(pixels), atol=1e-6)
    assert all(answer.waited >= 0 and answer.worked > 0 for answer in answers)


async def test_a_batch_forms_while_the_last_one_runs(gate: Gate) -> None:
    sizes: list[int] = []
    gate.preferred_batch = 4  # as on a GPU
    async with Batcher(gate, most_waiting=100, on_batch=sizes.append) as batcher:
        first = asyncio.create_task(batcher.embed(photos(1)[0]))
        await begun(gate)
        others = [asyncio.create_task(batcher.embed(one)) for one in photos(40)]
        await asyncio.sleep(0)
        assert batcher.waiting == 40
        gate.sign.release(11)
        await asyncio.gather(first, *others)
    assert sizes == [1] + 10 * [4]


async def test_on_a_cpu_a_photo_is_answered_without_waiting_for_those_behind_it(gate: Gate) -> None:
    sizes: list[int] = []
    async with Batcher(gate, most_waiting=100, on_batch=sizes.append) as batcher:
        tasks = [asyncio.create_task(batcher.embed(one)) for one in photos(5)]
        for answered in range(1, 6):
            gate.sign.release()
            await asyncio.wait_for(tasks[answered - 1], 10)
            assert sum(task.done() for task in tasks) == answered
    assert sizes == 5 * [1]


async def test_every_lane_takes_its_share_and_waits_for_no_other(bundle: Bundle) -> None:
    sizes: list[int] = []
    gate = Gate(Embedder(bundle, threads=2))
    gate.preferred_batch = 4
    async with Batcher(gate, most_waiting=100, on_batch=sizes.append) as batcher:
        tasks = [asyncio.create_task(batcher.embed(one)) for one in photos(6)]
        await begun(gate)
        await begun(gate)
        assert batcher.waiting == 1, "both lanes run at once, none has taken all"
        gate.sign.release(3)
        await asyncio.gather(*tasks)
    assert sizes == [3, 2, 1]
    assert gate.on_all_cores == [False, False, False]


async def test_only_a_photo_that_is_alone_gets_all_cores(bundle: Bundle) -> None:
    gate = Gate(Embedder(bundle, threads=2))
    async with Batcher(gate, most_waiting=100) as batcher:
        first = asyncio.create_task(batcher.embed(photos(1)[0], alone=True))
        await begun(gate)
        second = asyncio.create_task(batcher.embed(photos(1)[0], alone=True))
        await begun(gate)
        gate.sign.release(2)
        with_all, on_lane = [(await task).vector for task in (first, second)]
    assert gate.on_all_cores == [True, False], "the cores were not idle any more"
    np.testing.assert_allclose(with_all, on_lane, atol=1e-6)


async def test_an_overload_is_told_at_once_and_the_accepted_are_served(gate: Gate) -> None:
    async with Batcher(gate, most_waiting=2) as batcher:
        accepted = [asyncio.create_task(batcher.embed(photos(1)[0]))]
        await begun(gate)
        accepted += [asyncio.create_task(batcher.embed(one)) for one in photos(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 photos are waiting") as told:
            await batcher.embed(photos(1)[0])
        assert told.value.retry_after >= 1
        gate.sign.release(3)
        assert len(await asyncio.gather(*accepted)) == 3


async def test_a_photo_whose_sender_left_is_not_embedded(gate: Gate) -> None:
    sizes: list[int] = []
    async with Batcher(gate, most_waiting=10, on_batch=sizes.append) as batcher:
        first = asyncio.create_task(batcher.embed(photos(1)[0]))
        await begun(gate)
        left, stayed = (asyncio.create_task(batcher.embed(one)) for one in photos(2))
        await asyncio.sleep(0)
        left.cancel()
        gate.sign.release(2)
        await asyncio.gather(first, stayed)
    assert sizes == [1, 1]


async def test_closing_finishes_what_was_accepted(gate: Gate) -> None:
    async with Batcher(gate, most_waiting=10) as batcher:
        tasks = [asyncio.create_task(batcher.embed(one)) for one in photos(3)]
        await asyncio.sleep(0)
        gate.sign.release(3)
    assert len(await asyncio.gather(*tasks)) == 3
    with pytest.raises(Overloaded):
        await batcher.embed(photos(1)[0])


async def test_a_fault_of_the_session_reaches_everyone_in_the_batch_and_nobody_else(embedder: Embedder) -> None:
    async with Batcher(embedder, most_waiting=10) as batcher:
        wrong = np.zeros((4, 4, 3), np.uint8)
        with pytest.raises(ValueError, match="expected uint8 pixels"):
            await batcher.embed(wrong)
        assert (await batcher.embed(photos(1)[0])).vector.shape == (48,)
