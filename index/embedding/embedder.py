"""Pixels to vectors: runs a bundle's model on ONNX Runtime."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index._util.files import cache_folder
from index._util.imports import onnxruntime
from index._util.system import usable_cores
from index.embedding.bundle import Bundle, BundleError

log = logging.getLogger(__name__)

_CPU = "CPUExecutionProvider"
PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", _CPU)
"""Execution providers, fastest first; a session uses those that are installed and able to start."""

BATCH_SIZES = (32, 16, 8, 4, 2, 1)
"""The only batch sizes that a session runs: ONNX Runtime allocates memory for every new shape."""

_MAX_CPU_BATCH = 4
"""On one core an image takes as long in a batch of 1 as of 8; larger batches only need more memory."""

Pixels = NDArray[np.uint8]
Vectors = NDArray[np.float32]


class Embedder:
    """Turns preprocessed pixels into L2-normalised vectors. Thread-safe.

    On a CPU a session that splits each operator over the cores has the lowest latency for one image, but its threads
    wait for each other after every operator. Several images are faster on single-threaded runs, one per core.
    """

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        """Loads the model; `threads` defaults to the cores that the process may use."""
        self.bundle = bundle
        threads = threads or usable_cores()
        installed = onnxruntime().get_available_providers()
        wanted = [name for name in PROVIDERS if name in installed]
        self._wide = self._session(threads, wanted)
        if self.provider != wanted[0]:
            log.warning("%s is installed but did not start: embedding runs on the slower %s", wanted[0], self.provider)
        self._input = self._wide.get_inputs()[0].name
        on_cpu = self.provider == _CPU
        self.batch_sizes = [size for size in BATCH_SIZES if not on_cpu or size <= _MAX_CPU_BATCH]
        self.concurrency = threads if on_cpu else 1
        self.preferred_batch = 1 if on_cpu else self.batch_sizes[0]
        """The batch size from which larger batches add latency but no throughput."""
        self._narrow_session: Any = None
        self._narrow_lock = Lock()
        # Starts its threads on first use; they end when the embedder is garbage-collected.
        self._pool = ThreadPoolExecutor(self.concurrency, "embed")

    def _session(self, threads: int, providers: list[str]) -> Any:
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take the cores from the decoders and from other processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = self.bundle.model_path
        try:
            return runtime.InferenceSession(
                str(path), options, providers=[(name, _provider_options(name)) for name in providers]
            )
        except Exception as error:  # ONNX Runtime raises undocumented types
            raise BundleError(f"{path} cannot be run: {error}.", "Export the bundle again.") from error

    @property
    def _narrow(self) -> Any:
        """The single-threaded session, created on first use: embedding single photos never needs it."""
        with self._narrow_lock:
            if self._narrow_session is None:
                self._narrow_session = self._wide if self.concurrency == 1 else self._session(1, [_CPU])
            return self._narrow_session

    @property
    def provider(self) -> str:
        """The execution provider in use; ONNX Runtime falls back to the next one when a device fails."""
        return str(self._wide.get_providers()[0])

    def embed(self, pixels: Pixels) -> Vectors:
        """Returns vectors of shape (n, dimension) for pixels of shape (n, height, width, 3)."""
        if self.concurrency == 1 or len(pixels) < self.concurrency:
            return self._run(self._wide, pixels)
        shares = np.array_split(pixels, self.concurrency)
        return np.concatenate(list(self._pool.map(self.embed_single_threaded, shares)))

    def embed_single_threaded(self, pixels: Pixels) -> Vectors:
        """Embeds on one core, for a caller that runs up to `concurrency` of these calls at a time."""
        return self._run(self._narrow, pixels)

    def _run(self, session: Any, pixels: Pixels) -> Vectors:
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


def _provider_options(name: str) -> dict[str, Any]:
    """Returns the options of a provider: TensorRT compiles a model for minutes, so its engines are cached on disk."""
    if name != "TensorrtExecutionProvider":
        return {}
    cache = cache_folder() / "tensorrt"
    return {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(cache)}
