"""Retrieval metrics on arrays: how well queries find the other photos of their class in a gallery."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import LookalikeError
from index.evaluation.ranking import Ints, RetrievalProtocol, relevant_ranks

QueryMetrics = dict[str, NDArray[np.float64]]
"""Of every figure one value for each query, as shares from 0 to 1."""

KS = (1, 2, 4, 8)


def retrieval_metrics(
    vectors: NDArray[np.floating[Any]],
    labels: Iterable[Hashable],
    ks: Sequence[int] = KS,
    *,
    is_query: ArrayLike | None = None,
    is_gallery: ArrayLike | None = None,
) -> dict[str, float]:
    """Recall@K, MAP@R, R-precision and mAP by cosine, as shares; by default each searches among all the others."""
    return mean_metrics(query_metrics(vectors, RetrievalProtocol.from_labels(labels, is_query, is_gallery), ks))


def query_metrics(
    vectors: NDArray[np.floating[Any]], protocol: RetrievalProtocol, ks: Sequence[int] = KS
) -> QueryMetrics:
    """The figures of each query by exact cosine scores; itself is left out, equal scores rank by position."""
    if len(vectors) != len(protocol.classes):
        raise ValueError(f"{len(vectors)} vectors but {len(protocol.classes)} labels")
    rank = relevant_ranks(unit_vectors(vectors), protocol)
    row = np.repeat(np.arange(len(protocol.queries)), protocol.relevant)
    figures = _figures(row, rank, protocol.relevant, ks)
    return figures | {"map": _mean_precision(row, rank, protocol.relevant)}


def metrics_from_results(nearest: Ints, protocol: RetrievalProtocol, ks: Sequence[int] = KS) -> QueryMetrics:
    """The figures of each query from what a search answered: positions, the best first, -1 where there was no more.

    The lists must hold the query itself or one more than the largest K and R; mAP would need the whole gallery.
    """
    keep = (nearest >= 0) & (nearest != protocol.queries[:, None])
    right = keep & (protocol.classes[nearest] == protocol.classes[protocol.queries][:, None])
    row, place = np.nonzero(right)
    return _figures(row, np.cumsum(keep, axis=1)[row, place], protocol.relevant, ks)


def mean_metrics(figures: QueryMetrics) -> dict[str, float]:
    """The figures over all queries."""
    return {name: float(values.mean()) for name, values in figures.items()}


def confidence_intervals(
    figures: QueryMetrics, rounds: int, *, level: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bootstrap confidence intervals of the means: how they move when the queries are drawn again, with return."""
    table = np.stack(list(figures.values()))
    rng = np.random.default_rng(seed)
    count = table.shape[1]
    draws = [table @ np.bincount(rng.integers(count, size=count), minlength=count) / count for _ in range(rounds)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {name: (float(low[place]), float(high[place])) for place, name in enumerate(figures)}


def unit_vectors(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """The vectors in float32 at length 1; those without a direction are refused, since nothing compares with them."""
    vectors = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise LookalikeError(
            f"{len(bad)} vectors are zero or not finite, the first at position {bad[0]}.",
            "Check the model: it gives no usable embedding for these photos.",
        )
    unit: NDArray[np.float32] = vectors / lengths
    return unit


def _figures(row: Ints, rank: Ints, relevant: Ints, ks: Sequence[int]) -> QueryMetrics:
    """Of each query, from the ranks of its right answers; for MAP@R and R-precision those up to R count."""
    rows = len(relevant)
    figures: QueryMetrics = {f"recall@{k}": np.minimum(np.bincount(row[rank <= k], minlength=rows), 1.0) for k in ks}
    within = rank <= relevant[row]
    figures["map@r"] = _mean_precision(row[within], rank[within], relevant)
    figures["r_precision"] = np.bincount(row[within], minlength=rows) / relevant
    return figures


def _mean_precision(row: Ints, rank: Ints, relevant: Ints) -> NDArray[np.float64]:
    """The precision at each of a query's right answers, summed over those given, divided by all there are."""
    counts = np.bincount(row, minlength=len(relevant))
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return np.bincount(row, number / rank, minlength=len(relevant)) / relevant
