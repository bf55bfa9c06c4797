"""Compares vectors on GPUs with FAISS, exactly and checked against the CPU.

A GPU only proposes neighbours: their scores are computed on the CPU, as those of every other search, and a search
that cannot prove that it has the best ones is left to the CPU. So a GPU makes searches faster, never different. FAISS
for GPUs ignores selectors silently, so filters are applied to what it returns.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from index._util.cuda import find_gpus
from index._util.imports import faiss
from index.gallery.vectors.faiss.searcher import (
    AllowList,
    Index,
    Queries,
    Results,
    Vectors,
    empty_results,
    exact_index,
    stored_vectors,
    thread_limit,
)
from index.gallery.vectors.faiss.settings import FaissSettings

log = logging.getLogger(__name__)

Nearest = Callable[[Queries, int], NDArray[np.int64]]
"""Returns the positions of the nearest vectors of each query, best first."""

MAX_DEPTH = 2048
"""The most neighbours that FAISS returns from a GPU."""
_SPARE = 32
"""Neighbours beyond twice the requested number that a GPU returns: the last one proves that none is missing."""
_ROUNDING = 2.0**-10
"""Twice the largest error of a score of unit vectors whose query is rounded to half precision."""
_TEMPORARY_BYTES = 256 << 20
"""Memory that FAISS reserves on each GPU for the steps of a search."""
_PART_ROWS = 1 << 18
"""Vectors per allocation on a GPU: they are converted to float32 on the way, in main memory."""
_CHECK_SECONDS = 120.0
_CHECK = f"from {__name__} import FaissDevice, check_device; check_device(FaissDevice())"


class GpuError(Exception):
    """A GPU failed, or returned something else than the CPU."""


class Device(Protocol):
    """The GPUs of a machine. Calls may raise anything. Thread-safe, but not what `load` returns."""

    name: str

    def memory(self) -> list[tuple[int, int]]:
        """Returns the free and the total bytes of each GPU."""

    def load(self, vectors: Vectors) -> Nearest:
        """Copies vectors to the GPUs, in half precision; they are freed with what it returns."""

    def build_graph(self, vectors: Vectors, links: int) -> Any:
        """Returns an HNSW index whose links are of the vectors, by their position, or None if FAISS cannot."""


class FaissDevice:
    """All GPUs that FAISS finds; each holds a part of the vectors.

    Streams and temporary memory are not thread-safe, not even when memory is freed: every index has its own.
    """

    def __init__(self) -> None:
        self.name = ", ".join(gpu.name for gpu in find_gpus().found)
        self._count = faiss().get_num_gpus()

    def memory(self) -> list[tuple[int, int]]:
        return [(gpu.free, gpu.total) for gpu in find_gpus().found]

    def load(self, vectors: Vectors) -> Nearest:
        dimension = vectors.shape[1]
        index = faiss().IndexShards(dimension, True, True)  # a thread per GPU; positions continue from part to part
        for number, share in enumerate(np.array_split(vectors, self._count)):
            parts, resources = faiss().IndexShards(dimension, False, True), self._reserve()
            for start in range(0, len(share), _PART_ROWS):
                part = self._empty_part(resources, number, dimension)
                part.add(np.ascontiguousarray(share[start : start + _PART_ROWS], dtype=np.float32))
                parts.add_shard(part)
            if len(share):
                index.add_shard(parts)

        def nearest(queries: Queries, count: int) -> NDArray[np.int64]:
            positions: NDArray[np.int64] = index.search(queries, count)[1]
            return positions

        return nearest

    def _reserve(self) -> Any:
        resources = faiss().StandardGpuResources()
        resources.setTempMemory(_TEMPORARY_BYTES)
        return resources

    def _empty_part(self, resources: Any, number: int, dimension: int) -> Index:
        config = faiss().GpuIndexFlatConfig()
        config.device, config.useFloat16 = number, True
        return faiss().GpuIndexFlat(resources, dimension, faiss().METRIC_INNER_PRODUCT, config)

    def build_graph(self, vectors: Vectors, links: int) -> Any:
        library = faiss()
        if not hasattr(library, "GpuIndexCagra"):  # only in builds with cuVS
            return None
        config = library.GpuIndexCagraConfig()
        config.graph_degree, config.intermediate_graph_degree = 2 * links, 4 * links
        config.guarantee_connectivity = True
        graph = library.GpuIndexCagra(self._reserve(), vectors.shape[1], library.METRIC_INNER_PRODUCT, config)
        graph.train(vectors.astype(np.float32))
        copy = library.IndexHNSWCagra(vectors.shape[1], links, library.METRIC_INNER_PRODUCT)
        graph.copyTo(copy)  # with its upper levels, so that vectors can be added
        return copy


class GpuPool:
    """The GPUs that a process may use: found and checked when first needed, and given up for good when they fail."""

    def __init__(self, find: Callable[[], Device | None]) -> None:
        """`find` returns None where FAISS has no GPU code, and raises GpuError for GPUs that cannot be used."""
        self._find = find
        self._device: Device | None = None
        self._is_checked = False
        self._lock = threading.Lock()
        self.problem = ""
        """Why there are no GPUs to use."""

    def device(self) -> Device | None:
        """Returns the GPUs, if there are any that return what the CPU returns."""
        with self._lock:
            if not self._is_checked:
                self._is_checked = True
                try:
                    self._device = self._find()
                    if self._device:
                        check_device(self._device)
                except Exception as error:  # FAISS raises undocumented types
                    self._give_up(error)
            return self._device

    def give_up(self, error: Exception) -> None:
        """Uses the CPU from now on; warns the first time."""
        with self._lock:
            if not self.problem:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._device, self.problem = None, _first_line(error)
        log.warning("vectors are compared on the CPU: %s", self.problem)


class GpuVectors:
    """The vectors of one index on GPUs. Any number of threads may search: they take turns."""

    def __init__(self, device: Device, storage: Index, on_failure: Callable[[Exception], None]) -> None:
        self._device = device
        self._vectors = stored_vectors(storage)
        self._storage = storage  # it owns the vectors
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._nearest: Nearest | None = device.load(self._vectors)

    @property
    def device(self) -> str | None:
        """The name of the GPUs, or None after they failed."""
        return self._device.name if self._nearest else None

    def search(self, queries: Queries, count: int, allowed: AllowList | None = None) -> Results | None:
        """Returns what an exact search returns, or None where the CPU has to search instead."""
        depth = self._depth(count, allowed)
        try:
            with self._lock:
                if depth is None or self._nearest is None:
                    return None
                candidates = self._nearest(queries, depth)
            if not ((candidates >= 0) & (candidates < len(self._vectors))).all():
                raise GpuError("the GPU returned positions that do not exist")
        except Exception as error:  # FAISS raises undocumented types
            with self._lock:
                self._nearest = None  # frees its memory
            self._on_failure(error)
            return None
        results = empty_results(len(queries), count)
        for row, found in enumerate(candidates):
            if not self._rank(queries[row], found, allowed, results[0][row], results[1][row]):
                return None
        return results

    def _depth(self, count: int, allowed: AllowList | None) -> int | None:
        """Returns how many neighbours to fetch so that enough are allowed; None if those are too many."""
        share = 1.0 if allowed is None else allowed.count / len(self._vectors)
        wanted = 2 * count + _SPARE
        if not len(self._vectors) or wanted > share * MAX_DEPTH:
            return None
        return min(len(self._vectors), int(wanted / share))

    def _rank(
        self,
        query: NDArray[np.float32],
        candidates: NDArray[np.int64],
        allowed: AllowList | None,
        scores: NDArray[np.float32],
        positions: NDArray[np.int64],
    ) -> bool:
        """Ranks the candidates by their exact scores; returns false if another vector may be better."""
        kept = np.unique(candidates if allowed is None else candidates[allowed.mask[candidates]])
        found, order = exact_index(self._vectors[kept]).search(query[None], min(len(positions), len(kept)))
        count = order.shape[1]
        scores[:count], positions[:count] = found[0], kept[order[0]]
        if len(candidates) == len(self._vectors):
            return True
        lowest = self._vectors[candidates[-1]].astype(np.float32) @ query
        return count == len(positions) and bool(found[0, -1] >= lowest + _ROUNDING)


def load_vectors(pool: GpuPool, storage: Index, settings: FaissSettings) -> GpuVectors | None:
    """Returns an index's vectors on the GPUs, checked with some of them, or None if the CPU has to compare them."""
    device = pool.device() if settings.gpu_share and storage.ntotal else None
    if device is None:
        return None
    try:
        if not _fits(device, storage, settings):
            log.info("an index of %s vectors does not fit on the GPUs: they are compared on the CPU", storage.ntotal)
            return None
        loaded = GpuVectors(device, storage, pool.give_up)
        queries = np.linspace(0, storage.ntotal - 1, settings.gpu_checks).astype(np.int64)
        _compare(loaded, storage, stored_vectors(storage)[queries].astype(np.float32))
    except Exception as error:  # FAISS raises undocumented types
        pool.give_up(error)
        return None
    return loaded if loaded.device else None


def build_graph(pool: GpuPool, vectors: Vectors, settings: FaissSettings) -> Any:
    """Returns an HNSW index whose links GPUs have built, or None if the CPU has to build them."""
    device = pool.device() if settings.gpu_share else None
    try:
        graph = device.build_graph(vectors, settings.graph_links) if device else None
        if graph is None:
            return None
        neighbors = graph.hnsw.neighbors
        links = faiss().rev_swig_ptr(neighbors.data(), neighbors.size())
        if graph.hnsw.levels.size() != len(vectors) or links.min() < -1 or links.max() >= len(vectors):
            raise GpuError("the GPU returned a graph with links to vectors that do not exist")
    except Exception as error:  # FAISS raises undocumented types
        pool.give_up(error)
        return None
    return graph


def check_device(device: Device) -> None:
    """Compares the neighbours of a small job with the CPU's; raises GpuError if they differ."""
    vectors = np.random.default_rng(0).standard_normal((4096, 64), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    storage = exact_index(vectors[64:].astype(np.float16))

    def fail(error: Exception) -> None:
        raise error

    if not _compare(GpuVectors(device, storage, fail), storage, vectors[:64]):
        raise GpuError("the GPU's neighbours are not the nearest ones")


def _compare(vectors: GpuVectors, storage: Index, queries: Queries) -> bool:
    """Raises GpuError unless the GPUs find what the CPU finds; returns false if they leave the search to the CPU."""
    count = min(10, storage.ntotal)
    found = vectors.search(queries, count)
    if found is None:
        return False
    with thread_limit(None):
        expected = storage.search(queries, count)[0]
    # Scores, not positions: duplicates of one photo are interchangeable.
    if not np.allclose(found[0], expected, atol=1e-5):
        raise GpuError("the GPU finds other neighbours than the CPU")
    return True


def _fits(device: Device, storage: Index, settings: FaissSettings) -> bool:
    memory = device.memory()
    needed = storage.ntotal * storage.d * 2 / len(memory)
    return all(needed <= settings.gpu_share * total and needed + _TEMPORARY_BYTES <= free for free, total in memory)


def find_device() -> Device | None:
    """Returns FAISS's GPUs, after a process of its own has used them: FAISS ends its process when CUDA fails."""
    if not hasattr(faiss(), "StandardGpuResources"):
        return None
    gpus = find_gpus()
    if gpus.problem:
        raise GpuError(f"FAISS is installed for GPUs, but there are none: {gpus.problem}")
    if not faiss().get_num_gpus():
        raise GpuError(f"FAISS for GPUs cannot use the driver of CUDA {gpus.cuda}")
    run_check([sys.executable, "-P", "-c", _CHECK])
    return FaissDevice()


def run_check(command: list[str], seconds: float = _CHECK_SECONDS) -> None:
    """Runs the check in a process; raises GpuError with the reason if it fails, crashes or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise GpuError(f"the check of the GPU did not end within {seconds:g} seconds") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise GpuError(f"the check of the GPU failed: {lines[-1]}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


POOL = GpuPool(find_device)
"""The GPUs of this process."""
