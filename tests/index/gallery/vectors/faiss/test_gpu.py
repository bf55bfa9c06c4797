"""GPUs: checked when they are first used, searched with the CPU's results, and given up when they fail."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from index._util.imports import faiss
from index.gallery import open_gallery
from index.gallery.vectors.faiss.builder import build
from index.gallery.vectors.faiss.gpu import (
    GpuError,
    GpuPool,
    find_device,
    load_vectors,
    run_check,
)
from index.gallery.vectors.faiss.searcher import EXACT, AllowList, Searcher, exact_index
from index.gallery.vectors.faiss.settings import DEFAULT, FaissSettings
from tests.support.clustered_vectors import CHEAP_STEPS, COUNT, KINDS, build_shop, queries_near, shop_vectors
from tests.support.gpus import GIB, FakeDevice, pool_of
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery

NEAREST = np.arange(0, COUNT, 50)


def without_the_nearest(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a GPU returns that misses the best neighbour of each query and finds another twice."""
    return np.concatenate((positions[:, 1:], positions[:, -1:]), axis=1)


def shuffled(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions[:, ::-1]


def failing(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    raise RuntimeError("CUDA error 719 unspecified launch failure\nin a kernel")


def nowhere(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.full_like(positions, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [1.0, 0.9, 0.3])
def test_a_search_on_gpus_returns_exact_results(kind: Any, share: float) -> None:
    index, plan, _ = build_shop(kind)
    device, searcher = FakeDevice(), Searcher(index, plan, CHEAP_STEPS)
    searcher.gpu = load_vectors(pool_of(device), searcher.storage, DEFAULT)
    allowed = None if share == 1 else AllowList(np.random.default_rng(0).random(COUNT) < share)
    device.searches.clear()
    for query in queries_near(NEAREST):
        scores, positions = searcher.search(query[None], 10, allowed, filtered=allowed is not None)
        expected = Searcher(searcher.storage, EXACT).search(query[None], 10, allowed)
        assert np.array_equal(scores, expected[0])
        assert allowed is None or allowed.mask[positions].all()
    assert device.searches == [int(52 / (1.0 if allowed is None else allowed.count / COUNT))] * len(NEAREST)


def test_filters_that_match_few_vectors_are_left_to_the_cpu() -> None:
    index, plan, _ = build_shop("exact")
    device, searcher = FakeDevice(), Searcher(index, plan)
    searcher.gpu = load_vectors(pool_of(device), searcher.storage, DEFAULT)
    device.searches.clear()
    _, positions = searcher.search(queries_near(NEAREST), 10, AllowList(np.arange(COUNT) < 50), filtered=True)
    assert ((positions >= 0) & (positions < 50)).all() and not device.searches
    assert (searcher.search(queries_near(NEAREST), COUNT)[1] >= 0).all() and not device.searches


def test_a_search_that_half_precision_cannot_decide_is_left_to_the_cpu() -> None:
    vectors = np.repeat(shop_vectors()[0][:2], [100, 200], axis=0)
    device = FakeDevice()
    loaded = load_vectors(pool_of(device), exact_index(vectors), DEFAULT)
    assert loaded and loaded.device
    assert loaded.search(vectors[:1].astype(np.float32), 10) is None, "the last of 52 neighbours is as near as the 10th"
    assert loaded.search(vectors[:1].astype(np.float32), 100), "the last of 232 neighbours is another vector"


@pytest.mark.parametrize(
    ("distort", "reason"),
    [
        (without_the_nearest, "the GPU finds other neighbours than the CPU"),
        (failing, "CUDA error 719 unspecified launch failure"),
        (nowhere, "the GPU returned positions that do not exist"),
    ],
)
def test_gpus_that_fail_their_check_are_refused_with_a_warning(
    distort: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(FakeDevice(distort))
    storage = build_shop("exact").index
    assert load_vectors(pool, storage, DEFAULT) is None and load_vectors(pool, storage, DEFAULT) is None
    assert pool.problem == reason
    assert caplog.messages == [f"vectors are compared on the CPU: {reason}"]


def test_gpus_that_are_wrong_for_the_vectors_of_the_index_only_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    def distort(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return without_the_nearest(positions) if device.searches[1:] else positions

    device = FakeDevice(distort)
    pool = pool_of(device)
    assert load_vectors(pool, build_shop("exact").index, DEFAULT) is None
    assert len(device.searches) == 2 and pool.device() is None
    assert caplog.messages == ["vectors are compared on the CPU: the GPU finds other neighbours than the CPU"]


def test_candidates_in_another_order_are_accepted() -> None:
    # The order decides nothing but which candidate is the last one.
    pool = pool_of(FakeDevice(lambda positions: np.concatenate((shuffled(positions[:, :-1]), positions[:, -1:]), 1)))
    assert load_vectors(pool, build_shop("exact").index, DEFAULT)


@pytest.mark.parametrize("distort", [failing, nowhere])
def test_a_gpu_that_fails_during_a_search_is_replaced_by_the_cpu(
    distort: Any, caplog: pytest.LogCaptureFixture
) -> None:
    index, plan, _ = build_shop("hnsw")
    device = FakeDevice()
    pool = pool_of(device)
    searcher, other = Searcher(index, plan, CHEAP_STEPS), Searcher(index, plan, CHEAP_STEPS)
    searcher.gpu, other.gpu = (load_vectors(pool, searcher.storage, DEFAULT) for _ in range(2))
    queries = queries_near(NEAREST)
    before = searcher.search(queries[:1], 10)
    device.distort = distort
    for _ in range(3):
        after = searcher.search(queries[:1], 10), other.search(queries[:1], 10)
        assert all(np.array_equal(before[0], found[0]) for found in after)
    assert len(caplog.messages) == 1 and pool.device() is None
    assert searcher.gpu and searcher.gpu.device is None


@pytest.mark.parametrize(
    ("settings", "free"),
    [
        (FaissSettings(gpu_share=0), 8 * GIB),
        (FaissSettings(gpu_share=COUNT * 32 / (8 * GIB) / 1.01), 8 * GIB),
        (FaissSettings(gpu_share=1), 200 << 20),
    ],
    ids=["none", "a share that is too small", "too little free memory"],
)
def test_vectors_beyond_the_share_of_memory_stay_on_the_cpu(
    settings: FaissSettings, free: int, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    device.free[1] = free
    assert load_vectors(pool_of(device), build_shop("exact").index, settings) is None
    assert not caplog.messages
    device.free[1] = 8 * GIB
    assert load_vectors(pool_of(device), build_shop("exact").index, FaissSettings(gpu_share=1))


def test_a_process_that_keeps_a_gallery_open_searches_on_gpus_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle"))
    device = FakeDevice()
    monkeypatch.setattr("index.gallery.POOL", pool_of(device))
    for maintain in (False, True):
        with closing(open_gallery(tmp_path / "gallery", maintain=maintain)) as gallery:
            assert gallery.stats().index.device == (device.name if maintain else "cpu")
            vectors = gallery.item_vectors("ball-blue", str(gallery.active_bundle()))
            device.searches.clear()
            result = gallery.search(next(iter(vectors.values()))[None], bundle_id=str(gallery.active_bundle()), top=1)
            assert result.hits[0][0].item.id == "ball-blue"
            assert bool(device.searches) == maintain


def test_a_graph_of_gpus_is_as_good_and_can_be_extended() -> None:
    vectors = shop_vectors()[0]
    device = FakeDevice()
    index, plan, order = build(vectors, kind="hnsw", threads=1, gpus=pool_of(device))
    assert device.graphs == 1 and plan.recall >= plan.target and not plan.scans
    assert type(index) is faiss().IndexHNSWSQ and sorted(order) == list(range(COUNT))
    _, positions = Searcher(index, plan, CHEAP_STEPS).search(vectors.astype(np.float32), 1)
    assert np.mean(order[positions[:, 0]] == np.arange(COUNT)) > 0.98


def test_the_recall_that_gpus_measure_is_that_of_the_cpu() -> None:
    device = FakeDevice()
    device.build_graph = lambda vectors, links: None  # type: ignore[method-assign]
    for kind in KINDS:
        assert build(shop_vectors()[0], kind=kind, gpus=pool_of(device), threads=1).plan == build_shop(kind).plan
    assert 2 * DEFAULT.depths[-1] + 32 in device.searches


class Unlinked(FakeDevice):
    """GPUs whose graphs have no links."""

    def build_graph(self, vectors: Any, links: int) -> Any:
        graph = super().build_graph(vectors, links)
        neighbors = graph.hnsw.neighbors
        faiss().rev_swig_ptr(neighbors.data(), neighbors.size())[:] = self.link
        return graph

    link = -1


class LinkedToNothing(Unlinked):
    link = COUNT


class Broken(Unlinked):
    def build_graph(self, vectors: Any, links: int) -> Any:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Unlinked(), "no effort reaches the recall with the graph that the GPU has built"),
        (LinkedToNothing(), "the GPU returned a graph with links to vectors that do not exist"),
        (Broken(), "out of memory"),
    ],
)
def test_a_graph_that_is_wrong_is_built_again_on_the_cpu(
    device: FakeDevice, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = FaissSettings(scan_cost=0)  # no effort beyond the listed ones
    _, plan, _ = build(shop_vectors()[0], kind="hnsw", settings=settings, threads=1, gpus=pool_of(device))
    assert plan.recall >= plan.target and not plan.scans
    assert caplog.messages[-1] == f"vectors are compared on the CPU: {reason}"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "exit code -6"),
        ("raise ValueError('no kernel image')", "ValueError: no kernel image"),
        ("import time; time.sleep(60)", "did not end within 1 seconds"),
    ],
)
def test_a_check_that_crashes_fails_or_hangs_ends_only_its_own_process(code: str, reason: str) -> None:
    with pytest.raises(GpuError, match=reason):
        run_check([sys.executable, "-c", code], seconds=1)
    run_check([sys.executable, "-c", ""])


@pytest.mark.skipif(hasattr(faiss(), "StandardGpuResources"), reason="FAISS for GPUs is installed")
def test_without_faiss_for_gpus_there_is_nothing_to_warn_about(caplog: pytest.LogCaptureFixture) -> None:
    pool = GpuPool(find_device)
    assert pool.device() is None and not pool.problem and not caplog.messages
