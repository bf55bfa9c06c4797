"""Retrieval metrics on arrays: Recall@K and MAP@R of queries against a gallery, or of a set against itself."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import LookalikeError

_BLOCK = 1024


def retrieval_metrics(
    vectors: NDArray[np.float32],
    labels: ArrayLike,
    ks: Sequence[int] = (1, 2, 4, 8),
    *,
    is_query: ArrayLike | None = None,
    is_gallery: ArrayLike | None = None,
) -> dict[str, float]:
    """Recall@K and MAP@R by cosine, as shares from 0 to 1; by default each vector searches among all the others.

    A query never finds itself: it is left out by its position, so that duplicates stay right. Queries without
    a right answer in the gallery are left out. Equal scores rank by position.
    """
    _, classes = np.unique(np.asarray(labels), return_inverse=True)
    if len(classes) != len(vectors):
        raise ValueError(f"{len(vectors)} vectors but {len(classes)} labels")
    everything = np.ones(len(vectors), bool)
    in_gallery = everything if is_gallery is None else np.asarray(is_gallery, bool)
    gallery = np.flatnonzero(in_gallery)
    sizes = np.bincount(classes[gallery], minlength=classes.max() + 1)
    relevant = sizes[classes] - in_gallery  # of each vector: itself is no answer
    queries = np.flatnonzero((everything if is_query is None else np.asarray(is_query, bool)) & (relevant > 0))
    if not len(queries):
        raise LookalikeError("No query has a right answer to find.", "Give at least two photos of a class.")

    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    depth = min(len(gallery), max(*ks, int(relevant[queries].max())))
    ranks = np.arange(1, depth + 1)
    recall = np.zeros(len(ks))
    average_precision = 0.0
    for start in range(0, len(queries), _BLOCK):
        block = queries[start : start + _BLOCK]
        scores = unit[block] @ unit[gallery].T
        scores[block[:, None] == gallery] = -np.inf
        nearest = gallery[np.argsort(-scores, axis=1, kind="stable")[:, :depth]]
        right = (classes[nearest] == classes[block][:, None]) & (nearest != block[:, None])
        recall += [right[:, :k].any(axis=1).sum() for k in ks]
        within = right & (ranks <= relevant[block][:, None])
        precision = np.cumsum(within, axis=1) / ranks
        average_precision += float(((precision * within).sum(axis=1) / relevant[block]).sum())
    metrics = {f"recall@{k}": float(found) / len(queries) for k, found in zip(ks, recall, strict=True)}
    return {**metrics, "map@r": average_precision / len(queries)}
