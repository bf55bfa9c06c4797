"""GPUs of the embedder: which provider is asked for, how its vectors are checked, and what happens when it fails."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from index._util.cuda import Gpu, Gpus
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.gpu_sessions import BATCH_SIZES, CPU, CUDA, TENSORRT
from tests.support.tiny_bundle import SIDE, make_tiny_bundle

PIXELS = np.random.default_rng(1).integers(0, 256, (77, SIDE, SIDE, 3), np.uint8)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path_factory.mktemp("bundle") / "shop"))


class FakeGpus:
    """ONNX Runtime with GPUs: its sessions run on the CPU and say that they do not."""

    def __init__(self, installed: list[str], working: list[str], count: int = 1) -> None:
        self.installed, self.working = installed, working
        self.gpus = Gpus((Gpu("Fake GPU", 8 << 30, 8 << 30),) * count, problem="" if count else "no NVIDIA driver")
        self.requested: list[tuple[str, dict[str, Any]]] = []
        self.runs: list[tuple[int, int]] = []
        """The number of the GPU and of images, for each run."""
        self.distort: Callable[[NDArray[np.float32]], NDArray[np.float32]] = lambda vectors: vectors
        self.__file__ = onnxruntime.__file__
        self.SessionOptions = onnxruntime.SessionOptions
        self.OrtValue = self

    def get_available_providers(self) -> list[str]:
        return self.installed

    def ortvalue_from_numpy(self, array: NDArray[Any], device: str, number: int) -> Any:
        assert device == "cuda"
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cpu", 0)

    def InferenceSession(self, path: str, options: Any, providers: list[Any]) -> Any:
        session = onnxruntime.InferenceSession(path, options, providers=[CPU])
        if providers == [CPU]:
            return session
        *chosen, last = providers
        assert last == CPU
        self.requested = chosen
        number = chosen[0][1]["device_id"]
        outer = self

        class Session:
            get_inputs, get_outputs = session.get_inputs, session.get_outputs

            def get_providers(self) -> list[str]:
                return [*outer.working, CPU]

            def io_binding(self) -> Any:
                return Binding(session.io_binding())

            def run_with_iobinding(self, binding: Any) -> None:
                session.run_with_iobinding(binding.real)

        class Binding:
            def __init__(self, real: Any) -> None:
                self.real = real
                self.bind_ortvalue_input, self.bind_output = real.bind_ortvalue_input, real.bind_output

            def copy_outputs_to_cpu(self) -> list[Any]:
                (vectors,) = self.real.copy_outputs_to_cpu()
                outer.runs.append((number, len(vectors)))
                return [outer.distort(vectors)]

        return Session()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install_gpus(gpus: FakeGpus) -> FakeGpus:
        for module in ("embedder", "gpu_sessions"):
            monkeypatch.setattr(f"index.embedding.{module}.onnxruntime", lambda: gpus)
        monkeypatch.setattr("index.embedding.gpu_sessions.find_gpus", lambda: gpus.gpus)
        return gpus

    return install_gpus


SLOWER = f"is installed but did not start: embedding runs on the slower {CPU}: "


@pytest.mark.parametrize(
    ("installed", "tensorrt", "working", "provider", "warning"),
    [
        ([CPU], False, [], CPU, ""),
        ([CPU], True, [], CPU, f"TensorRT is wanted, but the installed ONNX Runtime has no {TENSORRT}"),
        ([TENSORRT, CUDA, CPU], False, [CUDA], CUDA, ""),
        ([TENSORRT, CUDA, CPU], True, [TENSORRT, CUDA], TENSORRT, ""),
        (
            [TENSORRT, CUDA, CPU],
            True,
            [CUDA],
            CUDA,
            f"{TENSORRT} is installed but did not start: embedding runs on the slower {CUDA}",
        ),
        ([TENSORRT, CUDA, CPU], False, [], CPU, f"{CUDA} {SLOWER}"),
    ],
)
def test_the_provider_is_the_one_that_works_and_a_slower_one_logs_a_warning(
    bundle: Bundle,
    install: Any,
    caplog: pytest.LogCaptureFixture,
    installed: list[str],
    tensorrt: bool,
    working: list[str],
    provider: str,
    warning: str,
) -> None:
    gpus = install(FakeGpus(installed, working))
    embedder = Embedder(bundle, tensorrt=tensorrt)
    assert embedder.provider == provider
    assert [message.startswith(warning) for message in caplog.messages] == [True] * bool(warning)
    assert [name for name, _ in gpus.requested] == [name for name in (TENSORRT, CUDA) if name in installed][
        not tensorrt :
    ]
    np.testing.assert_allclose(embedder.embed(PIXELS), Embedder(bundle, threads=1).embed(PIXELS), atol=1e-6)


def test_without_a_driver_the_warning_names_it(bundle: Bundle, install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install(FakeGpus([TENSORRT, CUDA, CPU], [CUDA], count=0))
    embedder = Embedder(bundle)
    assert (embedder.provider, embedder.gpu_problem) == (CPU, "no NVIDIA driver")
    assert caplog.messages == [f"{CUDA} {SLOWER}no NVIDIA driver"]


def test_a_library_that_is_missing_is_named(
    bundle: Bundle, install: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str) -> None:
        assert path.endswith("capi/libonnxruntime_providers_cuda.so")
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    install(FakeGpus([CUDA, CPU], []))
    Embedder(bundle)
    assert caplog.messages == [f"{CUDA} {SLOWER}libcudnn.so.9: cannot open shared object file"]


def wrong(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors[:, ::-1]


def not_finite(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return vectors * np.float32(np.nan)


def failing(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("distort", "reason"),
    [(wrong, "it computes different vectors"), (not_finite, "(cosine nan)"), (failing, "CUDA failure 700")],
)
def test_a_gpu_that_computes_other_vectors_is_refused(
    bundle: Bundle, install: Any, caplog: pytest.LogCaptureFixture, distort: Any, reason: str
) -> None:
    gpus = install(FakeGpus([CUDA, CPU], [CUDA]))
    gpus.distort = distort
    embedder = Embedder(bundle)
    assert embedder.provider == CPU and reason in embedder.gpu_problem
    assert len(caplog.messages) == 1 and reason in caplog.messages[0] and SLOWER in caplog.messages[0]
    np.testing.assert_allclose(np.linalg.norm(embedder.embed(PIXELS), axis=1), 1, atol=1e-5)


def test_every_batch_size_is_checked_and_bound_once(bundle: Bundle, install: Any) -> None:
    gpus = install(FakeGpus([CUDA, CPU], [CUDA]))
    embedder = Embedder(bundle)
    assert gpus.runs == [(0, size) for size in BATCH_SIZES]
    gpus.runs.clear()
    embedder.embed(PIXELS)
    assert gpus.runs == [(0, 32), (0, 32), (0, 8), (0, 4), (0, 1)]
    assert (embedder.concurrency, embedder.preferred_batch) == (1, 32)


def test_each_gpu_has_a_session_and_takes_a_share(bundle: Bundle, install: Any) -> None:
    gpus = install(FakeGpus([CUDA, CPU], [CUDA], count=2))
    embedder = Embedder(bundle)
    expected = Embedder(bundle, threads=1)
    gpus.runs.clear()
    assert embedder.concurrency == 2
    np.testing.assert_allclose(embedder.embed(PIXELS), expected.embed(PIXELS), atol=1e-6)
    assert {number for number, _ in gpus.runs} == {0, 1}


def test_a_gpu_that_fails_during_a_batch_is_replaced_by_the_cpu(
    bundle: Bundle, install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = install(FakeGpus([CUDA, CPU], [CUDA], count=2))
    embedder = Embedder(bundle)
    expected = embedder.embed(PIXELS)
    gpus.distort = failing
    for _ in range(2):
        np.testing.assert_allclose(embedder.embed(PIXELS), expected, atol=1e-6)
        np.testing.assert_allclose(embedder.embed_single_threaded(PIXELS[:1]), expected[:1], atol=1e-6)
    assert embedder.provider == CPU
    assert [message.partition(":")[0] for message in caplog.messages] == [f"{CUDA} failed"]


def test_a_caller_that_sends_wrong_pixels_does_not_lose_the_gpu(bundle: Bundle, install: Any) -> None:
    install(FakeGpus([CUDA, CPU], [CUDA]))
    embedder = Embedder(bundle)
    with pytest.raises(ValueError, match="expected uint8 pixels"):
        embedder.embed(PIXELS[:, 1:])
    assert embedder.provider == CUDA


def test_tensorrt_keeps_one_engine_for_all_batch_sizes(
    bundle: Bundle, install: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus = install(FakeGpus([TENSORRT, CUDA, CPU], [TENSORRT, CUDA]))
    Embedder(bundle, tensorrt=True)
    options = gpus.requested[0][1]
    assert options["trt_engine_cache_enable"] and Path(options["trt_engine_cache_path"]).is_dir()
    assert Path(options["trt_engine_cache_path"]).is_relative_to(tmp_path)
    assert options["trt_profile_min_shapes"] == f"pixels:1x{SIDE}x{SIDE}x3"
    assert options["trt_profile_max_shapes"] == f"pixels:32x{SIDE}x{SIDE}x3"
    assert options["trt_fp16_enable"] is False


def test_a_bundle_of_half_precision_is_recommended_where_there_is_one(
    bundle: Bundle, install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install(FakeGpus([CUDA, CPU], [CUDA]))
    half = bundle.directory.with_name("shop-fp16")
    half.mkdir()
    try:
        Embedder(bundle)
    finally:
        half.rmdir()
    assert caplog.messages == [
        f"on a GPU the bundle {half} is faster than {bundle.directory}; its id and vectors differ"
    ]
