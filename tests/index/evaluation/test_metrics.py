"""Tests of retrieval metrics: labels, vectors, result lists and confidence intervals."""

import numpy as np
import pytest

from index.errors import LookalikeError
from index.evaluation.metrics import (
    confidence_intervals,
    mean_metrics,
    metrics_from_results,
    query_metrics,
    retrieval_metrics,
)
from index.evaluation.ranking import RetrievalProtocol
from tests.index.evaluation.reference import clusters


def test_labels_may_be_huge_numbers_or_strings() -> None:
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


def test_duplicate_of_the_query_is_a_result_like_any_other() -> None:
    vectors = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    assert retrieval_metrics(vectors, ["a", "a", "b", "b"], (1,))["recall@1"] == 1
    assert retrieval_metrics(vectors, ["a", "b", "a", "b"], (1,))["recall@1"] == 0


def test_queries_without_a_relevant_photo_do_not_count() -> None:
    protocol = RetrievalProtocol.from_labels(["a", "b", "a", "c"], is_query=[True, True, False, True])
    assert mean_metrics(query_metrics(np.eye(4, dtype=np.float32), protocol, (1,)))["recall@1"] == 0


@pytest.mark.parametrize("value", [0, np.nan, np.inf])
def test_vectors_that_are_zero_or_not_finite_are_refused(value: float) -> None:
    vectors = np.eye(3, dtype=np.float32)
    vectors[2] = value
    with pytest.raises(LookalikeError, match="the first at position 2"):
        retrieval_metrics(vectors, ["a", "a", "a"])


def test_result_lists_have_the_metrics_of_the_exact_search_that_made_them() -> None:
    vectors, labels = clusters(4, 200, 20)
    protocol = RetrievalProtocol.from_labels(labels)
    expected = mean_metrics(query_metrics(vectors, protocol))
    del expected["map"]
    nearest = np.argsort(-(vectors[protocol.queries] @ vectors.T), axis=1, kind="stable")[:, :30]
    assert mean_metrics(metrics_from_results(nearest, protocol)) == pytest.approx(expected)
    padded = np.concatenate([nearest, np.full_like(nearest, -1)], axis=1)
    assert mean_metrics(metrics_from_results(padded, protocol)) == pytest.approx(expected)


def test_intervals_contain_the_mean_and_narrow_with_more_queries() -> None:
    widths = []
    for count in (200, 1600):
        vectors, labels = clusters(5, count, count // 8)
        metrics = query_metrics(vectors, RetrievalProtocol.from_labels(labels))
        intervals = confidence_intervals(metrics, 300)
        assert intervals == confidence_intervals(metrics, 300), "the seed is fixed"
        assert all(intervals[name][0] <= mean <= intervals[name][1] for name, mean in mean_metrics(metrics).items())
        low, high = intervals["recall@1"]
        widths.append(high - low)
    assert 0 < widths[1] < widths[0]
