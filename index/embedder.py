"""Pixels to vectors: one ONNX Runtime session over a bundle, and the bulk path that keeps it busy."""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.bundle import Bundle, BundleError
from index.cores import usable_cores
from index.engines import onnxruntime
from index.images import DEFAULT_LIMITS, ImageError, ImageLimits, load_pixels, read_file

log = logging.getLogger(__name__)

PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
"""Fastest first; the session takes those that are installed and able to start."""

BATCH_SIZES = (32, 16, 8, 4, 2, 1)
"""The only batch shapes a session ever sees: the runtime's memory grows with every new shape."""

_LARGEST_ON_CPU = 8
"""Beyond this a batch's activations leave the processor's caches and every image takes longer, not shorter."""

_READ_AHEAD = 2 * BATCH_SIZES[0]
"""Images of the bulk path on their way to the session: the next batch is ready when the last one is done."""

Pixels = NDArray[np.uint8]
Vector = NDArray[np.float32]


class Embedder:
    """Turns preprocessed pixels into L2-normalised vectors. Safe to share between threads."""

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        """Uses `threads` cores, or all that the process may use."""
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or usable_cores()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads that wait in a loop take the cores from the decoders and from other processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        wanted = [name for name in PROVIDERS if name in runtime.get_available_providers()]
        try:
            self._session = runtime.InferenceSession(
                str(bundle.model_path), options, providers=[(name, _provider_options(name)) for name in wanted]
            )
        except Exception as error:  # the runtime raises its own undocumented types
            raise BundleError(f"{bundle.model_path} cannot be run: {error}.", "Export the bundle again.") from error
        self.bundle = bundle
        if self.provider != wanted[0]:
            log.warning(
                "asked for %s, got %s: embedding is slower than this machine could be",
                wanted[0],
                self.provider,
            )
        self._input = self._session.get_inputs()[0].name
        largest = _LARGEST_ON_CPU if self.provider == "CPUExecutionProvider" else BATCH_SIZES[0]
        self.batch_sizes = [size for size in BATCH_SIZES if size <= largest]

    @property
    def provider(self) -> str:
        """What the session really runs on; the runtime changes it when a device fails."""
        return str(self._session.get_providers()[0])

    def embed(self, pixels: Pixels) -> NDArray[np.float32]:
        """Vectors of shape (n, dimension) for pixels of shape (n, height, width, 3)."""
        side = self.bundle.preprocessing.input_size
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (side, side, 3):
            raise ValueError(f"expected uint8 pixels (n, {side}, {side}, 3), got {pixels.dtype} {pixels.shape}")
        vectors = np.empty((len(pixels), self.bundle.dimension), np.float32)
        start = 0
        while start < len(pixels):
            size = next(size for size in self.batch_sizes if size <= len(pixels) - start)
            batch = pixels[start : start + size]
            vectors[start : start + size] = self._session.run(None, {self._input: batch})[0]
            start += size
        return vectors

    def embed_images(
        self, images: Iterable[bytes | Path], *, limits: ImageLimits = DEFAULT_LIMITS
    ) -> Iterator[tuple[int, Vector | ImageError]]:
        """The place and the vector of each image, or why it has none, in the order given.

        Threads read and decode a bounded number of images ahead, and the session runs full batches beside them
        and beside whatever the caller does with a vector.
        """
        decoders = ThreadPoolExecutor(usable_cores(), "decode")
        session = ThreadPoolExecutor(1, "embed")
        try:
            running: Future[list[Vector | ImageError]] | None = None
            place = 0
            loaded = _decoded(decoders, partial(self._load, limits=limits), images)
            for batch in _full_batches(loaded, self.batch_sizes[0]):
                following = session.submit(self._embed_loaded, batch)
                if running:
                    yield from enumerate(running.result(), place)
                    place += len(running.result())
                running = following
            if running:
                yield from enumerate(running.result(), place)
        finally:
            for pool in (decoders, session):
                pool.shutdown(cancel_futures=True)

    def _load(self, image: bytes | Path, limits: ImageLimits) -> Pixels | ImageError:
        try:
            data = read_file(image, limits) if isinstance(image, Path) else image
            return load_pixels(data, self.bundle.preprocessing, limits)
        except ImageError as error:
            return error

    def _embed_loaded(self, batch: list[Pixels | ImageError]) -> list[Vector | ImageError]:
        pixels = [outcome for outcome in batch if not isinstance(outcome, ImageError)]
        vectors = iter(self.embed(np.stack(pixels)) if pixels else ())
        return [outcome if isinstance(outcome, ImageError) else next(vectors) for outcome in batch]


def _decoded(
    pool: ThreadPoolExecutor, load: Callable[[bytes | Path], Pixels | ImageError], images: Iterable[bytes | Path]
) -> Iterator[Pixels | ImageError]:
    """Each image's pixels in order, with the next ones being decoded meanwhile."""
    waiting = iter(images)
    pending = deque(pool.submit(load, image) for image in islice(waiting, _READ_AHEAD))
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lookalike" / "tensorrt"
    return {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(cache)}
