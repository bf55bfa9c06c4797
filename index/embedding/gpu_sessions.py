"""Runs a model on GPUs with ONNX Runtime, one session each, after comparing its vectors with the CPU's."""

import contextlib
import ctypes
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.cuda import find_gpus
from index._util.files import cache_folder
from index._util.imports import onnxruntime
from index.embedding.bundle import Bundle

log = logging.getLogger(__name__)

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"

BATCH_SIZES = (32, 16, 8, 4, 2, 1)
"""The batch sizes that a GPU runs: it chooses its algorithms for each, and keeps memory for each."""
MIN_COSINE = 0.99
"""Between the vectors of one picture on a GPU and on the CPU; half precision keeps about 0.9999."""
_SAMPLES = 3
"""Pictures that check a session."""

Pixels = NDArray[np.uint8]
Vectors = NDArray[np.float32]


class GpuUnusable(Exception):
    """A GPU does not start, fails, or computes other vectors than the CPU."""


class Started(NamedTuple):
    """What runs on GPUs: a session for each, their provider, and why there are none."""

    sessions: list["GpuSession"]
    provider: str = CPU
    problem: str = ""


def start_sessions(bundle: Bundle, embed_on_cpu: Callable[[Pixels], Vectors], *, tensorrt: bool = False) -> Started:
    """Returns a checked session for each GPU; warns if there are none although ONNX Runtime is installed for GPUs."""
    installed = onnxruntime().get_available_providers()
    wanted = [name for name in (TENSORRT, CUDA) if name in installed and (tensorrt or name != TENSORRT)]
    if tensorrt and TENSORRT not in installed:
        log.warning("TensorRT is wanted, but the installed ONNX Runtime has no %s", TENSORRT)
    if not wanted:
        return Started([], problem="the installed ONNX Runtime is for CPUs")
    try:
        gpus = find_gpus()
        if gpus.problem:
            raise GpuUnusable(gpus.problem)
        sessions = [GpuSession(bundle, wanted, number) for number in range(len(gpus.found))]
        for session in sessions:
            _check(session, bundle, embed_on_cpu)
    except Exception as error:  # ONNX Runtime raises undocumented types
        reason = str(error) or type(error).__name__
        log.warning("%s is installed but did not start: embedding runs on the slower %s: %s", wanted[0], CPU, reason)
        return Started([], problem=reason)
    provider = sessions[0].provider
    if provider != wanted[0]:
        log.warning("%s is installed but did not start: embedding runs on the slower %s", wanted[0], provider)
    _recommend_half_precision(bundle)
    return Started(sessions, provider)


class GpuSession:
    """A model on one GPU. One thread may run it at a time."""

    def __init__(self, bundle: Bundle, providers: list[str], number: int) -> None:
        runtime = onnxruntime()
        if hasattr(runtime, "preload_dlls"):
            with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
                runtime.preload_dlls()
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        chosen = [(name, _provider_options(name, bundle, number)) for name in providers]
        self._session = runtime.InferenceSession(str(bundle.model_path), options, providers=[*chosen, CPU])
        self.provider = str(self._session.get_providers()[0])
        if self.provider not in providers:
            raise GpuUnusable(_missing_library(Path(runtime.__file__)) or f"GPU {number} cannot be used")
        self._number = number
        self._input, self._output = self._session.get_inputs()[0].name, self._session.get_outputs()[0].name
        self._bound: dict[int, tuple[Any, Any]] = {}
        """The memory of the pixels on the GPU, and what binds it, for each batch size."""

    def run(self, batch: Pixels) -> Vectors:
        """Returns the vectors of a batch whose size is one of `BATCH_SIZES`."""
        batch = np.ascontiguousarray(batch)
        if len(batch) not in self._bound:
            memory = onnxruntime().OrtValue.ortvalue_from_numpy(batch, "cuda", self._number)
            binding = self._session.io_binding()
            binding.bind_ortvalue_input(self._input, memory)
            binding.bind_output(self._output, "cpu")
            self._bound[len(batch)] = memory, binding
        memory, binding = self._bound[len(batch)]
        memory.update_inplace(batch)
        self._session.run_with_iobinding(binding)
        vectors: Vectors = binding.copy_outputs_to_cpu()[0]
        return vectors


def _check(session: GpuSession, bundle: Bundle, embed_on_cpu: Callable[[Pixels], Vectors]) -> None:
    """Compares the vectors of every batch size with the CPU's, which also lets the GPU choose its algorithms."""
    side = bundle.preprocessing.input_size
    samples = np.random.default_rng(0).integers(0, 256, (_SAMPLES, side, side, 3), np.uint8)
    expected = embed_on_cpu(samples)
    for size in BATCH_SIZES:
        rows = np.arange(size) % _SAMPLES
        found = session.run(samples[rows])
        lowest = np.einsum("nd,nd->n", found, expected[rows]).min()
        if not lowest >= MIN_COSINE:
            raise GpuUnusable(f"it computes different vectors than the CPU (cosine {lowest:.4f})")


def _provider_options(name: str, bundle: Bundle, number: int) -> dict[str, Any]:
    """Returns the options of a provider: TensorRT compiles a model for minutes, so its engines are cached on disk."""
    if name != TENSORRT:
        return {"device_id": number}
    cache = cache_folder() / "tensorrt"
    cache.mkdir(parents=True, exist_ok=True)
    side = bundle.preprocessing.input_size
    shapes = {place: f"pixels:{size}x{side}x{side}x3" for place, size in (("min", 1), ("opt", 32), ("max", 32))}
    return {
        "device_id": number,
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": str(cache),
        "trt_timing_cache_enable": True,
        "trt_timing_cache_path": str(cache),
        "trt_fp16_enable": bundle.card.precision == "fp16",
        # One engine for all batch sizes, instead of another one whenever a larger batch arrives.
        **{f"trt_profile_{place}_shapes": shape for place, shape in shapes.items()},
    }


def _missing_library(package: Path) -> str:
    """Returns which library the CUDA provider does not find, if that is the reason."""
    try:
        ctypes.CDLL(str(package.parent / "capi" / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return ""


def _recommend_half_precision(bundle: Bundle) -> None:
    half = bundle.directory.with_name(f"{bundle.directory.name}-fp16")
    if bundle.card.precision != "fp16" and half.is_dir():
        log.warning("on a GPU the bundle %s is faster than %s; its id and vectors differ", half, bundle.directory)
