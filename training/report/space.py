"""The embedding space for the charts: a sample, a map in the plane, similarities ordered by clusters."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

MAX_PHOTOS, MAX_CLASSES = 2_000, 200
"""On a map: more is slow to compute and not clearer."""
MAX_ROWS = 300
"""Of a heat map."""
_MIN_POINTS = 5
Floats = NDArray[np.float32]


def sample_photos(labels: Sequence[str]) -> list[int]:
    """Returns the indices of photos to map: all, or a fixed sample of some classes with equally many photos of each."""
    if len(labels) <= MAX_PHOTOS:
        return list(range(len(labels)))
    draw = np.random.default_rng(0)
    classes, numbers = np.unique(labels, return_inverse=True)
    chosen = draw.permutation(len(classes))[:MAX_CLASSES]
    each = MAX_PHOTOS // len(chosen)
    places = [draw.permutation(np.flatnonzero(numbers == number))[:each] for number in chosen]
    return sorted(np.concatenate(places).tolist())


def map_to_plane(vectors: Floats) -> Floats | None:
    """Returns the t-SNE of the directions inside the unit square, deterministic; None for fewer than 5 points."""
    if len(vectors) < _MIN_POINTS:
        return None
    from sklearn.manifold import TSNE

    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    perplexity = min(30.0, (len(unit) - 1) / 3)
    plane = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
    plane -= plane.min(axis=0)
    plane /= max(plane.max(), 1e-12)
    centred: Floats = plane + (1 - plane.max(axis=0)) / 2
    return centred


class Similarity(NamedTuple):
    """Mean cosines between rows, ordered so that similar rows are next to each other."""

    matrix: Floats
    names: list[str]
    total: int
    """Number of rows before sampling."""

    def between(self) -> Floats:
        """Returns the values of every pair of different rows, once."""
        values: Floats = self.matrix[np.triu_indices(len(self.matrix), 1)]
        return values

    def closest(self) -> tuple[str, str, float]:
        """Returns the most similar pair of different rows."""
        one, other = np.triu_indices(len(self.matrix), 1)
        best = int(self.between().argmax())
        return self.names[one[best]], self.names[other[best]], float(self.between()[best])


def class_similarity(vectors: Floats, labels: Sequence[str]) -> Similarity:
    """Returns the mean cosine of the photos of each two classes, and of the different photos within a class."""
    names, numbers = np.unique(labels, return_inverse=True)
    chosen = _sample_rows(len(names))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    sums = np.zeros((len(names), unit.shape[1]), np.float64)
    np.add.at(sums, numbers, unit)
    sums, counts = sums[chosen], np.bincount(numbers)[chosen]
    # The mean of dot products is the dot product of the means.
    matrix = sums @ sums.T / np.outer(counts, counts)
    with np.errstate(invalid="ignore"):
        own = ((sums**2).sum(axis=1) - counts) / (counts * (counts - 1))
    np.fill_diagonal(matrix, np.where(counts > 1, own, 1))
    return _cluster(matrix, [str(names[number]) for number in chosen], len(names))


def proxy_similarity(proxies: Floats, names: Sequence[str]) -> Similarity:
    """Returns the cosine of each two proxies."""
    chosen = _sample_rows(len(proxies))
    return _cluster(proxies[chosen] @ proxies[chosen].T, [names[number] for number in chosen], len(proxies))


def _sample_rows(total: int) -> NDArray[np.intp]:
    """Returns evenly spread rows, at most as many as a heat map can show."""
    return np.unique(np.linspace(0, total - 1, min(total, MAX_ROWS)).round().astype(np.intp))


def _cluster(matrix: NDArray[np.floating], names: list[str], total: int) -> Similarity:
    order = np.arange(len(matrix))
    if len(matrix) > 2:
        distances = 1 - matrix
        np.fill_diagonal(distances, 0)
        condensed = squareform(distances.clip(min=0), checks=False)
        order = leaves_list(linkage(condensed, "average", optimal_ordering=True))
    return Similarity(matrix[np.ix_(order, order)].astype(np.float32), [names[place] for place in order], total)
