"""Tests of the embedder: its provider, its batches and threads, and one vector on every path."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from index.embedding.bundle import Bundle, BundleError
from index.embedding.embedder import Embedder
from index.embedding.gpu_sessions import BATCH_SIZES
from index.embedding.images import load_pixels
from index.gallery import open_gallery
from service.settings import Settings
from tests.service.conftest import serving
from tests.support.tiny_bundle import SIDE, make_tiny_bundle
from tests.support.tiny_gallery import index_source, tiny_photo, write_tiny_source
from training.data import Photo
from training.data.torch_datasets import MeasuredPhotos


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path_factory.mktemp("bundle"), resize=40))


@pytest.fixture(scope="module")
def embedder(bundle: Bundle) -> Embedder:
    return Embedder(bundle, threads=1)


def test_vectors_do_not_depend_on_the_batch_size(embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (max(BATCH_SIZES) + 7, SIDE, SIDE, 3), dtype=np.uint8)
    together = embedder.embed(pixels)
    alone = np.concatenate([embedder.embed(one[None]) for one in pixels])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_vectors_do_not_depend_on_the_number_of_threads(bundle: Bundle, embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (29, SIDE, SIDE, 3), dtype=np.uint8)
    expected = embedder.embed(pixels)
    for threads in (2, 3):
        parallel = Embedder(bundle, threads=threads)
        for count in (0, 1, 2, 3, 8, 29):
            np.testing.assert_allclose(parallel.embed(pixels[:count]), expected[:count], atol=1e-6)


def test_concurrent_callers_get_their_own_vectors(bundle: Bundle, embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, SIDE, SIDE, 3), dtype=np.uint8)
    expected = embedder.embed(pixels)
    parallel = Embedder(bundle, threads=2)
    starts = range(50)
    with ThreadPoolExecutor(8) as callers:
        results = callers.map(lambda start: parallel.embed(pixels[start : start + 1 + start % 5]), starts)
    for start, vectors in zip(starts, results, strict=True):
        np.testing.assert_allclose(vectors, expected[start : start + 1 + start % 5], atol=1e-6)


def test_threads_end_with_their_embedder(bundle: Bundle) -> None:
    before = set(threading.enumerate())
    embedder = Embedder(bundle, threads=2)
    embedder.embed(np.zeros((8, SIDE, SIDE, 3), np.uint8))
    started = set(threading.enumerate()) - before
    assert started
    del embedder
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_no_pixels_give_no_vectors(embedder: Embedder) -> None:
    assert embedder.embed(np.zeros((0, SIDE, SIDE, 3), np.uint8)).shape == (0, 48)


@pytest.mark.parametrize("pixels", [np.zeros((1, 8, 8, 3), np.uint8), np.zeros((1, SIDE, SIDE, 3), np.float32)])
def test_pixels_of_a_wrong_size_or_type_are_refused(embedder: Embedder, pixels: Any) -> None:
    with pytest.raises(ValueError, match="expected uint8 pixels"):
        embedder.embed(pixels)


def test_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path)
    (bundle / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(BundleError, match="cannot be run"):
        Embedder(Bundle(bundle, Bundle.load(make_tiny_bundle(tmp_path / "good")).card))


class FakeRuntime:
    """ONNX Runtime on the CPU that records the runs of its sessions."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.runs: list[tuple[int, int]] = []
        """The number of threads of the session and of images, for each run."""
        self.SessionOptions = lambda: SimpleNamespace(add_session_config_entry=self.entries.__setitem__)

    def get_available_providers(self) -> list[str]:
        return ["AzureExecutionProvider", "CPUExecutionProvider"]

    def InferenceSession(self, path: str, options: Any, providers: list[str]) -> Any:
        assert providers == ["CPUExecutionProvider"]

        def run(outputs: None, inputs: dict[str, Any]) -> list[Any]:
            count = len(inputs["pixels"])
            self.runs.append((options.intra_op_num_threads, count))
            return [np.zeros((count, 48), np.float32)]

        return SimpleNamespace(get_inputs=lambda: [SimpleNamespace(name="pixels")], run=run)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr("index.embedding.embedder.onnxruntime", lambda: runtime)
    monkeypatch.setattr("index.embedding.gpu_sessions.onnxruntime", lambda: runtime)
    return runtime


def test_one_thread_runs_batches_of_at_most_four(bundle: Bundle, runtime: FakeRuntime) -> None:
    Embedder(bundle, threads=1).embed(np.zeros((37, SIDE, SIDE, 3), np.uint8))
    assert runtime.runs == [(1, 4)] * 9 + [(1, 1)]


@pytest.mark.parametrize(
    ("images", "runs"),
    [
        (1, [(5, 1)]),
        (4, [(5, 4)]),
        (5, [(1, 1)] * 5),
        (20, [(1, 4)] * 5),
        (43, [(1, 1)] * 3 + [(1, 4)] * 10),
    ],
)
def test_many_images_are_split_into_single_threaded_runs(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, images: int, runs: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr("index.embedding.embedder.usable_cores", lambda: 5)
    Embedder(bundle).embed(np.zeros((images, SIDE, SIDE, 3), np.uint8))
    assert sorted(runtime.runs) == runs
    assert runtime.entries == {"session.intra_op.allow_spinning": "0"}


def large_rotated_photo() -> bytes:
    """Returns a photo as from a phone: far larger than the model's input, stored rotated, with an EXIF orientation."""
    photo = Image.open(io.BytesIO(tiny_photo(4, 6))).resize((1500, 1100), Image.Resampling.BICUBIC)
    photo.paste((20, 40, 60), (0, 0, 700, 200))
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    photo.save(out, "JPEG", quality=90, exif=exif)
    return out.getvalue()


def test_evaluation_ingestion_and_http_compute_the_same_vector(
    bundle: Bundle, embedder: Embedder, tmp_path: Path
) -> None:
    source = write_tiny_source(tmp_path / "source")
    photo = source.parent / "magenta-1.jpg"
    photo.write_bytes(large_rotated_photo())

    measured = MeasuredPhotos([Photo(photo, "ball-magenta")], bundle.preprocessing)
    evaluated = embedder.embed(torch.stack([measured[0]]).numpy())[0]
    queried = embedder.embed(load_pixels(photo.read_bytes(), bundle.preprocessing)[None])[0]
    np.testing.assert_array_equal(evaluated, queried)

    index_source(source, gallery=tmp_path / "gallery", bundle=bundle.directory)
    gallery = open_gallery(tmp_path / "gallery")
    ingested = gallery.item_vectors("ball-magenta", bundle.id)["magenta-1.jpg"]
    gallery.close()
    np.testing.assert_allclose(ingested, evaluated, atol=1e-3)  # stored in half precision

    with serving(Settings(gallery=tmp_path / "gallery", bundle=bundle.directory, threads=1)) as client:
        response: httpx.Response = client.post("/v1/search?limit=1", files={"image": photo.read_bytes()})
    best = response.json()["items"][0]
    assert (best["id"], best["image"]["id"]) == ("ball-magenta", "magenta-1.jpg")
    assert best["score"] == pytest.approx(1, abs=1e-3)
