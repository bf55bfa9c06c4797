"""Embeds the photos of requests: the dynamic batcher, and the model of the gallery's active bundle.

The batcher forms batches while the previous ones run. No photo waits for a batch to fill: an idle lane of the embedder
takes a single photo at once, a busy one finds a full batch waiting, and lanes do not wait for each other. On a CPU,
where a batch saves nothing, a lane takes one photo after the other and returns each as soon as it is done.

The active model follows the gallery: when another bundle is activated, its model is loaded while the previous one keeps
serving. Requests use what is known without I/O; a task looks for a newly activated bundle in a worker thread.
"""

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, perf_counter
from types import TracebackType
from typing import NamedTuple, Self

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.errors import LookalikeError
from index.gallery import Gallery
from index.gallery.errors import BundleMismatch
from service.admission import Overloaded
from service.settings import Settings

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]
CheckQueue = Callable[[int, float], None]
"""Raises Overloaded when a queue of this many photos, each of which takes so many seconds, is too long."""


class Embedding(NamedTuple):
    """The vector of a photo, and the seconds that it waited and was computed for."""

    vector: NDArray[np.float32]
    waited: float
    computed: float


class _QueuedPhoto(NamedTuple):
    pixels: Pixels
    result: "asyncio.Future[Embedding]"
    since: float
    alone: bool


class Batcher:
    """Embeds photos for coroutines of one event loop; an asynchronous context manager."""

    def __init__(
        self,
        embedder: Embedder,
        *,
        check_queue: CheckQueue,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._embedder = embedder
        self._check_queue = check_queue
        self._on_batch = on_batch
        self._queue: deque[_QueuedPhoto] = deque()
        self._arrived = asyncio.Event()
        self._threads = ThreadPoolExecutor(embedder.concurrency, "embed")
        self._busy = 0
        self._closing = False
        self._seconds_each = 0.0
        """Moving average of the time per photo, to estimate how long a queue takes."""

    async def __aenter__(self) -> Self:
        self._lanes = [asyncio.create_task(self._run_lane()) for _ in range(self._embedder.concurrency)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finishes the photos that were accepted."""
        self._closing = True
        self._arrived.set()
        await asyncio.gather(*self._lanes)
        self._threads.shutdown()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def embed(self, pixels: Pixels, *, alone: bool = False) -> Embedding:
        """Embeds one photo; raises Overloaded when too many wait. Cancelling the caller removes its photo.

        A photo that is `alone`, because no other request needs the cores, gets all of them: its latency is lower, but
        it uses more CPU time in total.
        """
        if self._closing:
            raise Overloaded("The model is being closed.")
        self._check_queue(len(self._queue), self._seconds_each)
        result: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()
        self._queue.append(_QueuedPhoto(pixels, result, perf_counter(), alone))
        self._arrived.set()
        return await result

    async def _run_lane(self) -> None:
        """Keeps one lane of the embedder busy until the batcher is closed and the queue is empty."""
        while True:
            await self._arrived.wait()
            batch = self._take_batch()
            if batch:
                await self._embed_batch(batch)
            elif self._closing:
                return
            else:
                self._arrived.clear()

    def _take_batch(self) -> list[_QueuedPhoto]:
        """Takes a full batch from the queue, but no more than this lane's share."""
        share = -(-len(self._queue) // self._embedder.concurrency)
        batch: list[_QueuedPhoto] = []
        while self._queue and len(batch) < min(share, self._embedder.preferred_batch):
            photo = self._queue.popleft()
            if not photo.result.done():
                batch.append(photo)
        return batch

    async def _embed_batch(self, batch: list[_QueuedPhoto]) -> None:
        started = perf_counter()
        self._on_batch(len(batch))
        pixels = np.stack([photo.pixels for photo in batch])
        alone = len(batch) == 1 and batch[0].alone and not self._busy
        embed = self._embedder.embed if alone else self._embedder.embed_single_threaded
        self._busy += 1
        try:
            vectors = await asyncio.get_running_loop().run_in_executor(self._threads, embed, pixels)
        except Exception as error:  # an error of the session fails every request of the batch
            for photo in batch:
                if not photo.result.done():
                    photo.result.set_exception(error)
            return
        finally:
            self._busy -= 1
        computed = perf_counter() - started
        each = computed / len(batch)
        self._seconds_each = each if not self._seconds_each else 0.9 * self._seconds_each + 0.1 * each
        for photo, vector in zip(batch, vectors, strict=True):
            if not photo.result.done():
                photo.result.set_result(Embedding(vector, started - photo.since, computed))


class NotReady(LookalikeError):
    """No model is loaded yet, so nothing can be embedded."""

    kind = "not-ready"


class Model:
    """A bundle, its ONNX session, and the batcher in front of it."""

    def __init__(self, bundle: Bundle, embedder: Embedder, batcher: Batcher) -> None:
        self.bundle = bundle
        self.embedder = embedder
        self.batcher = batcher
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the model open from its choice to the last vector, even when it is replaced meanwhile."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def close(self) -> None:
        """Waits for its users, including photos that are still being decoded, and closes the batcher."""
        await self._unused.wait()
        await self.batcher.__aexit__(None, None, None)


class ActiveModel:
    """Holds the model of the gallery's active bundle; used on one event loop, which it never blocks."""

    def __init__(
        self, gallery: Gallery, settings: Settings, *, check_queue: CheckQueue, on_batch: Callable[[int], None]
    ) -> None:
        self._gallery = gallery
        self._settings = settings
        self._check_queue = check_queue
        self._on_batch = on_batch
        self._model: Model | None = None
        self._seen_bundle: str | None = None
        self._loading: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._retry_at = 0.0

    async def start(self) -> None:
        """Loads the first model, of the active bundle or of the bundle in the settings, and starts to follow."""
        active, path = await anyio.to_thread.run_sync(self._gallery.active_bundle), self._settings.bundle
        if path is not None:
            bundle = await anyio.to_thread.run_sync(Bundle.load, path)
            if active not in (None, bundle.id):
                raise BundleMismatch(str(active), bundle.id)
            await anyio.to_thread.run_sync(self._gallery.keep_bundle, bundle)
            await self._replace_model(bundle)
        elif active is not None:
            await self._load(active)
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Finishes the photos that were accepted and closes all models."""
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._loading:
            await asyncio.shield(self._loading)
        await asyncio.gather(*self._closing)
        if self._model:
            await self._model.close()

    @property
    def loaded(self) -> Model | None:
        """The model that was loaded last, if any."""
        return self._model

    def current(self) -> Model:
        """Returns the model to use now, without I/O; raises NotReady when none is loaded."""
        if self._model is not None:
            return self._model
        if self._seen_bundle is not None:
            raise NotReady(
                f"The model of the active bundle {self._seen_bundle} is not loaded yet.",
                "Try again in some seconds; if the problem persists, see the log of the service.",
            )
        raise NotReady(
            "The gallery is empty, and no bundle is configured.",
            "Index a catalogue with `lookalike reindex`; the service then loads its bundle.",
        )

    async def ready(self) -> Model:
        """Returns the model to use now; the first requests after a first index wait until it is loaded."""
        if self._model is None:
            await self.follow()
        return self.current()

    async def follow(self, *, wait: bool = True) -> Model | None:
        """Looks up the active bundle in a thread and starts to load it if needed; with `wait` until it is loaded."""
        self._seen_bundle = active = await anyio.to_thread.run_sync(self._gallery.active_bundle)
        is_stale = active is not None and (self._model is None or self._model.bundle.id != active)
        if active is not None and is_stale and self._loading is None and monotonic() >= self._retry_at:
            self._loading = asyncio.create_task(self._load_or_log(active))
        if wait and self._loading:
            await asyncio.shield(self._loading)
        return self._model

    async def _watch(self) -> None:
        """Follows the gallery while no request does, so that the first request finds the current model."""
        while True:
            await asyncio.sleep(self._settings.bundle_poll_seconds)
            try:
                await self.follow(wait=False)
            except (LookalikeError, sqlite3.Error) as error:
                log.warning("the active bundle cannot be read: %s", error)

    async def _load_or_log(self, bundle_id: str) -> None:
        try:
            await self._load(bundle_id)
        except LookalikeError as error:
            self._retry_at = monotonic() + self._settings.bundle_retry_seconds
            log.error("the active bundle %s cannot be loaded: %s", bundle_id, error)
        finally:
            self._loading = None

    async def _load(self, bundle_id: str) -> None:
        await self._replace_model(await anyio.to_thread.run_sync(self._gallery.load_bundle, bundle_id))

    async def _replace_model(self, bundle: Bundle) -> None:
        embedder = await anyio.to_thread.run_sync(_warm_embedder, bundle, self._settings.threads)
        batcher = Batcher(embedder, check_queue=self._check_queue, on_batch=self._on_batch)
        await batcher.__aenter__()
        old, self._model = self._model, Model(bundle, embedder, batcher)
        log.info("queries are embedded with bundle %s on %s", bundle.id, embedder.provider)
        if old:
            task = asyncio.create_task(old.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _warm_embedder(bundle: Bundle, threads: int | None) -> Embedder:
    """Loads an embedder and runs both of its sessions once, so that no request waits for them."""
    embedder = Embedder(bundle, threads=threads)
    side = bundle.preprocessing.input_size
    blank = np.zeros((1, side, side, 3), np.uint8)
    embedder.embed(blank)
    embedder.embed_single_threaded(blank)
    return embedder
