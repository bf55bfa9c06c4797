"""Retrieval metrics on exact ranks."""

from index.evaluation.metrics import (
    KS,
    QueryMetrics,
    confidence_intervals,
    mean_metrics,
    metrics_from_results,
    query_metrics,
    retrieval_metrics,
    unit_vectors,
)
from index.evaluation.ranking import RankingSettings, RetrievalProtocol

__all__ = [
    "KS",
    "QueryMetrics",
    "RankingSettings",
    "RetrievalProtocol",
    "confidence_intervals",
    "mean_metrics",
    "metrics_from_results",
    "query_metrics",
    "retrieval_metrics",
    "unit_vectors",
]
