"""The dynamic batcher: photos of many requests through one model, in batches that form while the last ones run.

Nobody waits for a batch to fill: an idle lane of the embedder takes a single photo at once, a busy one finds a full
batch waiting, and none waits for another. On a CPU, where a batch saves nothing, a lane takes one photo after the other
and each is answered as soon as it is done. The queue is bounded, so an overload is told at once instead of making
everyone late.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from index.embedding.embedder import Embedder
from index.errors import LookalikeError

Pixels = NDArray[np.uint8]


class Overloaded(LookalikeError):
    """More work is waiting than can be done in good time."""

    kind = "overloaded"

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} photos are waiting already.", "Send the request again after the time told.")
        self.retry_after = retry_after


class Embedded(NamedTuple):
    """A photo's vector, and the seconds that it waited and was worked on."""

    vector: NDArray[np.float32]
    waited: float
    worked: float


class _Waiting(NamedTuple):
    pixels: Pixels
    answer: "asyncio.Future[Embedded]"
    since: float
    alone: bool


class Batcher:
    """Embeds photos for coroutines of one event loop; to be used as an asynchronous context."""

    def __init__(
        self,
        embedder: Embedder,
        *,
        most_waiting: int,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._embedder = embedder
        self._most_waiting = most_waiting
        self._on_batch = on_batch
        self._queue: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._threads = ThreadPoolExecutor(embedder.concurrency, "embed")
        self._busy = 0
        self._closing = False
        self._seconds_each = 0.0
        """Of late; tells how long a queue takes."""

    async def __aenter__(self) -> Self:
        self._runners = [asyncio.create_task(self._run()) for _ in range(self._embedder.concurrency)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes what was accepted."""
        self._closing = True
        self._arrived.set()
        await asyncio.gather(*self._runners)
        self._threads.shutdown()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def embed(self, pixels: Pixels, *, alone: bool = False) -> Embedded:
        """The vector of one photo; refused when too many wait. A caller that is cancelled takes its photo with it.

        A photo that is `alone`, when nobody else has any work for the cores, gets all of them: the answer comes sooner,
        but takes more of their time.
        """
        if self._closing or len(self._queue) >= self._most_waiting:
            raise Overloaded(len(self._queue), max(1.0, self._seconds_each * len(self._queue)))
        answer: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(pixels, answer, perf_counter(), alone))
        self._arrived.set()
        return await answer

    async def _run(self) -> None:
        """Keeps one lane busy."""
        while True:
            await self._arrived.wait()
            batch = self._take()
            if batch:
                await self._work(batch)
            elif self._closing:
                return
            else:
                self._arrived.clear()

    def _take(self) -> list[_Waiting]:
        """A full batch, but no more than this lane's share of what waits."""
        share = -(-len(self._queue) // self._embedder.concurrency)
        batch: list[_Waiting] = []
        while self._queue and len(batch) < min(share, self._embedder.preferred_batch):
            one = self._queue.popleft()
            if not one.answer.done():
                batch.append(one)
        return batch

    async def _work(self, batch: list[_Waiting]) -> None:
        begun = perf_counter()
        self._on_batch(len(batch))
        pixels = np.stack([one.pixels for one in batch])
        alone = len(batch) == 1 and batch[0].alone and not self._busy
        embed = self._embedder.embed if alone else self._embedder.embed_single_threaded
        self._busy += 1
        try:
            vectors = await asyncio.get_running_loop().run_in_executor(self._threads, embed, pixels)
        except Exception as error:  # a fault of the session is the fault of every request in the batch
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        finally:
            self._busy -= 1
        worked = perf_counter() - begun
        each = worked / len(batch)
        self._seconds_each = each if not self._seconds_each else 0.9 * self._seconds_each + 0.1 * each
        for one, vector in zip(batch, vectors, strict=True):
            if not one.answer.done():
                one.answer.set_result(Embedded(vector, begun - one.since, worked))
