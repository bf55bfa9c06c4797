"""GPUs for tests: a stand-in that computes on the CPU, correctly or not."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index._util.imports import faiss
from index.gallery.vectors.faiss.gpu import FaissDevice, GpuPool, Nearest
from index.gallery.vectors.faiss.searcher import Index, Queries, Vectors

GIB = 1 << 30


class FakeDevice(FaissDevice):
    """Two GPUs whose parts are CPU indexes; `distort` changes the positions that a search returns."""

    def __init__(self, distort: Callable[[NDArray[np.int64]], NDArray[np.int64]] = lambda positions: positions) -> None:
        self.name = "Fake GPU, Fake GPU"
        self.distort = distort
        self.free = [8 * GIB, 8 * GIB]
        self.searches: list[int] = []
        """The number of neighbours of each search."""
        self.graphs = 0
        self._count = 2

    def memory(self) -> list[tuple[int, int]]:
        return [(free, 8 * GIB) for free in self.free]

    def load(self, vectors: Vectors) -> Nearest:
        nearest = super().load(vectors)

        def search(queries: Queries, count: int) -> NDArray[np.int64]:
            self.searches.append(count)
            # A GPU rounds the queries too.
            return self.distort(nearest(queries.astype(np.float16).astype(np.float32), count))

        return search

    def _reserve(self) -> None:
        """Reserves nothing."""

    def _empty_part(self, resources: None, number: int, dimension: int) -> Index:
        return faiss().IndexFlat(dimension, faiss().METRIC_INNER_PRODUCT)

    def build_graph(self, vectors: Vectors, links: int) -> Any:
        self.graphs += 1
        graph = faiss().IndexHNSWFlat(vectors.shape[1], links, faiss().METRIC_INNER_PRODUCT)
        graph.add(vectors.astype(np.float32))
        return graph


def pool_of(device: FakeDevice) -> GpuPool:
    """Returns the GPUs of a process that has this device."""
    return GpuPool(lambda: device)
