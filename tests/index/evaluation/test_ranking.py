"""Tests of exact ranks: both rankers against slow references, in blocks of any size and in bounded memory."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from index.errors import LookalikeError
from index.evaluation.metrics import query_metrics, retrieval_metrics
from index.evaluation.ranking import RankingSettings, RetrievalProtocol, relevant_ranks
from tests.index.evaluation.reference import clusters, slow_metrics

COUNTING, SORTING = RankingSettings(max_counted=40), RankingSettings(max_counted=0)
both_rankers = pytest.mark.parametrize("ranking", [COUNTING, SORTING], ids=["counting", "sorting"])


@both_rankers
def test_ranks_are_those_of_a_stable_sort(ranking: RankingSettings) -> None:
    rng = np.random.default_rng(7)
    vectors = rng.integers(-3, 4, (300, 8)).astype(np.float32)  # small integers: exact scores, many ties
    labels = rng.integers(30, size=300)
    protocol = RetrievalProtocol.from_labels(labels)
    expected = []
    for query in protocol.queries:
        others = np.delete(np.arange(300), query)
        ranked = others[np.argsort(-(vectors[others] @ vectors[query]), kind="stable")]
        expected += (np.flatnonzero(labels[ranked] == labels[query]) + 1).tolist()
    assert relevant_ranks(vectors, protocol, ranking).tolist() == expected


@pytest.mark.parametrize("max_counted", [0, 13])
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(4, 50), classes=st.integers(1, 12), against_itself=st.booleans())
def test_metrics_equal_the_slow_reference(
    max_counted: int, seed: int, count: int, classes: int, against_itself: bool
) -> None:
    rng = np.random.default_rng(seed)
    labels = [f"class {number}" for number in rng.integers(classes, size=count)]
    labels[1] = labels[0]
    # Axis-aligned unit vectors: many exact ties and duplicates, where careless rankings fail.
    vectors = np.concatenate([np.eye(6, dtype=np.float32), -np.eye(6, dtype=np.float32)])[rng.integers(12, size=count)]
    roles = rng.random((2, count)) < (1 if against_itself else 0.6)
    roles[0, 0] = roles[1, 1] = True
    is_query, is_gallery = roles.tolist()
    expected = slow_metrics(vectors, labels, [1, 2, 4], is_query, is_gallery)
    ranking = RankingSettings(max_counted=max_counted, block_rows=14, strip_rows=5)
    metrics = retrieval_metrics(vectors, labels, (1, 2, 4), is_query=is_query, is_gallery=is_gallery, ranking=ranking)
    assert metrics == pytest.approx(expected)
    if against_itself:
        assert retrieval_metrics(vectors, labels, (1, 2, 4), ranking=ranking) == metrics


@both_rankers
@pytest.mark.parametrize("split", [False, True])
def test_metrics_equal_those_of_pytorch_metric_learning(ranking: RankingSettings, split: bool) -> None:
    vectors, labels = clusters(1, 400, 25)
    is_query = np.arange(400) % 3 == 0 if split else np.ones(400, bool)
    is_gallery = ~is_query if split else is_query
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision", "mean_average_precision")
    query, known = torch.from_numpy(vectors[is_query]), torch.from_numpy(vectors[is_gallery])
    sides = (query, torch.from_numpy(labels[is_query]), known, torch.from_numpy(labels[is_gallery]))
    theirs = AccuracyCalculator(include=names, k=None).get_accuracy(*sides, ref_includes_query=not split)
    ours = retrieval_metrics(vectors, labels, (1,), is_query=is_query, is_gallery=is_gallery, ranking=ranking)
    assert list(ours.values()) == pytest.approx([theirs[name] for name in names], abs=1e-9)


@both_rankers
@pytest.mark.parametrize("block_rows", [50, 1020])
def test_equal_vectors_rank_by_position(ranking: RankingSettings, block_rows: int) -> None:
    """BLAS rounds a product by its position in the matrix: without care, duplicates would have different scores."""
    distinct, _ = clusters(6, 20, 4, size=37)
    rng = np.random.default_rng(6)
    vectors = distinct[rng.integers(20, size=203)]
    labels = [str(number) for number in rng.integers(30, size=203)]
    everyone = [True] * 203
    expected = slow_metrics(vectors, labels, [1, 2, 4, 8], everyone, everyone)
    metrics = retrieval_metrics(vectors, labels, ranking=replace(ranking, block_rows=block_rows))
    assert metrics == pytest.approx(expected)


@both_rankers
def test_block_sizes_do_not_change_the_metrics(ranking: RankingSettings) -> None:
    vectors, labels = clusters(2, 300, 30)
    protocol = RetrievalProtocol.from_labels(labels)
    expected = query_metrics(vectors, protocol, ranking=ranking)
    small = replace(ranking, max_scores=300 * 7, strip_rows=13, block_rows=50)
    metrics = query_metrics(vectors, protocol, ranking=small)
    assert all(np.array_equal(expected[name], metrics[name]) for name in expected)


def test_queries_without_a_relevant_photo_are_counted_and_left_out() -> None:
    protocol = RetrievalProtocol.from_labels(["a", "b", "a", "c"], is_query=[True, True, False, True])
    assert protocol.queries.tolist() == [0] and protocol.unanswerable == 2
    assert protocol.relevant.tolist() == [1]
    assert not protocol.is_self_retrieval


def test_set_without_pairs_is_refused() -> None:
    with pytest.raises(LookalikeError, match="No query has a relevant photo"):
        RetrievalProtocol.from_labels(["a", "b", "c"])


def test_roles_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 labels, but roles of 2 and 3 photos"):
        RetrievalProtocol.from_labels(["a", "a", "b"], is_query=[True, True])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("photos", "classes"), [(12_000, 2_000), (7_000, 40)])
def test_memory_is_bounded(photos: int, classes: int) -> None:
    """Both rankers hold only a part of all scores at a time."""
    script = f"""
import numpy as np
from pathlib import Path
from index.evaluation.metrics import retrieval_metrics
from index.evaluation.ranking import RankingSettings

def peak() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))

vectors = np.random.default_rng(0).standard_normal(({photos}, 32)).astype(np.float32)
labels = np.arange({photos}) % {classes}
retrieval_metrics(vectors[:900], labels[:900] % 300)
before = peak()
retrieval_metrics(vectors, labels, ranking=RankingSettings(max_scores=2**22))
print((peak() - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 0.7 * 4 * photos**2
