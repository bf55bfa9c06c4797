"""Embeds the photos of requests: the dynamic batcher, and the model of the gallery's active bundle.

The batcher forms batches while the previous ones run. No photo waits for a batch to fill: an idle lane of the embedder
takes a single photo at once, a busy one finds a full batch waiting, and lanes do not wait for each other. On a CPU,
where a batch saves nothing, a lane takes one photo after the other and returns each as soon as it is done.

The active model follows the gallery: when another bundle is activated, its model is loaded while the previous one keeps
serving, unless a write has loaded it before. Requests use what is known without I/O; a task looks for a newly activated
bundle in a worker thread.
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
from index.gallery.types import NeededBundles
from service.admission import Overloaded
from service.settings import Settings

log = logging.getLogger(__name__)

_OVERLAP_SECONDS = 10.0
"""How long images are also embedded with a bundle that was replaced: so long another process may search with it."""

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
    """Holds the model of the gallery's active bundle; used on one event loop, which it never blocks.

    Also holds the models of bundles that jobs prepare, once a write has loaded them: their activation is then instant.
    """

    def __init__(
        self, gallery: Gallery, settings: Settings, *, check_queue: CheckQueue, on_batch: Callable[[int], None]
    ) -> None:
        self._gallery = gallery
        self._settings = settings
        self._check_queue = check_queue
        self._on_batch = on_batch
        self._model: Model | None = None
        self._models: dict[str, Model] = {}
        """The open models by the ids of their bundles, including the one in use."""
        self._needed = NeededBundles(None, ())
        self._replaced: tuple[str, float] | None = None
        """The bundle that was in use before, and until when other processes may search with it."""
        self._looks = 0
        self._seen = 0
        """The number of the look that found what is needed."""
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads the first model, of the active bundle or of the bundle in the settings, and starts to follow."""
        active, path = await anyio.to_thread.run_sync(self._gallery.active_bundle), self._settings.bundle
        if path is not None:
            bundle = await anyio.to_thread.run_sync(Bundle.load, path)
            if active not in (None, bundle.id):
                raise BundleMismatch(str(active), bundle.id)
            await anyio.to_thread.run_sync(self._gallery.keep_bundle, bundle)
            self._model = await self._open(bundle)
        elif active is not None:
            self._model = await self._load(active)
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Finishes the photos that were accepted and closes all models."""
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*self._loading.values())
        for bundle_id in [*self._models]:
            self._close(bundle_id)
        await asyncio.gather(*self._closing)

    @property
    def loaded(self) -> Model | None:
        """The model in use, if any is loaded."""
        return self._model

    @property
    def prepared(self) -> list[Model]:
        """The models, of those that are loaded, of bundles that jobs prepare."""
        return [model for bundle_id, model in self._models.items() if bundle_id in self._needed.prepared]

    def current(self) -> Model:
        """Returns the model to use now, without I/O; raises NotReady when none is loaded."""
        if self._model is not None:
            return self._model
        if self._needed.active is not None:
            raise NotReady(
                f"The model of the active bundle {self._needed.active} is not loaded yet.",
                "Try again in some seconds; if the problem persists, see the log of the service.",
            )
        raise NotReady(
            "No bundle of the gallery is active, and none is configured.",
            "Index a catalogue with `lookalike reindex`; the service then loads its bundle.",
        )

    async def ready(self) -> Model:
        """Returns the model to use now; the first requests after a first index wait until it is loaded."""
        if self._model is None:
            await self.follow()
        return self.current()

    async def load(self, bundle_id: str) -> Model:
        """Returns the model of a bundle, loading it if needed; raises NotReady if it cannot be loaded."""
        if bundle_id not in self._models and self._may_load(bundle_id):
            await asyncio.shield(self._start_loading(bundle_id))
        if bundle_id not in self._models:
            raise NotReady(f"The model of bundle {bundle_id} cannot be loaded.", "See the log of the service.")
        return self._models[bundle_id]

    async def follow(self, *, wait: bool = True) -> NeededBundles:
        """Returns which bundles are needed, read in a thread; switches to the active one and closes unneeded models.

        Starts to load the active bundle's model if it is not loaded; with `wait` returns when it is.
        """
        self._looks += 1
        look, opened = self._looks, set(self._models)
        needed = await anyio.to_thread.run_sync(self._read_needed)
        if look > self._seen:  # else a look that began later was faster
            self._seen, self._needed = look, needed
            self._switch()
            # Not those that were opened since: a write may need them.
            for bundle_id in opened.intersection(self._models).difference(self._kept()):
                self._close(bundle_id)
        if wait and needed.active in self._loading:
            await asyncio.shield(self._loading[needed.active])
        return needed

    def _read_needed(self) -> NeededBundles:
        """Reads the needed bundles, and adds one that was just replaced: another process may not know that yet."""
        needed = self._gallery.needed_bundles()
        bundle_id, until = self._replaced or ("", 0.0)
        if monotonic() > until or bundle_id in (needed.active, *needed.prepared):
            return needed
        return needed._replace(prepared=(*needed.prepared, *filter(self._gallery.has_bundle, [bundle_id])))

    def _switch(self) -> None:
        """Uses the model of the active bundle, or starts to load it."""
        active = self._needed.active
        if active is None or (self._model and self._model.bundle.id == active):
            return
        if active in self._models:
            self._use(self._models[active])
        elif self._may_load(active):
            self._start_loading(active)

    def _kept(self) -> set[str]:
        in_use = [self._model.bundle.id] if self._model else []
        return {*in_use, *self._needed.prepared}

    async def _watch(self) -> None:
        """Follows the gallery while no request does, so that the first request finds the current model."""
        while True:
            await asyncio.sleep(self._settings.bundle_poll_seconds)
            try:
                await self.follow(wait=False)
            except (LookalikeError, sqlite3.Error, OSError) as error:
                log.warning("the active bundle cannot be read: %s", error)

    def _may_load(self, bundle_id: str) -> bool:
        return monotonic() >= self._retry_at.get(bundle_id, 0.0)

    def _start_loading(self, bundle_id: str) -> "asyncio.Task[None]":
        if bundle_id not in self._loading:
            self._loading[bundle_id] = asyncio.create_task(self._load_or_log(bundle_id))
        return self._loading[bundle_id]

    async def _load_or_log(self, bundle_id: str) -> None:
        try:
            await self._load(bundle_id)
        except Exception as error:  # the first batch of a model may raise undocumented types of ONNX Runtime
            self._retry_at[bundle_id] = monotonic() + self._settings.bundle_retry_seconds
            log.error("the bundle %s cannot be loaded: %s", bundle_id, error)
        else:
            if bundle_id == self._needed.active:
                self._use(self._models[bundle_id])
            else:
                log.info("new images are also embedded with bundle %s, which a job prepares", bundle_id)
        finally:
            del self._loading[bundle_id]

    async def _load(self, bundle_id: str) -> Model:
        return await self._open(await anyio.to_thread.run_sync(self._gallery.load_bundle, bundle_id))

    async def _open(self, bundle: Bundle) -> Model:
        embedder = await anyio.to_thread.run_sync(_warm_embedder, bundle, self._settings)
        batcher = Batcher(embedder, check_queue=self._check_queue, on_batch=self._on_batch)
        await batcher.__aenter__()
        self._models[bundle.id] = model = Model(bundle, embedder, batcher)
        return model

    def _use(self, model: Model) -> None:
        if self._model:
            self._replaced = self._model.bundle.id, monotonic() + _OVERLAP_SECONDS
        self._model = model
        self.log_model()

    def log_model(self) -> None:
        """Logs which bundle is in use; not when it is opened, because a start opens everything twice."""
        if self._model:
            log.info("queries are embedded with bundle %s on %s", self._model.bundle.id, self._model.embedder.provider)

    def _close(self, bundle_id: str) -> None:
        """Closes a model in the background, once nobody uses it."""
        task = asyncio.create_task(self._models.pop(bundle_id).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _warm_embedder(bundle: Bundle, settings: Settings) -> Embedder:
    """Loads an embedder and runs both of its sessions once, so that no request waits for them."""
    embedder = Embedder(bundle, threads=settings.threads, tensorrt=settings.tensorrt)
    side = bundle.preprocessing.input_size
    blank = np.zeros((1, side, side, 3), np.uint8)
    embedder.embed(blank)
    embedder.embed_single_threaded(blank)
    return embedder
