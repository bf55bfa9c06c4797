"""Nearest neighbours with FAISS: searching an index by its plan, and its file.

An index holds positions 0..n-1 of L2-normalised vectors in half precision, compared by inner product. What a
position means, and which positions are dead, is its owner's business: a search takes that as a `AllowList`. The
effort of a search is never guessed: the build has measured it (`index.building`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from index._util.files import atomic_write
from index._util.imports import faiss
from index._util.models import Frozen
from index.errors import LookalikeError

Index = Any
"""A FAISS index; the library has no types of its own."""
IndexKind = Literal["exact", "hnsw", "ivf"]
Vectors = NDArray[np.float16]
Queries = NDArray[np.float32]
Results = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Scores and positions of shape (queries, count), best first; the position -1 fills up."""

LANDMARKS = 1024
ENTRIES = 4
"""A walk on the graph starts at the nearest of that many landmarks. FAISS's own descent through the upper levels
gets lost between clusters: at the same effort it answered ten times as many queries with nothing that is near."""
REFINED = 5
"""Results that an inverted file compares in full for each list read; before, one bit a dimension must do."""
MEASURED_AT = 10
"""The number of results whose recall a plan promises."""
SCAN = 0
"""The effort of a search that compares with every vector."""
NEAR, SPREAD = 4, 2
"""A search for some selected positions looks first among this many times as many neighbours, which is enough if what
is selected lies together around the query; then among so many times as many as hold enough if it lies anywhere."""
CHUNK = 1 << 16
GATHERED, GATHERED_SHARE = 1024, 64
"""Selected vectors up to which they are copied together once, rather than looked for at every search; of a selection
that is used again so many, or one in so many of all.
"""

# What searches cost, in vectors read at random places; only ratios matter, to choose between walking and scanning.
STEP_COST = {"hnsw": 16.0, "ivf": 64.0}
SCAN_COST = 0.3
TEST_COST = 0.01


class IndexFileError(LookalikeError):
    """An index file that is missing, cut short or of another format."""

    kind = "index-file"


class Plan(Frozen):
    """How an index is searched, and the recall that was measured for it."""

    kind: IndexKind
    effort: int = Field(description="the graph's efSearch, or the lists to read, that reach the target; 0: all vectors")
    filtered_effort: int = Field(description="the same for the higher target of filtered searches")
    growth: float = Field(description="the power of the number of results that the efforts grow with")
    recall: float = Field(description=f"recall@{MEASURED_AT} at `effort` against exact search, which itself has 1")
    target: float
    queries: int = Field(description="held-out vectors that measured the recall; exact: 0")

    @property
    def scans(self) -> bool:
        """Whether an index was built in vain: no effort reached the target, so every vector is compared."""
        return self.kind != "exact" and self.effort == SCAN

    def effort_for(self, results: float, *, filtered: bool) -> int:
        """The effort that finds so many of the nearest; FAISS itself takes at least as much of a graph."""
        base = self.filtered_effort if filtered else self.effort
        least = results if self.kind == "hnsw" else 1
        return int(max(least, base * max(1.0, results / MEASURED_AT) ** self.growth)) if base != SCAN else SCAN


EXACT = Plan(kind="exact", effort=SCAN, filtered_effort=SCAN, growth=0.0, recall=1.0, target=1.0, queries=0)
"""For an index that was made only to be scanned."""


class AllowList:
    """The positions that a search may answer, one boolean each; made once, and used by any number of searches."""

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        self.mask = mask
        self.count = int(np.count_nonzero(mask))
        self.scans = 0
        self._gathered: tuple[NDArray[np.int64], Index] | None = None

    @cached_property
    def parameters(self) -> Any:
        """FAISS's form of the selection, which keeps its bits alive."""
        selector = faiss().IDSelectorBitmap(np.packbits(self.mask, bitorder="little"))
        return faiss().SearchParameters(sel=selector)

    def gathered(self, storage: Index) -> tuple[NDArray[np.int64], Index]:
        """The few selected positions, and an index of their vectors alone."""
        if self._gathered is None:
            positions = np.flatnonzero(self.mask)
            self._gathered = positions, exact_index(stored_vectors(storage)[positions])
        return self._gathered


class Searcher:
    """An index with its plan. Any number of threads may search it at once."""

    def __init__(self, index: Index, plan: Plan) -> None:
        self.plan = plan
        self.count: int = index.ntotal
        self._index = index
        self.storage = storage_of(index)
        if plan.kind == "hnsw":
            many = min(LANDMARKS, self.count // 16 + 1)
            self._landmarks = np.linspace(0, self.count - 1, many).astype(np.int32)
            self._entries = exact_index(stored_vectors(self.storage)[self._landmarks])

    def search(
        self, queries: Queries, count: int, selection: AllowList | None = None, *, filtered: bool = False
    ) -> Results:
        """The `count` nearest positions of each query, of the selected ones only.

        `filtered` says that the selection is a user's filter, not just a mask of dead positions: the search then takes
        the effort of the higher target, however few match and wherever they lie. A selection belongs to one index.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        with thread_limit(1 if len(queries) == 1 else None):
            effort = self.plan.effort_for(count, filtered=filtered)
            if effort == SCAN:
                return self._scan(queries, count, selection)
            if selection is not None:
                return self._selected(queries, count, selection, filtered=filtered)
            if effort * STEP_COST[self.plan.kind] >= self.count * SCAN_COST:
                return self._scan(queries, count, None)
            return self.approximate_search(queries, count, effort)

    def approximate_search(self, queries: Queries, count: int, effort: int) -> Results:
        """Searches the graph or the lists with a given effort, without a plan."""
        if self.plan.kind == "ivf":
            return _found(self._index, queries, count, _list_parameters(count, effort))
        library = faiss()
        similarities, nearest = self._entries.search(queries, min(ENTRIES, len(self._landmarks)))
        entries = self._landmarks[nearest]
        scores = np.empty((len(queries), count), dtype=np.float32)
        positions = np.empty((len(queries), count), dtype=np.int64)
        arrays = (entries, similarities, scores, positions)
        self._index.search_level_0(
            len(queries), library.swig_ptr(queries), count, *map(library.swig_ptr, arrays), entries.shape[1], 2,
            _graph_parameters(effort),
        )  # fmt: skip
        return scores, positions

    def _selected(self, queries: Queries, count: int, selection: AllowList, *, filtered: bool) -> Results:
        """Walks ever further around the queries until enough that is selected is met, or a scan costs less.

        A walk is trusted for a query only if it met enough within the depth that its effort is made for. Far from all
        that matches there is little or nothing near, and the true neighbours may be anywhere: no cheap walk will do.
        """
        found = _unfilled(len(queries), count)
        pending = np.arange(len(queries))
        anywhere = SPREAD * count * self.count / max(1, selection.count)
        depth = min(NEAR * count, anywhere)
        affordable = self._scan_cost(selection) / STEP_COST[self.plan.kind]
        while len(pending) and (effort := self.plan.effort_for(depth, filtered=filtered)) < affordable:
            scores, positions = self.approximate_search(queries[pending], int(depth), effort)
            kept = (positions >= 0) & selection.mask[positions]
            trusted = np.count_nonzero(kept, axis=1) >= count
            for row in np.flatnonzero(trusted):
                found[0][pending[row]] = scores[row, kept[row]][:count]
                found[1][pending[row]] = positions[row, kept[row]][:count]
            pending = pending[~trusted]
            affordable -= effort
            depth = max(4 * depth, anywhere)
        if len(pending):
            found[0][pending], found[1][pending] = self._scan(queries[pending], count, selection)
        return found

    def _scan(self, queries: Queries, count: int, selection: AllowList | None) -> Results:
        """Compares with every selected vector."""
        found: Results
        if selection is None:
            found = self.storage.search(queries, count)
        elif not selection.count:
            found = _unfilled(len(queries), count)
        elif self._gathers(selection):
            positions, block = selection.gathered(self.storage)
            scores, places = block.search(queries, count)
            found = scores, np.where(places < 0, -1, positions[places])
        else:
            found = _found(self.storage, queries, count, selection.parameters)
        return found

    def _scan_cost(self, selection: AllowList) -> float:
        """Of those that are, or will be, copied together it is that of reading on."""
        if selection.count <= max(GATHERED, self.count // GATHERED_SHARE):
            return selection.count * SCAN_COST
        return selection.count + self.count * TEST_COST

    def _gathers(self, selection: AllowList) -> bool:
        """Whether copying the selected vectors together pays."""
        selection.scans += 1
        again = selection.scans > 1 and selection.count <= self.count // GATHERED_SHARE
        return again or selection.count <= GATHERED


def _found(index: Index, queries: Queries, count: int, parameters: Any) -> Results:
    """A search with parameters, by the wrapped method: `search` itself takes none once FAISS's addition for PyTorch is
    imported, as libraries for training do.
    """
    library = faiss()
    scores, positions = _unfilled(len(queries), count)
    arrays = map(library.swig_ptr, (scores, positions))
    index.search_c(len(queries), library.swig_ptr(queries), count, *arrays, parameters)
    return scores, positions


def exact_index(vectors: Vectors) -> Index:
    """An index that compares a query with every vector."""
    index = empty_storage(vectors.shape[1])
    append(index, vectors)
    return index


def storage_of(index: Index) -> Index:
    """The part of an index that holds every vector in half precision, for scans."""
    library = faiss()
    if isinstance(index, library.IndexHNSW):
        return library.downcast_index(index.storage)
    if isinstance(index, library.IndexRefine):
        return library.downcast_index(index.refine_index)
    return index


def write_index(index: Index, path: Path) -> None:
    """Writes an index to a file, whole or not at all."""
    library = faiss()
    with atomic_write(path) as temporary:
        try:
            library.write_index(index, os.fspath(temporary))
            # On a full disk FAISS does not tell when the last bytes failed, only that they are missing.
            library.read_index(os.fspath(temporary), library.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise OSError(f"{path} could not be written: {error}") from None


def open_index(path: Path) -> Index:
    """An index memory-mapped from its file: open at once, its pages shared with other processes, not to be extended."""
    return _read(path, faiss().IO_FLAG_MMAP_IFC)


def read_index(path: Path) -> Index:
    """An index read into memory."""
    return _read(path, 0)


def _read(path: Path, flags: int) -> Index:
    try:
        return faiss().read_index(os.fspath(path), flags)
    except (RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise IndexFileError(f"{path} is not a whole index file ({reason}).", "Build its generation again.") from None


@contextmanager
def thread_limit(threads: int | None) -> Iterator[None]:
    """Sets the threads that FAISS starts from this thread, which it would do for a single query too."""
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
def _list_parameters(count: int, effort: int) -> Any:
    library = faiss()
    lists = library.IVFRaBitQSearchParameters(nprobe=effort)
    return library.IndexRefineSearchParameters(k_factor=max(1.0, REFINED * effort / count), base_index_params=lists)


def _unfilled(queries: int, count: int) -> Results:
    return np.full((queries, count), -np.inf, np.float32), np.full((queries, count), -1, np.int64)


def empty_storage(dimension: int) -> Index:
    library = faiss()
    return library.IndexScalarQuantizer(dimension, library.ScalarQuantizer.QT_fp16, library.METRIC_INNER_PRODUCT)


def append(index: Index, vectors: Vectors) -> None:
    """FAISS's codes of half precision are the vectors' own bytes."""
    for start in range(0, len(vectors), CHUNK):
        index.add_sa_codes(np.ascontiguousarray(vectors[start : start + CHUNK]).view(np.uint8))


def stored_vectors(storage: Index) -> Vectors:
    """The vectors in an index's memory or file, without a copy: valid as long as the index."""
    codes = faiss().rev_swig_ptr(storage.codes.data(), storage.ntotal * storage.code_size)
    rows: Vectors = codes.view(np.float16).reshape(storage.ntotal, storage.d)
    return rows
