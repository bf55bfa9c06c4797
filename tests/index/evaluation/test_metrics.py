"""The figures against a slow reference in plain loops and against pytorch-metric-learning, in odd cases too."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

import index.evaluation.ranking
from index.errors import LookalikeError
from index.evaluation.metrics import (
    confidence_intervals,
    mean_metrics,
    metrics_from_results,
    query_metrics,
    retrieval_metrics,
)
from index.evaluation.ranking import RetrievalProtocol

Vectors = NDArray[np.float32]
OTHERS = ("map@r", "r_precision", "map")


def slow_metrics(
    vectors: Vectors, labels: list[str], ks: list[int], is_query: list[bool], is_gallery: list[bool]
) -> dict[str, float]:
    exact = vectors.astype(np.float64)
    figures: dict[str, list[float]] = {name: [] for name in [*(f"recall@{k}" for k in ks), *OTHERS]}
    for query, label in enumerate(labels):
        others = [other for other in range(len(labels)) if other != query and is_gallery[other]]
        relevant = sum(labels[other] == label for other in others)
        if not relevant or not is_query[query]:
            continue
        ranked = sorted(others, key=lambda other: (-float(np.sum(exact[query] * exact[other])), other))
        right = [labels[other] == label for other in ranked]
        for k in ks:
            figures[f"recall@{k}"].append(any(right[:k]))
        precisions = {rank: sum(right[:rank]) / rank for rank in range(1, len(right) + 1) if right[rank - 1]}
        within = {rank: precision for rank, precision in precisions.items() if rank <= relevant}
        figures["map@r"].append(sum(within.values()) / relevant)
        figures["r_precision"].append(len(within) / relevant)
        figures["map"].append(sum(precisions.values()) / relevant)
    return {name: float(np.mean(values)) for name, values in figures.items()}


def clusters(seed: int, count: int, classes: int, size: int = 16) -> tuple[Vectors, NDArray[np.int64]]:
    """Unit vectors around their classes' centres, in any order."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count)
    vectors = rng.standard_normal((classes, size))[labels] + 1.5 * rng.standard_normal((count, size))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.fixture(params=["counting", "sorting"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of ranking, whatever the number of right answers."""
    monkeypatch.setattr(index.evaluation.ranking, "_FEW", 40 if request.param == "counting" else 0)
    return str(request.param)


@pytest.mark.parametrize("few", [0, 13])
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(4, 50), classes=st.integers(1, 12), against_itself=st.booleans())
def test_metrics_equal_the_slow_reference(few: int, seed: int, count: int, classes: int, against_itself: bool) -> None:
    rng = np.random.default_rng(seed)
    labels = [f"class {number}" for number in rng.integers(classes, size=count)]
    labels[1] = labels[0]
    # Axis-aligned unit vectors: many exact ties and duplicates, where careless rankings go wrong.
    vectors = np.concatenate([np.eye(6, dtype=np.float32), -np.eye(6, dtype=np.float32)])[rng.integers(12, size=count)]
    roles = rng.random((2, count)) < (1 if against_itself else 0.6)
    roles[0, 0] = roles[1, 1] = True
    is_query, is_gallery = roles.tolist()
    expected = slow_metrics(vectors, labels, [1, 2, 4], is_query, is_gallery)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_FEW": few, "_SIDE": 14, "_PART": 5}.items():
            patch.setattr(index.evaluation.ranking, name, value)
        got = retrieval_metrics(vectors, labels, (1, 2, 4), is_query=is_query, is_gallery=is_gallery)
        assert got == pytest.approx(expected)
        if against_itself:
            assert retrieval_metrics(vectors, labels, (1, 2, 4)) == got


@pytest.mark.parametrize("split", [False, True])
def test_metrics_equal_those_of_pytorch_metric_learning(way: str, split: bool) -> None:
    vectors, labels = clusters(1, 400, 25)
    is_query = np.arange(400) % 3 == 0 if split else np.ones(400, bool)
    is_gallery = ~is_query if split else is_query
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision", "mean_average_precision")
    query, known = torch.from_numpy(vectors[is_query]), torch.from_numpy(vectors[is_gallery])
    sides = (query, torch.from_numpy(labels[is_query]), known, torch.from_numpy(labels[is_gallery]))
    theirs = AccuracyCalculator(include=names, k=None).get_accuracy(*sides, ref_includes_query=not split)
    ours = retrieval_metrics(vectors, labels, (1,), is_query=is_query, is_gallery=is_gallery)
    assert list(ours.values()) == pytest.approx([theirs[name] for name in names], abs=1e-9)


@pytest.mark.parametrize("side", [50, 1020])
def test_equal_vectors_rank_by_position_wherever_they_lie(way: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS rounds a product by its place in the matrix: copies of a vector would get scores of their own."""
    monkeypatch.setattr(index.evaluation.ranking, "_SIDE", side)
    pool, _ = clusters(6, 20, 4, size=37)
    rng = np.random.default_rng(6)
    vectors = pool[rng.integers(20, size=203)]
    labels = [str(number) for number in rng.integers(30, size=203)]
    everyone = [True] * 203
    expected = slow_metrics(vectors, labels, [1, 2, 4, 8], everyone, everyone)
    assert retrieval_metrics(vectors, labels) == pytest.approx(expected)


def test_blocks_and_parts_do_not_change_the_figures(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, labels = clusters(2, 300, 30)
    whole = query_metrics(vectors, RetrievalProtocol.from_labels(labels))
    for name, value in {"_HELD": 300 * 7, "_PART": 13, "_SIDE": 50}.items():
        monkeypatch.setattr(index.evaluation.ranking, name, value)
    parted = query_metrics(vectors, RetrievalProtocol.from_labels(labels))
    assert all(np.array_equal(whole[name], parted[name]) for name in whole)


def test_labels_may_be_huge_numbers_or_text() -> None:
    vectors, labels = clusters(3, 60, 9)
    expected = retrieval_metrics(vectors, labels)
    for same in (
        2**60 + labels,
        [2**63 + int(label) for label in labels],
        [-1 if label == 0 else 2**70 + int(label) for label in labels],
        [f"item {label}" for label in labels],
    ):
        assert retrieval_metrics(vectors, same) == expected


def test_vectors_of_any_length_are_compared_by_cosine() -> None:
    vectors = np.array([[1, 0], [9, 0.1], [0, 2], [0.1, 0.5]], np.float32)
    assert retrieval_metrics(vectors, [1, 1, 2, 2])["recall@1"] == 1


def test_a_duplicate_of_the_query_is_an_answer_like_any_other() -> None:
    vectors = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    assert retrieval_metrics(vectors, ["a", "a", "b", "b"], (1,))["recall@1"] == 1
    assert retrieval_metrics(vectors, ["a", "b", "a", "b"], (1,))["recall@1"] == 0


def test_lone_queries_are_counted_and_left_out() -> None:
    protocol = RetrievalProtocol.from_labels(["a", "b", "a", "c"], is_query=[True, True, False, True])
    assert protocol.queries.tolist() == [0] and protocol.unanswerable == 2
    assert mean_metrics(query_metrics(np.eye(4, dtype=np.float32), protocol, (1,)))["recall@1"] == 0


def test_a_set_without_pairs_is_refused() -> None:
    with pytest.raises(LookalikeError, match="No query has a right answer"):
        retrieval_metrics(np.eye(3, dtype=np.float32), ["a", "b", "c"])


@pytest.mark.parametrize("value", [0, np.nan, np.inf])
def test_vectors_without_a_direction_are_refused(value: float) -> None:
    vectors = np.eye(3, dtype=np.float32)
    vectors[2] = value
    with pytest.raises(LookalikeError, match="the first at position 2"):
        retrieval_metrics(vectors, ["a", "a", "a"])


def test_lists_of_answers_measure_as_the_exact_search_that_made_them() -> None:
    vectors, labels = clusters(4, 200, 20)
    protocol = RetrievalProtocol.from_labels(labels)
    expected = mean_metrics(query_metrics(vectors, protocol))
    del expected["map"]
    nearest = np.argsort(-(vectors[protocol.queries] @ vectors.T), axis=1, kind="stable")[:, :30]
    assert mean_metrics(metrics_from_results(nearest, protocol)) == pytest.approx(expected)
    unfilled = np.concatenate([nearest, np.full_like(nearest, -1)], axis=1)
    assert mean_metrics(metrics_from_results(unfilled, protocol)) == pytest.approx(expected)


def test_intervals_hold_the_estimate_and_narrow_with_more_queries() -> None:
    widths = []
    for count in (200, 1600):
        vectors, labels = clusters(5, count, count // 8)
        figures = query_metrics(vectors, RetrievalProtocol.from_labels(labels))
        found = confidence_intervals(figures, 300)
        assert found == confidence_intervals(figures, 300), "the seed is fixed"
        assert all(found[name][0] <= value <= found[name][1] for name, value in mean_metrics(figures).items())
        widths.append(found["recall@1"][1] - found["recall@1"][0])
    assert 0 < widths[1] < widths[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
@pytest.mark.parametrize(("photos", "classes"), [(12_000, 2_000), (7_000, 40)])
def test_memory_stays_bounded(photos: int, classes: int) -> None:
    """By either way of ranking, only a part of all scores is held at a time."""
    script = f"""
import index.evaluation.ranking, numpy as np
from pathlib import Path
from index.evaluation.metrics import retrieval_metrics

def peak() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))

vectors = np.random.default_rng(0).standard_normal(({photos}, 32)).astype(np.float32)
labels = np.arange({photos}) % {classes}
retrieval_metrics(vectors[:900], labels[:900] % 300)
index.evaluation.ranking._HELD = 2**22
before = peak()
retrieval_metrics(vectors, labels)
print((peak() - before) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 0.7 * 4 * photos**2
