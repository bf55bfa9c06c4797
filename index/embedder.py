"""Pixels to vectors: one ONNX Runtime session over a bundle."""

import logging
import os

import numpy as np
from numpy.typing import NDArray

from index.bundle import Bundle, BundleError
from index.engines import onnxruntime

log = logging.getLogger(__name__)

PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
"""Fastest first; the session takes those that are installed and able to start."""

BATCH_SIZES = (32, 16, 8, 4, 2, 1)
"""The only batch shapes a session ever sees: the runtime's memory grows with every new shape."""


class Embedder:
    """Turns preprocessed pixels into L2-normalised vectors. Safe to share between threads."""

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads or os.cpu_count() or 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        wanted = [name for name in PROVIDERS if name in runtime.get_available_providers()]
        try:
            self._session = runtime.InferenceSession(str(bundle.model_path), options, providers=wanted)
        except Exception as error:  # the runtime raises its own undocumented types
            raise BundleError(f"{bundle.model_path} cannot be run: {error}.", "Export the bundle again.") from error
        self.bundle = bundle
        self.provider: str = self._session.get_providers()[0]
        if self.provider != wanted[0]:
            log.warning(
                "asked for %s, got %s: embedding is slower than this machine could be",
                wanted[0],
                self.provider,
            )
        self._input = self._session.get_inputs()[0].name

    def embed(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Vectors of shape (n, dimension) for pixels of shape (n, height, width, 3)."""
        side = self.bundle.preprocessing.input_size
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (side, side, 3):
            raise ValueError(f"expected uint8 pixels (n, {side}, {side}, 3), got {pixels.dtype} {pixels.shape}")
        vectors = np.empty((len(pixels), self.bundle.dimension), np.float32)
        start = 0
        while start < len(pixels):
            size = next(size for size in BATCH_SIZES if size <= len(pixels) - start)
            batch = pixels[start : start + size]
            vectors[start : start + size] = self._session.run(None, {self._input: batch})[0]
            start += size
        return vectors
