"""Retrieval metrics in plain loops, slow but plainly right, and vectors to measure."""

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
OTHERS = ("map@r", "r_precision", "map")


def slow_metrics(
    vectors: Vectors, labels: list[str], ks: list[int], is_query: list[bool], is_gallery: list[bool]
) -> dict[str, float]:
    """Returns the mean metrics by sorting the whole gallery for each query, in float64."""
    exact = vectors.astype(np.float64)
    metrics: dict[str, list[float]] = {name: [] for name in [*(f"recall@{k}" for k in ks), *OTHERS]}
    for query, label in enumerate(labels):
        others = [other for other in range(len(labels)) if other != query and is_gallery[other]]
        relevant = sum(labels[other] == label for other in others)
        if not relevant or not is_query[query]:
            continue
        ranked = sorted(others, key=lambda other: (-float(np.sum(exact[query] * exact[other])), other))
        correct = [labels[other] == label for other in ranked]
        for k in ks:
            metrics[f"recall@{k}"].append(any(correct[:k]))
        precisions = {rank: sum(correct[:rank]) / rank for rank in range(1, len(correct) + 1) if correct[rank - 1]}
        within = {rank: precision for rank, precision in precisions.items() if rank <= relevant}
        metrics["map@r"].append(sum(within.values()) / relevant)
        metrics["r_precision"].append(len(within) / relevant)
        metrics["map"].append(sum(precisions.values()) / relevant)
    return {name: float(np.mean(values)) for name, values in metrics.items()}


def clusters(seed: int, count: int, classes: int, size: int = 16) -> tuple[Vectors, NDArray[np.int64]]:
    """Returns unit vectors around the centres of their classes, in random order, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=count)
    vectors = rng.standard_normal((classes, size))[labels] + 1.5 * rng.standard_normal((count, size))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels
