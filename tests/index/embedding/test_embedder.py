"""The embedder: where it runs is told, and each of its ways in gives the same vector."""

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import index.embedding.embedder
from index.embedding.bundle import Bundle, BundleError
from index.embedding.embedder import BATCH_SIZES, Embedder
from index.embedding.images import ImageError, ImageLimits
from service.settings import Settings
from tests.service.conftest import serving
from tests.support.tiny_bundle import SIDE, make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, index_source, tiny_photo, write_tiny_source
from training.data import Photo
from training.data.torch_datasets import MeasuredPhotos


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.load(make_tiny_bundle(tmp_path_factory.mktemp("bundle"), resize=40))


@pytest.fixture(scope="module")
def embedder(bundle: Bundle) -> Embedder:
    return Embedder(bundle, threads=1)


def test_vectors_do_not_depend_on_the_batch(embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (max(BATCH_SIZES) + 7, SIDE, SIDE, 3), dtype=np.uint8)
    together = embedder.embed(pixels)
    alone = np.concatenate([embedder.embed(one[None]) for one in pixels])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_vectors_do_not_depend_on_the_threads(bundle: Bundle, embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (29, SIDE, SIDE, 3), dtype=np.uint8)
    expected = embedder.embed(pixels)
    for threads in (2, 3):
        spread = Embedder(bundle, threads=threads)
        for count in (0, 1, 2, 3, 8, 29):
            np.testing.assert_allclose(spread.embed(pixels[:count]), expected[:count], atol=1e-6)


def test_many_callers_at_once_each_get_their_own_vectors(bundle: Bundle, embedder: Embedder) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, SIDE, SIDE, 3), dtype=np.uint8)
    expected = embedder.embed(pixels)
    spread = Embedder(bundle, threads=2)
    starts = range(50)
    with ThreadPoolExecutor(8) as callers:
        answers = callers.map(lambda start: spread.embed(pixels[start : start + 1 + start % 5]), starts)
    for start, vectors in zip(starts, answers, strict=True):
        np.testing.assert_allclose(vectors, expected[start : start + 1 + start % 5], atol=1e-6)


def test_an_embedder_takes_its_threads_with_it(bundle: Bundle) -> None:
    before = set(threading.enumerate())
    embedder = Embedder(bundle, threads=2)
    embedder.embed(np.zeros((8, SIDE, SIDE, 3), np.uint8))
    list(embedder.embed_images(photos(20)))
    started = set(threading.enumerate()) - before
    assert started
    del embedder
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_no_pixels_are_no_vectors(embedder: Embedder) -> None:
    assert embedder.embed(np.zeros((0, SIDE, SIDE, 3), np.uint8)).shape == (0, 48)


@pytest.mark.parametrize("pixels", [np.zeros((1, 8, 8, 3), np.uint8), np.zeros((1, SIDE, SIDE, 3), np.float32)])
def test_pixels_of_a_wrong_size_or_type_are_refused(embedder: Embedder, pixels: Any) -> None:
    with pytest.raises(ValueError, match="expected uint8 pixels"):
        embedder.embed(pixels)


def test_a_model_that_is_no_model_is_refused(tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path)
    (bundle / "model.onnx").write_bytes(b"no model")
    with pytest.raises(BundleError, match="cannot be run"):
        Embedder(Bundle(bundle, Bundle.load(make_tiny_bundle(tmp_path / "good")).card))


class FakeRuntime:
    """ONNX Runtime on a machine with a GPU: `installed` can be asked for, `working` is what a session gets."""

    def __init__(self, installed: list[str], working: list[str]) -> None:
        self.installed, self.working = installed, working
        self.entries: dict[str, str] = {}
        self.asked: list[str] = []
        self.runs: list[tuple[int, int]] = []
        """How many threads the session had and how many images it got."""
        self.SessionOptions = lambda: SimpleNamespace(add_session_config_entry=self.entries.__setitem__)

    def get_available_providers(self) -> list[str]:
        return self.installed

    def InferenceSession(self, path: str, options: Any, providers: list[tuple[str, dict[str, Any]]]) -> Any:
        self.asked = [name for name, _ in providers]

        def run(outputs: None, inputs: dict[str, Any]) -> list[Any]:
            count = len(inputs["pixels"])
            self.runs.append((options.intra_op_num_threads, count))
            return [np.zeros((count, 48), np.float32)]

        return SimpleNamespace(
            get_providers=lambda: self.working, get_inputs=lambda: [SimpleNamespace(name="pixels")], run=run
        )


TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("installed", "working", "asked", "warns"),
    [
        (["AzureExecutionProvider", CPU], [CPU], [CPU], False),
        ([CPU, CUDA], [CUDA, CPU], [CUDA, CPU], False),
        ([CPU, CUDA, TENSORRT], [TENSORRT, CUDA, CPU], [TENSORRT, CUDA, CPU], False),
        ([CPU, CUDA, TENSORRT], [CUDA, CPU], [TENSORRT, CUDA, CPU], True),
        ([CPU, CUDA], [CPU], [CUDA, CPU], True),
    ],
    ids=["cpu only", "cuda", "tensorrt", "tensorrt fails", "cuda fails"],
)
def test_the_fastest_provider_is_asked_for_and_a_slower_one_is_warned_of(
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    installed: list[str],
    working: list[str],
    asked: list[str],
    warns: bool,
) -> None:
    runtime = FakeRuntime(installed, working)
    monkeypatch.setattr(index.embedding.embedder, "onnxruntime", lambda: runtime)
    embedder = Embedder(bundle)
    assert runtime.asked == asked
    assert embedder.provider == working[0]
    assert [f"asked for {asked[0]}, got {working[0]}" in message for message in caplog.messages] == [True] * warns


def test_batches_are_as_large_as_the_provider_likes(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for provider, threads, shapes in ((CUDA, 5, [32, 4, 1]), (CPU, 1, [4] * 9 + [1])):
        runtime = FakeRuntime([provider], [provider])
        monkeypatch.setattr(index.embedding.embedder, "onnxruntime", lambda runtime=runtime: runtime)
        Embedder(bundle, threads=threads).embed(np.zeros((37, SIDE, SIDE, 3), np.uint8))
        assert runtime.runs == [(threads, shape) for shape in shapes]


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
def test_enough_images_are_shared_among_lanes_of_one_thread_each(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, images: int, runs: list[tuple[int, int]]
) -> None:
    runtime = FakeRuntime([CPU], [CPU])
    monkeypatch.setattr(index.embedding.embedder, "onnxruntime", lambda: runtime)
    monkeypatch.setattr(index.embedding.embedder, "usable_cores", lambda: 5)
    Embedder(bundle).embed(np.zeros((images, SIDE, SIDE, 3), np.uint8))
    assert sorted(runtime.runs) == runs
    assert runtime.entries == {"session.intra_op.allow_spinning": "0"}


def photos(count: int) -> list[bytes]:
    return [tiny_photo(number % len(COLOURS), number) for number in range(count)]


def test_in_bulk_vectors_and_errors_come_in_the_order_given(embedder: Embedder, tmp_path: Path) -> None:
    images: list[bytes | Path] = [*photos(100)]
    images[0] = images[50] = b"no image"
    images[7] = tmp_path / "missing.jpg"
    (tmp_path / "photo.jpg").write_bytes(tiny_photo(3, 1))
    images[99] = tmp_path / "photo.jpg"
    answers = list(embedder.embed_images(images))
    assert [place for place, _ in answers] == list(range(100))
    bad = {place: answer.reason for place, answer in answers if isinstance(answer, ImageError)}
    assert bad == {0: "unsupported", 7: "unreadable", 50: "unsupported"}
    again = dict(embedder.embed_images([tiny_photo(3, 1), tiny_photo(4, 4)]))
    np.testing.assert_array_equal(answers[99][1], again[0])
    np.testing.assert_array_equal(answers[4][1], again[1])


def test_nothing_in_bulk_is_nothing(embedder: Embedder) -> None:
    assert list(embedder.embed_images([])) == []
    assert [type(answer) for _, answer in embedder.embed_images([b"x"])] == [ImageError]


def test_a_bad_image_does_not_make_a_batch_smaller(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime([CPU], [CPU])
    monkeypatch.setattr(index.embedding.embedder, "onnxruntime", lambda: runtime)
    images = photos(18)
    images[3:3] = [b"bad"] * 5
    assert len(list(Embedder(bundle, threads=2).embed_images(images))) == 23
    assert sorted(runtime.runs) == [(1, 2), (1, 4), (1, 4), (1, 4), (1, 4)]


def test_the_bulk_path_keeps_to_its_limits(embedder: Embedder, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(tiny_photo(0, 0))
    images: list[bytes | Path] = [tiny_photo(0, 0), tmp_path / "photo.jpg"]
    for limits, reason in ((ImageLimits(max_bytes=100), "too_large"), (ImageLimits(max_pixels=100), "too_many_pixels")):
        answers = [answer for _, answer in embedder.embed_images(images, limits=limits)]
        assert [answer.reason for answer in answers if isinstance(answer, ImageError)] == [reason] * 2


def test_the_bulk_path_reads_ahead_but_not_without_bound(embedder: Embedder) -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield tiny_photo(read % len(COLOURS), 0)

    answers = embedder.embed_images(endless())
    first = [next(answers) for _ in range(5)]
    assert [place for place, _ in first] == [0, 1, 2, 3, 4]
    assert 8 < read <= 32
    answers.close()  # type: ignore[attr-defined]
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("decode")]
    assert not left, "an abandoned job leaves none of its threads behind"


def test_an_error_of_the_source_reaches_the_caller(embedder: Embedder) -> None:
    def broken() -> Iterator[bytes]:
        yield tiny_photo(0, 0)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        list(embedder.embed_images(broken()))


def large_turned_photo() -> bytes:
    """As from a phone: far larger than the model's input, stored turned, with its EXIF saying so."""
    photo = Image.open(io.BytesIO(tiny_photo(4, 6))).resize((1500, 1100), Image.Resampling.BICUBIC)
    photo.paste((20, 40, 60), (0, 0, 700, 200))
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    photo.save(out, "JPEG", quality=90, exif=exif)
    return out.getvalue()


def test_evaluation_bulk_work_and_http_see_the_same_vector(bundle: Bundle, embedder: Embedder, tmp_path: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    photo = source.parent / "magenta-1.jpg"
    photo.write_bytes(large_turned_photo())

    measured = MeasuredPhotos([Photo(photo, "ball-magenta")], bundle.preprocessing)
    evaluated = embedder.embed(torch.stack([measured[0]]).numpy())[0]
    [(_, in_bulk)] = embedder.embed_images([photo])
    np.testing.assert_array_equal(evaluated, in_bulk)

    index_source(source, gallery=tmp_path / "gallery", bundle=bundle.directory)
    with serving(Settings(gallery=tmp_path / "gallery", bundle=bundle.directory, threads=1)) as client:
        answer: httpx.Response = client.post("/v1/search?top=1", files={"image": photo.read_bytes()})
    best = answer.json()["items"][0]
    assert (best["id"], best["image"]["id"]) == ("ball-magenta", "magenta-1.jpg")
    assert best["score"] == pytest.approx(1, abs=1e-3)
