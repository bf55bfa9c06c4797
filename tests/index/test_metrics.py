"""Recall@K and MAP@R against a slow reference in plain loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from index.errors import LookalikeError
from index.metrics import retrieval_metrics


def slow_metrics(
    vectors: NDArray[np.float32], labels: list[str], ks: list[int], is_query: list[bool], is_gallery: list[bool]
) -> dict[str, float]:
    found: dict[int, list[bool]] = {k: [] for k in ks}
    precisions = []
    for query, label in enumerate(labels):
        others = [other for other in range(len(labels)) if other != query and is_gallery[other]]
        relevant = sum(labels[other] == label for other in others)
        if not relevant or not is_query[query]:
            continue
        ranked = sorted(others, key=lambda other: (-float(vectors[query] @ vectors[other]), other))
        right = [labels[other] == label for other in ranked]
        for k in ks:
            found[k].append(any(right[:k]))
        hits = 0
        total = 0.0
        for rank in range(1, relevant + 1):
            if right[rank - 1]:
                hits += 1
                total += hits / rank
        precisions.append(total / relevant)
    return {f"recall@{k}": float(np.mean(found[k])) for k in ks} | {"map@r": float(np.mean(precisions))}


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(4, 40), classes=st.integers(1, 12), against_itself=st.booleans())
def test_metrics_equal_the_slow_reference(seed: int, count: int, classes: int, against_itself: bool) -> None:
    rng = np.random.default_rng(seed)
    labels = [f"class {number}" for number in rng.integers(classes, size=count)]
    labels[1] = labels[0]
    # Axis-aligned unit vectors: many exact ties and duplicates, where careless rankings go wrong.
    vectors = np.eye(6, dtype=np.float32)[rng.integers(6, size=count)]
    roles = rng.random((2, count)) < (1 if against_itself else 0.6)
    roles[0, 0] = roles[1, 1] = True
    is_query, is_gallery = roles.tolist()
    expected = slow_metrics(vectors, labels, [1, 2, 4], is_query, is_gallery)
    got = retrieval_metrics(vectors, labels, (1, 2, 4), is_query=is_query, is_gallery=is_gallery)
    assert got == pytest.approx(expected)
    if against_itself:
        assert retrieval_metrics(vectors, labels, (1, 2, 4)) == got


def test_vectors_of_any_length_are_compared_by_cosine() -> None:
    vectors = np.array([[1, 0], [9, 0.1], [0, 2], [0.1, 0.5]], np.float32)
    assert retrieval_metrics(vectors, [1, 1, 2, 2])["recall@1"] == 1


def test_a_duplicate_of_the_query_is_an_answer_like_any_other() -> None:
    vectors = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    assert retrieval_metrics(vectors, ["a", "a", "b", "b"], (1,))["recall@1"] == 1
    assert retrieval_metrics(vectors, ["a", "b", "a", "b"], (1,))["recall@1"] == 0


def test_a_set_without_pairs_is_refused() -> None:
    with pytest.raises(LookalikeError, match="No query has a right answer"):
        retrieval_metrics(np.eye(3, dtype=np.float32), ["a", "b", "c"])
