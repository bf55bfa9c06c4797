"""Pixels to vectors: ONNX Runtime over a bundle, and the bulk path that keeps it busy."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index._util.files import cache_folder
from index._util.imports import onnxruntime
from index._util.system import usable_cores
from index.embedding.bundle import Bundle, BundleError
from index.embedding.images import DEFAULT_LIMITS, ImageError, ImageLimits, load_pixels, read_file

log = logging.getLogger(__name__)

_CPU = "CPUExecutionProvider"
PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", _CPU)
"""Fastest first; the session takes those that are installed and able to start."""

BATCH_SIZES = (32, 16, 8, 4, 2, 1)
"""The only batch shapes a session ever sees: the runtime's memory grows with every new shape."""

_LARGEST_ON_CPU = 4
"""On one core an image takes as long in a batch of 1 as of 8, which only holds more memory."""

Pixels = NDArray[np.uint8]
Vector = NDArray[np.float32]


class Embedder:
    """Turns preprocessed pixels into L2-normalised vectors. Safe to share between threads.

    On a CPU a session that splits each operator over the cores answers one image soonest, but its threads wait for each
    other after every operator. Several images are faster on lanes: one thread for each core, which runs its own images.
    """

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        """Uses `threads` cores, or all that the process may use."""
        self.bundle = bundle
        threads = threads or usable_cores()
        installed = onnxruntime().get_available_providers()
        wanted = [name for name in PROVIDERS if name in installed]
        self._wide = self._session(threads, wanted)
        if self.provider != wanted[0]:
            log.warning(
                "asked for %s, got %s: embedding is slower than this machine could be", wanted[0], self.provider
            )
        self._input = self._wide.get_inputs()[0].name
        on_cpu = self.provider == _CPU
        self.batch_sizes = [size for size in BATCH_SIZES if not on_cpu or size <= _LARGEST_ON_CPU]
        self.concurrency = threads if on_cpu else 1
        self.preferred_batch = 1 if on_cpu else self.batch_sizes[0]
        """Images beyond which each costs no less, but is answered with the last of them."""
        self._made: Any = None
        self._making = Lock()
        # Starts its threads when there is work; they end when the embedder is collected.
        self._pool = ThreadPoolExecutor(self.concurrency, "embed")

    def _session(self, threads: int, providers: list[str]) -> Any:
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads that wait in a loop take the cores from the decoders and from other processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = self.bundle.model_path
        try:
            return runtime.InferenceSession(
                str(path), options, providers=[(name, _provider_options(name)) for name in providers]
            )
        except Exception as error:  # the runtime raises its own undocumented types
            raise BundleError(f"{path} cannot be run: {error}.", "Export the bundle again.") from error

    @property
    def _narrow(self) -> Any:
        """The session of the lanes, made when first needed: who embeds single photos never does."""
        with self._making:
            if self._made is None:
                self._made = self._wide if self.concurrency == 1 else self._session(1, [_CPU])
            return self._made

    @property
    def provider(self) -> str:
        """What the session really runs on; the runtime changes it when a device fails."""
        return str(self._wide.get_providers()[0])

    def embed(self, pixels: Pixels) -> NDArray[np.float32]:
        """Vectors of shape (n, dimension) for pixels of shape (n, height, width, 3)."""
        if self.concurrency == 1 or len(pixels) < self.concurrency:
            return self._run(self._wide, pixels)
        shares = np.array_split(pixels, self.concurrency)
        return np.concatenate(list(self._pool.map(self.embed_single_threaded, shares)))

    def embed_single_threaded(self, pixels: Pixels) -> NDArray[np.float32]:
        """The same on one lane alone, for a caller that keeps `lanes` of these calls going at a time."""
        return self._run(self._narrow, pixels)

    def _run(self, session: Any, pixels: Pixels) -> NDArray[np.float32]:
        side = self.bundle.preprocessing.input_size
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (side, side, 3):
            raise ValueError(f"expected uint8 pixels (n, {side}, {side}, 3), got {pixels.dtype} {pixels.shape}")
        vectors = np.empty((len(pixels), self.bundle.dimension), np.float32)
        start = 0
        while start < len(pixels):
            size = next(size for size in self.batch_sizes if size <= len(pixels) - start)
            batch = pixels[start : start + size]
            vectors[start : start + size] = session.run(None, {self._input: batch})[0]
            start += size
        return vectors

    def embed_images(
        self, images: Iterable[bytes | Path], *, limits: ImageLimits = DEFAULT_LIMITS
    ) -> Iterator[tuple[int, Vector | ImageError]]:
        """The place and the vector of each image, or why it has none, in the order given.

        Threads read and decode a bounded number of images ahead, and every lane runs full batches beside them
        and beside whatever the caller does with a vector.
        """
        decoders = ThreadPoolExecutor(usable_cores(), "decode")
        running: deque[Future[list[Vector | ImageError]]] = deque()
        largest, place = self.batch_sizes[0], 0
        loaded = _decoded(decoders, partial(self._load, limits=limits), images, ahead=2 * largest * self.concurrency)
        try:
            for batch in _full_batches(loaded, largest):
                running.append(self._pool.submit(self._embed_loaded, batch))
                # One batch more than lanes: whichever ends first finds its next one.
                if len(running) > self.concurrency:
                    answers = running.popleft().result()
                    yield from enumerate(answers, place)
                    place += len(answers)
            yield from enumerate((answer for future in running for answer in future.result()), place)
        finally:
            for future in running:
                future.cancel()
            decoders.shutdown(cancel_futures=True)

    def _load(self, image: bytes | Path, limits: ImageLimits) -> Pixels | ImageError:
        try:
            data = read_file(image, limits) if isinstance(image, Path) else image
            return load_pixels(data, self.bundle.preprocessing, limits)
        except ImageError as error:
            return error

    def _embed_loaded(self, batch: list[Pixels | ImageError]) -> list[Vector | ImageError]:
        pixels = [outcome for outcome in batch if not isinstance(outcome, ImageError)]
        vectors = iter(self.embed_single_threaded(np.stack(pixels)) if pixels else ())
        return [outcome if isinstance(outcome, ImageError) else next(vectors) for outcome in batch]


def _decoded(
    pool: ThreadPoolExecutor,
    load: Callable[[bytes | Path], Pixels | ImageError],
    images: Iterable[bytes | Path],
    *,
    ahead: int,
) -> Iterator[Pixels | ImageError]:
    """Each image's pixels in order, with the next ones being decoded meanwhile."""
    waiting = iter(images)
    pending = deque(pool.submit(load, image) for image in islice(waiting, ahead))
    while pending:
        yield pending.popleft().result()
        pending.extend(pool.submit(load, image) for image in islice(waiting, 1))


def _full_batches(loaded: Iterable[Pixels | ImageError], size: int) -> Iterator[list[Pixels | ImageError]]:
    """Runs of images with `size` good ones in each: a bad image does not make a batch smaller."""
    batch: list[Pixels | ImageError] = []
    good = 0
    for outcome in loaded:
        batch.append(outcome)
        good += not isinstance(outcome, ImageError)
        if good == size:
            yield batch
            batch, good = [], 0
    if batch:
        yield batch


def _provider_options(name: str) -> dict[str, Any]:
    """TensorRT compiles a model for minutes, so what it made is kept for the next start."""
    if name != "TensorrtExecutionProvider":
        return {}
    cache = cache_folder() / "tensorrt"
    return {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(cache)}
