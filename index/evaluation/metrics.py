"""Retrieval metrics: how well queries find the other photos of their class in a gallery."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import LookalikeError
from index.evaluation.ranking import DEFAULT_RANKING, Ints, Ranker, RankingSettings, RetrievalProtocol, relevant_ranks

QueryMetrics = dict[str, NDArray[np.float64]]
"""The values of each metric, one per query, as shares from 0 to 1."""

KS = (1, 2, 4, 8)


def retrieval_metrics(
    vectors: NDArray[np.floating[Any]],
    labels: Iterable[Hashable],
    ks: Sequence[int] = KS,
    *,
    is_query: ArrayLike | None = None,
    is_gallery: ArrayLike | None = None,
    ranking: RankingSettings = DEFAULT_RANKING,
) -> dict[str, float]:
    """Returns Recall@K, MAP@R, R-precision and mAP by cosine, as shares.

    By default each photo searches among all the others.
    """
    protocol = RetrievalProtocol.from_labels(labels, is_query, is_gallery)
    return mean_metrics(query_metrics(vectors, protocol, ks, ranking))


def query_metrics(
    vectors: NDArray[np.floating[Any]],
    protocol: RetrievalProtocol,
    ks: Sequence[int] = KS,
    ranking: RankingSettings = DEFAULT_RANKING,
    ranker: Ranker | None = None,
) -> QueryMetrics:
    """Returns the metrics of each query by exact cosine; a query never finds itself, equal scores rank by position.

    A `ranker` computes the ranks elsewhere than on the CPU.
    """
    if len(vectors) != len(protocol.classes):
        raise ValueError(f"{len(vectors)} vectors but {len(protocol.classes)} labels")
    unit = unit_vectors(vectors)
    rank = ranker(unit, protocol) if ranker else relevant_ranks(unit, protocol, ranking)
    row = np.repeat(np.arange(len(protocol.queries)), protocol.relevant)
    metrics = _metrics_of_ranks(row, rank, protocol.relevant, ks)
    return metrics | {"map": _average_precision(row, rank, protocol.relevant)}


def metrics_from_results(nearest: Ints, protocol: RetrievalProtocol, ks: Sequence[int] = KS) -> QueryMetrics:
    """Returns the metrics of each query from search results: positions, best first, padded with -1.

    A list must be one longer than the largest K and R, or contain the query itself; mAP would need the whole gallery.
    """
    valid = (nearest >= 0) & (nearest != protocol.queries[:, None])
    correct = valid & (protocol.classes[nearest] == protocol.classes[protocol.queries][:, None])
    row, column = np.nonzero(correct)
    return _metrics_of_ranks(row, np.cumsum(valid, axis=1)[row, column], protocol.relevant, ks)


def mean_metrics(metrics: QueryMetrics) -> dict[str, float]:
    """Returns the mean of each metric over all queries."""
    return {name: float(values.mean()) for name, values in metrics.items()}


def confidence_intervals(
    metrics: QueryMetrics, rounds: int, *, level: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Returns bootstrap confidence intervals of the means, over queries resampled with replacement."""
    table = np.stack(list(metrics.values()))
    rng = np.random.default_rng(seed)
    count = table.shape[1]
    draws = [table @ np.bincount(rng.integers(count, size=count), minlength=count) / count for _ in range(rounds)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {name: (float(low[row]), float(high[row])) for row, name in enumerate(metrics)}


def unit_vectors(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Returns the vectors L2-normalised in float32; raises LookalikeError for those that are zero or not finite."""
    vectors = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    invalid = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(invalid):
        raise LookalikeError(
            f"{len(invalid)} vectors are zero or not finite, the first at position {invalid[0]}.",
            "Check the model: it returns no usable vector for these photos.",
        )
    unit: NDArray[np.float32] = vectors / lengths
    return unit


def _metrics_of_ranks(row: Ints, rank: Ints, relevant: Ints, ks: Sequence[int]) -> QueryMetrics:
    """Returns the metrics of each query from the ranks of its relevant results."""
    rows = len(relevant)
    metrics: QueryMetrics = {f"recall@{k}": np.minimum(np.bincount(row[rank <= k], minlength=rows), 1.0) for k in ks}
    within = rank <= relevant[row]
    metrics["map@r"] = _average_precision(row[within], rank[within], relevant)
    metrics["r_precision"] = np.bincount(row[within], minlength=rows) / relevant
    return metrics


def _average_precision(row: Ints, rank: Ints, relevant: Ints) -> NDArray[np.float64]:
    """Returns the precision summed over the given ranks of each query, divided by its number of relevant results."""
    counts = np.bincount(row, minlength=len(relevant))
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    return np.bincount(row, number / rank, minlength=len(relevant)) / relevant
