"""Synthetic vectors in clusters, and an exact search over them in NumPy to measure recall against."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from index.gallery.vectors.faiss.builder import BuildResult, build
from index.gallery.vectors.faiss.searcher import Queries, Vectors
from index.gallery.vectors.faiss.settings import FaissSettings, IndexKind

COUNT, DIMENSION, CLUSTERS = 2500, 32, 20
KINDS: tuple[IndexKind, ...] = ("exact", "hnsw", "ivf")
CHEAP_STEPS = FaissSettings(graph_step_cost=0.5, list_step_cost=0.5)
"""Makes approximate search so cheap that even a small gallery is not scanned exactly."""


@cache
def shop_vectors(count: int = COUNT, seed: int = 0) -> tuple[Vectors, NDArray[np.int64]]:
    """Returns normalised vectors of products in clusters, and the cluster of each."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(9).standard_normal((CLUSTERS, DIMENSION))
    clusters = random.integers(CLUSTERS, size=count)
    vectors = centres[clusters] + 0.7 * random.standard_normal((count, DIMENSION))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16), clusters


def queries_near(rows: NDArray[np.int64], seed: int = 1) -> Queries:
    """Returns normalised queries near the given rows, but equal to none of them."""
    vectors = shop_vectors()[0][rows].astype(np.float32)
    shifted = vectors + 0.1 * np.random.default_rng(seed).standard_normal(vectors.shape).astype(np.float32)
    shifted /= np.linalg.norm(shifted, axis=1, keepdims=True)
    return shifted


@cache
def build_shop(kind: IndexKind) -> BuildResult:
    """Builds an index of the shop once per kind."""
    return build(shop_vectors()[0], kind=kind, threads=1)


def nearest_rows(
    queries: Queries, vectors: Vectors, count: int, allowed: NDArray[np.bool_] | None = None
) -> list[set[int]]:
    """Returns the rows of the nearest vectors of each query, by exact search."""
    scores = queries @ vectors.astype(np.float32).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    best = np.argsort(-scores, axis=1)[:, :count]
    return [{int(row) for row in rows if np.isfinite(scores[query, row])} for query, rows in enumerate(best)]


def recall(positions: NDArray[np.int64], order: NDArray[np.int64], truth: list[set[int]]) -> float:
    """Returns the share of the true rows that are among the found positions."""
    found = [{int(order[position]) for position in row if position >= 0} for row in positions]
    return sum(len(have & want) for have, want in zip(found, truth, strict=True)) / sum(map(len, truth))
