"""Retrieval metrics on arrays: Recall@K and MAP@R of a set against itself."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from index.errors import LookalikeError

_BLOCK = 1024


def retrieval_metrics(
    vectors: NDArray[np.float32], labels: ArrayLike, ks: Sequence[int] = (1, 2, 4, 8)
) -> dict[str, float]:
    """Recall@K and MAP@R by cosine, each vector a query against all the others, as shares from 0 to 1.

    A query never finds itself: it is left out by its position, so that duplicates stay right. Queries whose
    class has no other image have no right answer and are left out. Equal scores rank by position.
    """
    _, classes, sizes = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    if len(classes) != len(vectors):
        raise ValueError(f"{len(vectors)} vectors but {len(classes)} labels")
    queries = np.flatnonzero(sizes[classes] > 1)
    if not len(queries):
        raise LookalikeError("No class has two images, so nothing can be found.", "Give more photos of a product.")
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    depth = min(len(vectors) - 1, max(*ks, int(sizes.max()) - 1))
    recall = np.zeros(len(ks))
    average_precision = 0.0
    ranks = np.arange(1, depth + 1)
    for start in range(0, len(queries), _BLOCK):
        block = queries[start : start + _BLOCK]
        scores = unit[block] @ unit.T
        scores[np.arange(len(block)), block] = -np.inf
        nearest = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
        right = classes[nearest] == classes[block][:, None]
        recall += [right[:, :k].any(axis=1).sum() for k in ks]
        relevant = sizes[classes[block]] - 1
        within = right & (ranks <= relevant[:, None])
        precision = np.cumsum(within, axis=1) / ranks
        average_precision += float(((precision * within).sum(axis=1) / relevant).sum())
    metrics = {f"recall@{k}": float(found) / len(queries) for k, found in zip(ks, recall, strict=True)}
    return {**metrics, "map@r": average_precision / len(queries)}
