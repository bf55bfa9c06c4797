"""Searches a FAISS index by its plan, and reads and writes its file.

An index holds L2-normalised vectors in half precision at positions 0..n-1 and compares them by inner product. The
caller knows the image of each position and which positions are dead, and passes an `AllowList` to a search.
The effort of a search was measured by the build (`builder`).
"""

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from index._util.files import atomic_write
from index._util.imports import faiss
from index._util.models import Frozen
from index.errors import LookalikeError
from index.gallery.vectors.faiss import settings as defaults
from index.gallery.vectors.faiss.settings import FaissSettings, IndexKind

if TYPE_CHECKING:
    from index.gallery.vectors.faiss.gpu import GpuVectors

Index = Any
"""A FAISS index; the library has no types."""
Vectors = NDArray[np.float16]
Queries = NDArray[np.float32]
Results = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Scores and positions of shape (queries, count), best first, padded with the score -inf and the position -1."""

RECALL_AT = 10
"""The number of results at which a plan's recall is measured."""
SCAN = 0
"""The effort of a search that compares the query with every vector."""


class IndexFileError(LookalikeError):
    """An index file is missing, truncated or of another format."""

    kind = "index-file"


class Plan(Frozen):
    """How an index is searched, and the recall measured for it."""

    kind: IndexKind
    effort: int = Field(description="efSearch of a graph, or lists to read, that reach the target; 0: all vectors")
    filtered_effort: int = Field(description="the same for the higher target of filtered searches")
    growth: float = Field(description="exponent: efforts grow with the number of results to this power")
    recall: float = Field(description=f"recall@{RECALL_AT} at `effort` against exact search")
    target: float
    queries: int = Field(description="held-out vectors that measured the recall; 0 for an exact index")

    @property
    def scans(self) -> bool:
        """Whether no effort reached the target of an approximate index, so that every vector is compared."""
        return self.kind != "exact" and self.effort == SCAN

    def effort_for(self, results: float, *, filtered: bool) -> int:
        """Returns the effort that finds this many nearest vectors; FAISS itself requires efSearch >= results."""
        base = self.filtered_effort if filtered else self.effort
        minimum = results if self.kind == "hnsw" else 1
        return int(max(minimum, base * max(1.0, results / RECALL_AT) ** self.growth)) if base != SCAN else SCAN


EXACT = Plan(kind="exact", effort=SCAN, filtered_effort=SCAN, growth=0.0, recall=1.0, target=1.0, queries=0)
"""The plan of an exact index."""


class AllowList:
    """The positions of one index that a search may return. Reusable: what it copies or converts is cached."""

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        self.mask = mask
        self.count = int(np.count_nonzero(mask))
        self.scans = 0
        self._copy: tuple[NDArray[np.int64], Index] | None = None

    @cached_property
    def parameters(self) -> Any:
        """FAISS's search parameters for the mask; they keep its bits alive."""
        selector = faiss().IDSelectorBitmap(np.packbits(self.mask, bitorder="little"))
        return faiss().SearchParameters(sel=selector)

    def copy_vectors(self, storage: Index) -> tuple[NDArray[np.int64], Index]:
        """Returns the allowed positions and an exact index of their vectors alone."""
        if self._copy is None:
            positions = np.flatnonzero(self.mask)
            self._copy = positions, exact_index(stored_vectors(storage)[positions])
        return self._copy


class Searcher:
    """An index with its plan. Any number of threads may search it concurrently."""

    def __init__(self, index: Index, plan: Plan, settings: FaissSettings | None = None) -> None:
        self.plan = plan
        self.settings = settings or defaults.DEFAULT
        self.count: int = index.ntotal
        self._index = index
        self.storage = storage_of(index)
        self.gpu: GpuVectors | None = None
        """The same vectors on GPUs, which are searched first."""
        if plan.kind == "hnsw":
            candidates = min(self.settings.entry_candidates, self.count // 16 + 1)
            self._entry_positions = np.linspace(0, self.count - 1, candidates).astype(np.int32)
            self._entry_index = exact_index(stored_vectors(self.storage)[self._entry_positions])

    @property
    def lists(self) -> int:
        """The number of inverted lists; 0 for other kinds."""
        return int(lists_of(self._index).nlist) if self.plan.kind == "ivf" else 0

    def search(
        self, queries: Queries, count: int, allowed: AllowList | None = None, *, filtered: bool = False
    ) -> Results:
        """Returns the `count` nearest allowed positions of each query, fewer only if there are not so many.

        `filtered` marks an allow list that comes from a user's filter rather than from dead positions: the search then
        takes the effort of the higher target, however few positions match and wherever they lie.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        with thread_limit(1 if len(queries) == 1 else None):
            if self.gpu and (found := self.gpu.search(queries, count, allowed)):
                return found
            effort = self.plan.effort_for(count, filtered=filtered)
            if effort == SCAN:
                return self._scan(queries, count, allowed)
            if allowed is not None:
                return self._search_allowed(queries, count, allowed, filtered=filtered)
            if effort * self._step_cost >= self.count * self.settings.scan_cost:
                return self._scan(queries, count, None)
            scores, positions = self.approximate_search(queries, count, effort)
            # The last position is -1 where a graph is not connected, or the lists hold too few vectors.
            if positions.item(-1) < 0 or (len(queries) > 1 and (positions[:, -1] < 0).any()):
                return self._scan(queries, count, None)
            return scores, positions

    def approximate_search(self, queries: Queries, count: int, effort: int) -> Results:
        """Searches the graph or the inverted lists with a given effort instead of the plan's."""
        if self.plan.kind == "ivf":
            refined = max(1.0, self.settings.reranked_per_list * effort / count)
            parameters = _list_parameters(refined, effort, self.settings.quantizer_effort)
            return _search_with(self._index, queries, count, parameters)
        library = faiss()
        similarities, nearest = self._entry_index.search(
            queries, min(self.settings.entry_points, len(self._entry_positions))
        )
        entries = self._entry_positions[nearest]
        scores = np.empty((len(queries), count), dtype=np.float32)
        positions = np.empty((len(queries), count), dtype=np.int64)
        arrays = (entries, similarities, scores, positions)
        self._index.search_level_0(
            len(queries), library.swig_ptr(queries), count, *map(library.swig_ptr, arrays), entries.shape[1], 2,
            _graph_parameters(effort),
        )  # fmt: skip
        return scores, positions

    @property
    def _step_cost(self) -> float:
        return self.settings.step_cost(self.plan.kind)

    def _search_allowed(self, queries: Queries, count: int, allowed: AllowList, *, filtered: bool) -> Results:
        """Increases the depth of the search until enough allowed positions are found, or a scan costs less.

        A query's results are accepted only if there are enough within the depth that the effort was measured for. Far
        from all allowed vectors the true neighbours may be anywhere, and only a scan finds them.
        """
        results = empty_results(len(queries), count)
        pending = np.arange(len(queries))
        scattered = self.settings.scattered_factor * count * self.count / max(1, allowed.count)
        depth = min(self.settings.near_factor * count, scattered)
        affordable = self._scan_cost(allowed) / self._step_cost
        while (
            len(pending)
            and depth <= self.count  # where efforts do not grow with the depth, nothing else would end it
            and (effort := self.plan.effort_for(depth, filtered=filtered)) < affordable
        ):
            scores, positions = self.approximate_search(queries[pending], int(depth), effort)
            kept = (positions >= 0) & allowed.mask[positions]
            accepted = np.count_nonzero(kept, axis=1) >= count
            for row in np.flatnonzero(accepted):
                results[0][pending[row]] = scores[row, kept[row]][:count]
                results[1][pending[row]] = positions[row, kept[row]][:count]
            pending = pending[~accepted]
            affordable -= effort
            depth = max(4 * depth, scattered)
        if len(pending):
            results[0][pending], results[1][pending] = self._scan(queries[pending], count, allowed)
        return results

    def _scan(self, queries: Queries, count: int, allowed: AllowList | None) -> Results:
        """Compares the queries with every allowed vector."""
        results: Results
        if allowed is None:
            results = self.storage.search(queries, count)
        elif not allowed.count:
            results = empty_results(len(queries), count)
        elif self._should_copy(allowed):
            positions, index = allowed.copy_vectors(self.storage)
            scores, found = index.search(queries, count)
            results = scores, np.where(found < 0, -1, positions[found])
        else:
            results = _search_with(self.storage, queries, count, allowed.parameters)
        return results

    def _scan_cost(self, allowed: AllowList) -> float:
        """Estimates the cost of a scan: copied vectors are read in sequence, masked ones at random addresses."""
        settings = self.settings
        if allowed.count <= max(settings.copied_up_to, self.count // settings.copied_share):
            return allowed.count * settings.scan_cost
        return allowed.count + self.count * settings.mask_cost

    def _should_copy(self, allowed: AllowList) -> bool:
        allowed.scans += 1
        is_reused = allowed.scans > 1 and allowed.count <= self.count // self.settings.copied_share
        return is_reused or allowed.count <= self.settings.copied_up_to


def _search_with(index: Index, queries: Queries, count: int, parameters: Any) -> Results:
    """Searches with parameters through the wrapped method.

    `search` takes none once `faiss.contrib.torch_utils` is imported, as libraries for training do.
    """
    library = faiss()
    scores, positions = empty_results(len(queries), count)
    arrays = map(library.swig_ptr, (scores, positions))
    index.search_c(len(queries), library.swig_ptr(queries), count, *arrays, parameters)
    return scores, positions


def exact_index(vectors: Vectors) -> Index:
    """Returns an index that compares a query with every vector."""
    index = empty_storage(vectors.shape[1])
    append(index, vectors)
    return index


def storage_of(index: Index) -> Index:
    """Returns the part of an index that holds every vector in half precision, for scans."""
    library = faiss()
    if isinstance(index, library.IndexHNSW):
        return library.downcast_index(index.storage)
    if isinstance(index, library.IndexRefine):
        return library.downcast_index(index.refine_index)
    return index


def lists_of(index: Index) -> Index:
    """Returns the inverted lists of an index without the vectors that re-rank. They are in memory in any case."""
    lists = faiss().downcast_index(index.base_index)
    lists.referenced_objects = [index]  # it owns them
    return lists


def store_vectors(parts: Iterable[Vectors], path: Path | None) -> Index:
    """Returns an exact index of all vectors in the parts; with a path it is a memory map of a new file.

    FAISS writes an index only from memory, so this writes the format of `IndexScalarQuantizer`: its header has the
    number of vectors in bytes 8 to 16, and ends with the number of bytes that follow.
    """
    if path is None:
        vectors = np.concatenate(list(parts))
        return exact_index(vectors)
    size = struct.Struct("<Q")
    with path.open("wb") as file:
        header, count = b"", 0
        for vectors in parts:
            if not header:
                header = faiss().serialize_index(empty_storage(vectors.shape[1])).tobytes()
                file.write(header)
            file.write(np.ascontiguousarray(vectors).data)
            count += len(vectors)
        for offset, number in ((8, count), (len(header) - size.size, file.tell() - len(header))):
            file.seek(offset)
            file.write(size.pack(number))
    return open_index(path)


def write_index(index: Index, path: Path) -> None:
    """Writes an index to a file atomically."""
    library = faiss()
    with atomic_write(path) as temporary:
        try:
            library.write_index(index, os.fspath(temporary))
            # On a full disk FAISS does not report that the last bytes failed; reading notices that they are missing.
            library.read_index(os.fspath(temporary), library.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise OSError(f"{path} could not be written: {error}") from None


def open_index(path: Path) -> Index:
    """Memory-maps an index file: fast to open, shares pages with other processes, and cannot be extended."""
    return _read(path, faiss().IO_FLAG_MMAP_IFC)


def read_index(path: Path) -> Index:
    """Reads an index file into memory."""
    return _read(path, 0)


def _read(path: Path, flags: int) -> Index:
    try:
        return faiss().read_index(os.fspath(path), flags)
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise IndexFileError(f"{path} is not a complete index file: {reason}.", "Rebuild its generation.") from None


@contextmanager
def thread_limit(threads: int | None) -> Iterator[None]:
    """Limits the OpenMP threads that FAISS starts from the calling thread, even for a single query."""
    library = faiss()
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(threads or before)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


@lru_cache(maxsize=1024)
def _graph_parameters(effort: int) -> Any:
    return faiss().SearchParametersHNSW(efSearch=effort)


@lru_cache(maxsize=1024)
def _list_parameters(refined: float, effort: int, quantizer_effort: float) -> Any:
    library = faiss()
    nearest = library.SearchParametersHNSW(efSearch=int(quantizer_effort * effort))
    lists = library.IVFRaBitQSearchParameters(nprobe=effort, quantizer_params=nearest)
    return library.IndexRefineSearchParameters(k_factor=refined, base_index_params=lists)


def empty_results(queries: int, count: int) -> Results:
    """Returns results without any neighbour."""
    return np.full((queries, count), -np.inf, np.float32), np.full((queries, count), -1, np.int64)


def empty_storage(dimension: int) -> Index:
    """Returns an empty index of half-precision vectors."""
    library = faiss()
    return library.IndexScalarQuantizer(dimension, library.ScalarQuantizer.QT_fp16, library.METRIC_INNER_PRODUCT)


def append(index: Index, vectors: Vectors, chunk_rows: int = 1 << 16) -> None:
    """Adds vectors without conversion: FAISS's codes of half precision are the vectors' own bytes."""
    for start in range(0, len(vectors), chunk_rows):
        index.add_sa_codes(np.ascontiguousarray(vectors[start : start + chunk_rows]).view(np.uint8))


def stored_vectors(storage: Index) -> Vectors:
    """Returns the vectors of an index without a copy; the view is valid as long as the index."""
    codes = faiss().rev_swig_ptr(storage.codes.data(), storage.ntotal * storage.code_size)
    vectors: Vectors = codes.view(np.float16).reshape(storage.ntotal, storage.d)
    return vectors
