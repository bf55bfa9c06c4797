"""The model that embeds queries: always that of the gallery's live bundle, exchanged while requests go on."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import anyio.to_thread
import numpy as np

from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.errors import LookalikeError
from index.gallery import BundleMismatch, Gallery
from service.inference import Batcher
from service.settings import Settings

log = logging.getLogger(__name__)

_RETRY = 10.0
"""Seconds before a bundle that could not be loaded is tried again."""
_LOOK = 2.0
"""Seconds between two looks at which bundle is live; each request looks too."""


class NotReady(LookalikeError):
    """There is nothing to search with yet."""

    kind = "not-ready"


class Model:
    """A bundle, its session, and the queue in front of it."""

    def __init__(self, bundle: Bundle, embedder: Embedder, batcher: Batcher) -> None:
        self.bundle = bundle
        self.embedder = embedder
        self.batcher = batcher
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """From the choice of a model to its last vector: one that was exchanged meanwhile stays until then."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def close(self) -> None:
        """Finishes what was accepted, also the photos that are still being decoded."""
        await self._unused.wait()
        await self.batcher.__aexit__(None, None, None)


class Models:
    """Keeps the model of the live bundle; to be used on one event loop."""

    def __init__(self, gallery: Gallery, settings: Settings, on_batch: Callable[[int], None]) -> None:
        self._gallery = gallery
        self._settings = settings
        self._on_batch = on_batch
        self._model: Model | None = None
        self._loading: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._not_before = 0.0

    async def start(self) -> None:
        """Loads the first model: of the live bundle, or in an empty gallery of the one that was given."""
        live, given = self._gallery.live_bundle(), self._settings.bundle
        if given is not None:
            bundle = await anyio.to_thread.run_sync(Bundle.load, given)
            if live not in (None, bundle.id):
                raise BundleMismatch(str(live), bundle.id)
            await anyio.to_thread.run_sync(self._gallery.keep_bundle, bundle)
            await self._adopt(bundle)
        elif live is not None:
            await self._load(live)
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Follows while nobody asks for anything: the first to ask should not meet the model of yesterday."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                self._follow()
            except (LookalikeError, sqlite3.Error) as error:
                log.warning("which bundle is live cannot be read: %s", error)

    @property
    def loaded(self) -> Model | None:
        """The model that was loaded last, if any."""
        return self._model

    def current(self) -> Model:
        """The model to answer with now. When another bundle went live, its model is loaded beside."""
        live = self._follow()
        if self._model is not None:
            return self._model
        if live is not None:
            raise NotReady(
                f"The model of the live bundle {live} is not loaded yet.",
                "Try again in some seconds; if it stays so, the log of the service says why.",
            )
        raise NotReady(
            "The gallery is empty, and no bundle was given to embed with.",
            "Index a catalogue with `lookalike reindex`; the service follows by itself.",
        )

    async def ready(self) -> Model:
        """The model to answer with now; the first requests after a first index wait until there is one."""
        self._follow()
        if self._model is None and self._loading:
            await asyncio.shield(self._loading)
        return self.current()

    async def followed(self) -> Model:
        """The model once the bundle that is live now has been loaded."""
        self._follow()
        if self._loading:
            await asyncio.shield(self._loading)
        return self.current()

    def _follow(self) -> str | None:
        """Answers the live bundle, and begins to load it if it is another one."""
        live = self._gallery.live_bundle()
        stale = live is not None and (self._model is None or self._model.bundle.id != live)
        if live is not None and stale and self._loading is None and monotonic() >= self._not_before:
            self._loading = asyncio.create_task(self._load_quietly(live))
        return live

    async def _load_quietly(self, live: str) -> None:
        try:
            await self._load(live)
        except LookalikeError as error:
            self._not_before = monotonic() + _RETRY
            log.error("bundle %s is live but cannot be loaded: %s", live, error)
        finally:
            self._loading = None

    async def _load(self, live: str) -> None:
        await self._adopt(await anyio.to_thread.run_sync(self._gallery.kept_bundle, live))

    async def _adopt(self, bundle: Bundle) -> None:
        embedder = await anyio.to_thread.run_sync(_warm, bundle, self._settings.threads)
        batcher = Batcher(embedder, most_waiting=self._settings.max_waiting, on_batch=self._on_batch)
        await batcher.__aenter__()
        old, self._model = self._model, Model(bundle, embedder, batcher)
        log.info("queries are embedded with bundle %s on %s", bundle.id, embedder.provider)
        if old:
            task = asyncio.create_task(old.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Finishes what was accepted."""
        if self._watching:
            self._watching.cancel()
        if self._loading:
            await asyncio.shield(self._loading)
        await asyncio.gather(*self._leaving)
        if self._model:
            await self._model.close()


def _warm(bundle: Bundle, threads: int | None) -> Embedder:
    """An embedder that has run once in either way, so that no request waits for its sessions."""
    embedder = Embedder(bundle, threads=threads)
    side = bundle.preprocessing.input_size
    blank = np.zeros((1, side, side, 3), np.uint8)
    embedder.embed(blank)
    embedder.embed_single_threaded(blank)
    return embedder
