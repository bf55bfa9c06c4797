"""Pixels to vectors: runs a bundle's model on ONNX Runtime."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np

from index._util.imports import onnxruntime
from index._util.system import usable_cores
from index.embedding.bundle import Bundle, BundleError
from index.embedding.gpu_sessions import BATCH_SIZES, CPU, CUDA, TENSORRT, Pixels, Vectors, start_sessions

log = logging.getLogger(__name__)

PROVIDERS = (TENSORRT, CUDA, CPU)
"""Execution providers, fastest first; an embedder uses one that is installed and able to start, TensorRT if asked."""

_MAX_CPU_BATCH = 4
"""On one core an image takes as long in a batch of 1 as of 8; larger batches only need more memory."""
_CPU_BATCH_SIZES = tuple(size for size in BATCH_SIZES if size <= _MAX_CPU_BATCH)
"""The only batch sizes that a session runs: ONNX Runtime allocates memory for every new shape."""


class Embedder:
    """Turns preprocessed pixels into L2-normalised vectors. Thread-safe.

    On a CPU a session that splits each operator over the cores has the lowest latency for one image, but its threads
    wait for each other after every operator. Several images are faster on single-threaded runs, one per core. GPUs
    have a session each; if one fails, the CPU continues.
    """

    def __init__(self, bundle: Bundle, *, threads: int | None = None, tensorrt: bool = False) -> None:
        """Loads the model; `threads` defaults to the cores that the process may use."""
        self.bundle = bundle
        threads = threads or usable_cores()
        self._wide = self._session(threads)
        self._input = self._wide.get_inputs()[0].name
        gpus = start_sessions(bundle, lambda pixels: self._run(self._wide, pixels), tensorrt=tensorrt)
        self.provider = gpus.provider
        """The execution provider in use."""
        self.gpu_problem = gpus.problem
        """Why no GPU is in use."""
        self._idle_gpus: SimpleQueue[Any] = SimpleQueue()
        for session in gpus.sessions:
            self._idle_gpus.put(session)
        self.concurrency = len(gpus.sessions) or threads
        self.preferred_batch = BATCH_SIZES[0] if gpus.sessions else 1
        """The batch size from which larger batches add latency but no throughput."""
        self._narrow_session: Any = None
        self._lock = Lock()
        # Starts its threads on first use; they end when the embedder is garbage-collected.
        self._pool = ThreadPoolExecutor(self.concurrency, "embed")

    def _session(self, threads: int) -> Any:
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take the cores from the decoders and from other processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = self.bundle.model_path
        try:
            return runtime.InferenceSession(str(path), options, providers=[CPU])
        except Exception as error:  # ONNX Runtime raises undocumented types
            raise BundleError(f"{path} cannot be run: {error}.", "Export the bundle again.") from error

    @property
    def _narrow(self) -> Any:
        """The single-threaded session, created on first use: embedding single photos never needs it."""
        with self._lock:
            if self._narrow_session is None:
                self._narrow_session = self._wide if self.concurrency == 1 else self._session(1)
            return self._narrow_session

    def embed(self, pixels: Pixels) -> Vectors:
        """Returns vectors of shape (n, dimension) for pixels of shape (n, height, width, 3)."""
        if self.provider != CPU and (self.concurrency == 1 or len(pixels) <= BATCH_SIZES[0]):
            return self._run_on_gpu(pixels)
        if self.concurrency == 1 or len(pixels) < self.concurrency:
            return self._run(self._wide, pixels)
        shares = np.array_split(pixels, self.concurrency)
        return np.concatenate(list(self._pool.map(self.embed_single_threaded, shares)))

    def embed_single_threaded(self, pixels: Pixels) -> Vectors:
        """Embeds on one core or GPU, for a caller that runs up to `concurrency` of these calls at a time."""
        return self._run(self._narrow, pixels) if self.provider == CPU else self._run_on_gpu(pixels)

    def _run_on_gpu(self, pixels: Pixels) -> Vectors:
        self._check_pixels(pixels)
        session = self._idle_gpus.get()
        try:
            return self._in_batches(session.run, BATCH_SIZES, pixels)
        except Exception as error:  # ONNX Runtime raises undocumented types
            with self._lock:
                if self.provider != CPU:
                    log.warning("%s failed: embedding continues on the slower %s: %s", self.provider, CPU, error)
                    self.provider, self.gpu_problem = CPU, str(error)
            return self._run(self._wide, pixels)
        finally:
            self._idle_gpus.put(session)

    def _run(self, session: Any, pixels: Pixels) -> Vectors:
        self._check_pixels(pixels)
        return self._in_batches(lambda batch: session.run(None, {self._input: batch})[0], _CPU_BATCH_SIZES, pixels)

    def _check_pixels(self, pixels: Pixels) -> None:
        side = self.bundle.preprocessing.input_size
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (side, side, 3):
            raise ValueError(f"expected uint8 pixels (n, {side}, {side}, 3), got {pixels.dtype} {pixels.shape}")

    def _in_batches(self, run: Callable[[Pixels], Vectors], sizes: tuple[int, ...], pixels: Pixels) -> Vectors:
        vectors = np.empty((len(pixels), self.bundle.dimension), np.float32)
        start = 0
        while start < len(pixels):
            size = next(size for size in sizes if size <= len(pixels) - start)
            batch = pixels[start : start + size]
            vectors[start : start + size] = run(batch)
            start += size
        return vectors
