"""Ranks through PyTorch: equal to those of the CPU, and not used when they are not."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from index.evaluation.metrics import query_metrics, unit_vectors
from index.evaluation.ranking import RetrievalProtocol, relevant_ranks
from training.gpu_ranking import CheckedRanker, find_ranker, torch_ranks

CPU = torch.device("cpu")


def make_protocol(kind: str, count: int) -> RetrievalProtocol:
    random = np.random.default_rng(1)
    labels = random.integers(count // 6, size=count)
    queries = np.ones(count, bool) if kind == "itself" else random.random(count) < 0.3
    gallery = np.ones(count, bool) if kind != "apart" else ~queries
    return RetrievalProtocol.from_labels(labels, queries, gallery)


def whole_numbers(count: int) -> NDArray[np.float32]:
    """Vectors whose scores are exact in any order of summation, many of them equal, and some zero."""
    return np.random.default_rng(2).integers(-2, 3, (count, 5)).astype(np.float32)


def clustered(count: int) -> NDArray[np.float32]:
    random = np.random.default_rng(3)
    vectors = random.standard_normal((20, 32))[random.integers(20, size=count)] + random.standard_normal((count, 32))
    vectors[::7] = vectors[0]  # duplicates
    return unit_vectors(vectors)


@pytest.mark.parametrize("kind", ["itself", "some", "apart"])
@pytest.mark.parametrize("make", [whole_numbers, clustered])
@pytest.mark.parametrize("max_scores", [1, 10_000, 2**24])
def test_the_ranks_are_those_of_the_cpu(kind: str, make: Any, max_scores: int) -> None:
    unit, protocol = make(300), make_protocol(kind, 300)
    assert np.array_equal(torch_ranks(unit, protocol, CPU, max_scores), relevant_ranks(unit, protocol))


def test_the_figures_are_those_of_the_cpu_and_the_precision_of_training_is_kept() -> None:
    unit, protocol = clustered(300), make_protocol("itself", 300)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        ranker = CheckedRanker(lambda unit, protocol: torch_ranks(unit, protocol, CPU))
        figures, expected = query_metrics(unit, protocol, ranker=ranker), query_metrics(unit, protocol)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(np.array_equal(figures[name], expected[name]) for name in expected)


def off_by_one(unit: NDArray[np.float32], protocol: RetrievalProtocol) -> NDArray[np.int64]:
    ranks = relevant_ranks(unit, protocol)
    ranks[5] += 1
    return ranks


def without_memory(unit: NDArray[np.float32], protocol: RetrievalProtocol) -> NDArray[np.int64]:
    if len(unit) > 64:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
    return relevant_ranks(unit, protocol)


@pytest.mark.parametrize(
    ("ranker", "reason"),
    [(off_by_one, "the GPU ranks a small job differently than the CPU"), (without_memory, "CUDA out of memory")],
)
def test_a_gpu_that_ranks_wrongly_or_fails_is_replaced_by_the_cpu(
    ranker: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    checked = CheckedRanker(ranker)
    unit, protocol = clustered(300), make_protocol("apart", 300)
    for _ in range(2):
        assert np.array_equal(checked(unit, protocol), relevant_ranks(unit, protocol))
    assert caplog.messages == [f"figures are computed on the CPU: {reason}"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_cpu_ranks() -> None:
    assert find_ranker() is relevant_ranks
