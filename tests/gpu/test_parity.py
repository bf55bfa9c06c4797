"""What GPUs compute is what the CPU computes: search, graphs, vectors of photos, figures, and the service."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from index._util.imports import faiss, onnxruntime
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.embedding.gpu_sessions import CPU, CUDA, MIN_COSINE, TENSORRT
from index.evaluation.ranking import RetrievalProtocol, relevant_ranks
from index.gallery.vectors.faiss.builder import build
from index.gallery.vectors.faiss.gpu import GpuPool, find_device, load_vectors
from index.gallery.vectors.faiss.searcher import AllowList, Searcher, exact_index
from index.gallery.vectors.faiss.settings import DEFAULT
from tests.support.clustered_vectors import CHEAP_STEPS, shop_vectors
from tests.support.processes import lookalike, run_server
from tests.support.tiny_bundle import SIDE, make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo
from training.devices import choose_device
from training.evaluation import measuring_embedder
from training.gpu_ranking import torch_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pool() -> GpuPool:
    if not hasattr(faiss(), "StandardGpuResources"):
        pytest.skip("needs faiss-gpu")
    pool = GpuPool(find_device)
    assert pool.device(), pool.problem
    return pool


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    if CUDA not in onnxruntime().get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    return Bundle.load(make_tiny_bundle(tmp_path_factory.mktemp("gpu") / "bundle"))


@pytest.mark.parametrize("count", [300, 20_000, 600_000], ids=["few", "one part", "several parts"])
def test_searches_return_the_scores_of_the_cpu(pool: GpuPool, count: int) -> None:
    storage = exact_index(shop_vectors(count)[0])
    loaded = load_vectors(pool, storage, DEFAULT)
    assert loaded
    proven = 0
    for allowed in (None, AllowList(np.random.default_rng(0).random(count) < 0.7)):
        for query in shop_vectors(64, seed=5)[0].astype(np.float32):
            if found := loaded.search(query[None], 10, allowed):
                parameters: dict[str, Any] = {"params": allowed.parameters} if allowed else {}
                assert np.array_equal(found[0], storage.search(query[None], 10, **parameters)[0])
                proven += 1
    assert proven > 64, "most searches are decided on the GPU"
    assert loaded.device and not pool.problem


def test_a_graph_of_cagra_reaches_its_recall(pool: GpuPool) -> None:
    if not hasattr(faiss(), "GpuIndexCagra"):
        pytest.skip("needs a FAISS with cuVS")
    vectors = shop_vectors(20_000)[0]
    index, plan, order = build(vectors, kind="hnsw", gpus=pool)
    assert not pool.problem and plan.recall >= plan.target
    _, positions = Searcher(index, plan, CHEAP_STEPS).search(vectors.astype(np.float32), 1)
    assert np.mean(order[positions[:, 0]] == np.arange(len(vectors))) > 0.97


@pytest.mark.parametrize("provider", [CUDA, TENSORRT])
def test_photos_have_the_vectors_of_the_cpu(bundle: Bundle, provider: str) -> None:
    embedder = Embedder(bundle, tensorrt=provider == TENSORRT)
    if provider == TENSORRT and embedder.provider == CUDA:
        pytest.skip("needs TensorRT")
    assert embedder.provider == provider, embedder.gpu_problem
    pixels = np.random.default_rng(0).integers(0, 256, (101, SIDE, SIDE, 3), np.uint8)
    found = embedder.embed(pixels)
    session = onnxruntime().InferenceSession(str(bundle.model_path), providers=[CPU])
    (expected,) = session.run(None, {"pixels": pixels})
    assert np.einsum("nd,nd->n", found, expected).min() >= MIN_COSINE


def test_figures_are_those_of_the_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch for GPUs")
    vectors, clusters = shop_vectors(5000)
    random = np.random.default_rng(0)
    for roles in ({}, {"is_query": random.random(5000) < 0.2}):
        protocol = RetrievalProtocol.from_labels(clusters.tolist(), **roles)
        unit = vectors.astype(np.float32)
        found, expected = torch_ranks(unit, protocol, torch.device("cuda")), relevant_ranks(unit, protocol)
        assert np.mean(found == expected) > 0.999, "sums that are rounded in another order swap few neighbours"
        assert abs(found - expected).max() <= 3


def test_photos_are_measured_on_the_gpu(caplog: pytest.LogCaptureFixture) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch for GPUs")
    assert choose_device().type == "cuda"
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 16, 3)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.normalize(self.layer(pixels.permute(0, 3, 1, 2) / 255).flatten(1))

    network = Network()
    with torch.inference_mode():
        expected = network(pixels).numpy()
    np.testing.assert_allclose(measuring_embedder(network, 32)(pixels), expected, atol=1e-4)
    assert not caplog.messages


def test_the_service_embeds_and_searches_on_gpus(pool: GpuPool, bundle: Bundle, tmp_path: Path) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle.directory)
    with run_server("serve", "--gallery", gallery) as address:
        found = httpx.post(f"{address}/v1/search?limit=1", files={"image": tiny_photo(2, 3)}).json()
        status = httpx.get(f"{address}/v1/status").json()
    assert status["provider"] == CUDA and status["gallery"]["index"]["device"] != "cpu"
    assert found["items"][0]["id"] == "ball-blue"


def test_info_names_the_gpus() -> None:
    found = json.loads(lookalike("info", "--json").stdout)
    assert "GPU 0" in found["gpus"] and "problem" not in found["gpus"]
