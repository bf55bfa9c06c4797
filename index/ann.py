"""Nearest neighbours with FAISS: the kinds of index, the effort a search needs for a recall, and the search itself.

An index holds positions 0..n-1 of L2-normalised vectors in half precision, compared by inner product. What a
position means, and which positions are dead, is its owner's business: a search takes that as a `Selection`. The
effort of a search is never guessed: a build measures it with vectors that it holds out.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from index.engines import faiss
from index.errors import LookalikeError
from index.files import written_whole
from index.items import Frozen

Index = Any
"""A FAISS index; the library has no types of its own."""
Kind = Literal["exact", "hnsw", "ivf"]
Vectors = NDArray[np.float16]
Queries = NDArray[np.float32]
Results = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Scores and positions of shape (queries, count), best first; the position -1 fills up."""
Progress = Callable[[int, int], None]

EXACT_UP_TO = 20_000
"""Vectors up to which comparing with all of them is fast enough that a graph is not worth its build."""
HNSW_UP_TO = 4_000_000
"""Vectors up to which a graph is built: beyond, its build takes hours, and inverted lists must do."""
LINKS = 32
CONSTRUCTION_EFFORT = 128
LANDMARKS = 1024
ENTRIES = 4
"""A walk on the graph starts at the nearest of that many landmarks. FAISS's own descent through the upper levels
gets lost between clusters: at the same effort it answered ten times as many queries with nothing that is near."""
REFINED = 5
"""Results that an inverted file compares in full for each list read; before, one bit a dimension must do."""
HELD_OUT = 256
"""Vectors that a build holds out as queries to measure recall with, or half of all; below 64 chance would decide."""
MEASURED_AT = 10
"""The number of results whose recall a plan promises."""
FILTERED_TARGET = 0.995
"""Filtered searches walk further out, where a graph is less accurate: they start from this to end above 0.99."""
SPREAD = 3
"""A walk is trusted with a selection if the answers are among the nearest of all, this many times as many as
there would be if the selected positions were spread evenly."""
LADDER = {
    "exact": (0,),
    "hnsw": (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    "ivf": (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
}
"""Efforts to try, from fast to accurate: the graph's efSearch, or the inverted lists to read."""
CHUNK = 1 << 16
GATHERED, GATHERED_SHARE = 1024, 64
"""Selected vectors up to which they are copied together once, rather than looked for at every search; of a selection
that is used again so many, or one in so many of all.
"""

# What searches cost, in vectors read at random places; only ratios matter, to choose between walking and scanning.
STEP_COST = {"hnsw": 16.0, "ivf": 64.0}
SCAN_COST = 0.3
TEST_COST = 0.01

_log = logging.getLogger(__name__)


class IndexFileError(LookalikeError):
    """An index file that is missing, cut short or of another format."""

    kind = "index-file"


class Plan(Frozen):
    """How an index is searched, and the recall that was measured for it."""

    kind: Kind
    effort: int = Field(description="the graph's efSearch, or the lists to read, that reach the target; exact: 0")
    filtered_effort: int = Field(description=f"the same for a recall of {FILTERED_TARGET}")
    recall: float = Field(description=f"recall@{MEASURED_AT} at `effort` against exact search, which itself has 1")
    target: float
    queries: int = Field(description="held-out vectors that measured the recall; exact: 0")


EXACT = Plan(kind="exact", effort=0, filtered_effort=0, recall=1.0, target=1.0, queries=0)
"""For an index that was made only to be scanned."""


class Built(NamedTuple):
    """An index with its plan; its newest positions hold the rows `order` of the vectors that it was given."""

    index: Index
    plan: Plan
    order: NDArray[np.int64]


class Selection:
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
            self._gathered = positions, exact_index(_rows(storage)[positions])
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
            self._entries = exact_index(_rows(self.storage)[self._landmarks])

    def search(
        self, queries: Queries, count: int, selection: Selection | None = None, *, filtered: bool = False
    ) -> Results:
        """The `count` nearest positions of each query, of the selected ones only.

        `filtered` says that the selection is a user's filter, not just a mask of dead positions: the search then takes
        the effort of the higher target, however few match and wherever they lie. A selection belongs to one index.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        with _team(1 if len(queries) == 1 else None):
            if self.plan.kind == "exact":
                return self._scan(queries, count, selection)
            # Neighbours further down the list take more effort to find, but less than in proportion.
            wanted = self.plan.filtered_effort if filtered else self.plan.effort
            wanted = int(wanted * max(1.0, count / MEASURED_AT) ** 0.85)
            if filtered:
                wanted = max(wanted, 2 * SPREAD * count)
            if selection is not None:
                return self._selected(queries, count, selection, wanted)
            if wanted * STEP_COST[self.plan.kind] >= self.count * SCAN_COST:
                return self._scan(queries, count, None)
            return self.walk(queries, count, wanted)

    def walk(self, queries: Queries, count: int, effort: int) -> Results:
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

    def _selected(self, queries: Queries, count: int, selection: Selection, wanted: int) -> Results:
        """Walks ever further around the queries until enough that is selected is met, or a scan costs less.

        A walk is trusted for a query only if the selected positions lie about as dense around it as everywhere:
        near a query far from all that matches there is little or nothing, and its true neighbours may be anywhere.
        """
        found = _unfilled(len(queries), count)
        pending = np.arange(len(queries))
        share = selection.count / self.count
        effort, near = (int(number / max(share, 1 / self.count)) for number in (wanted, SPREAD * count))
        affordable = (selection.count + self.count * TEST_COST) / STEP_COST[self.plan.kind]
        while len(pending) and effort < affordable:
            scores, positions = self.walk(queries[pending], near, effort)
            kept = (positions >= 0) & selection.mask[positions]
            trusted = np.count_nonzero(kept, axis=1) >= count
            for row in np.flatnonzero(trusted):
                found[0][pending[row]] = scores[row, kept[row]][:count]
                found[1][pending[row]] = positions[row, kept[row]][:count]
            pending = pending[~trusted]
            effort, near, affordable = 4 * effort, 4 * near, affordable / 2
        if len(pending):
            found[0][pending], found[1][pending] = self._scan(queries[pending], count, selection)
        return found

    def _scan(self, queries: Queries, count: int, selection: Selection | None) -> Results:
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

    def _gathers(self, selection: Selection) -> bool:
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


def choose_kind(count: int) -> Kind:
    """The kind of index for a number of vectors."""
    return "exact" if count <= EXACT_UP_TO else "hnsw" if count <= HNSW_UP_TO else "ivf"


def exact_index(vectors: Vectors) -> Index:
    """An index that compares a query with every vector."""
    index = _empty_storage(vectors.shape[1])
    _append(index, vectors)
    return index


def build(
    vectors: Vectors,
    *,
    target: float = 0.98,
    kind: Kind | None = None,
    threads: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Built:
    """An index of the kind that suits the number of vectors, which may be a memory map, and its measured plan."""
    kind = kind or choose_kind(len(vectors))
    least = LADDER[kind][0]
    plan = Plan(kind=kind, effort=least, filtered_effort=least, recall=1.0, target=target, queries=0)
    with _team(threads):
        return _grow(_empty(kind, vectors), plan, vectors, on_progress)


def extend(
    index: Index,
    plan: Plan,
    vectors: Vectors,
    *,
    threads: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Built:
    """Adds vectors to an index that was read into memory, and measures with some of them whether its plan still holds.

    Old positions stay; position `old count + p` holds row order[p] of the new vectors.
    """
    if not storage_of(index).codes.is_owned:  # FAISS would abort the process
        raise IndexFileError("A memory-mapped index cannot be extended.", "Read it with read_index.")
    with _team(threads):
        return _grow(index, plan, vectors, on_progress)


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
    with written_whole(path) as temporary:
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
def _team(threads: int | None) -> Iterator[None]:
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


def _empty_storage(dimension: int) -> Index:
    library = faiss()
    return library.IndexScalarQuantizer(dimension, library.ScalarQuantizer.QT_fp16, library.METRIC_INNER_PRODUCT)


def _empty(kind: Kind, vectors: Vectors) -> Index:
    """An index of a kind, trained with a sample of the vectors where it needs that."""
    library = faiss()
    count, dimension = vectors.shape
    if kind == "exact":
        return _empty_storage(dimension)
    if kind == "hnsw":
        index = library.IndexHNSWSQ(dimension, library.ScalarQuantizer.QT_fp16, LINKS, library.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = CONSTRUCTION_EFFORT
        return index
    lists = max(1, min(int(4 * count**0.5), count // 40))
    base = library.index_factory(dimension, f"IVF{lists},RaBitQ", library.METRIC_INNER_PRODUCT)
    sample = np.random.default_rng(0).choice(count, min(count, 40 * lists), replace=False)
    base.train(vectors[np.sort(sample)].astype(np.float32))
    return library.IndexRefine(base, _empty_storage(dimension))


def _grow(index: Index, plan: Plan, vectors: Vectors, on_progress: Progress) -> Built:
    """Adds the vectors; a random part of them comes last, after it has measured the plan as queries."""
    count = len(vectors)
    rows = np.arange(count)
    if plan.kind == "exact":
        _append(index, vectors)
        on_progress(count, count)
        return Built(index, plan, rows)
    size = min(HELD_OUT, count // 2) if count >= 128 else 0
    held_out = np.sort(np.random.default_rng(0).choice(count, size, replace=False))
    order = np.concatenate((np.delete(rows, held_out), held_out))
    for start in range(0, count - size, CHUNK):
        part = order[start : min(start + CHUNK, count - size)]
        index.add(vectors[part].astype(np.float32))
        on_progress(start + len(part), count)
    queries = vectors[held_out].astype(np.float32)
    if size:
        plan = _measured(Searcher(index, plan), queries)
        index.add(queries)
    on_progress(count, count)
    return Built(index, plan, order)


def _measured(searcher: Searcher, queries: Queries) -> Plan:
    """The plan with the efforts, never below those it has, that reach the targets for these queries."""
    plan = searcher.plan
    truth = _nearest(searcher.storage, queries)
    recalls: dict[int, float] = {}
    for effort in LADDER[plan.kind]:
        if effort >= plan.effort:
            _, found = searcher.walk(queries, truth.shape[1], effort)
            hits = sum(len(np.intersect1d(*pair)) for pair in zip(found, truth, strict=True))
            recalls[effort] = hits / truth.size
            if recalls[effort] >= max(plan.target, FILTERED_TARGET):
                break
    effort = _least(recalls, plan.target)
    if recalls[effort] < plan.target:
        _log.warning("Recall is %.4f, not %.4f, at the largest effort.", recalls[effort], plan.target)
    return Plan(
        kind=plan.kind,
        effort=effort,
        filtered_effort=max(plan.filtered_effort, _least(recalls, FILTERED_TARGET)),
        recall=recalls[effort],
        target=plan.target,
        queries=len(queries),
    )


def _least(recalls: dict[int, float], target: float) -> int:
    """The least effort that reached the target, or the largest."""
    return next((effort for effort, recall in recalls.items() if recall >= target), max(recalls))


def _nearest(storage: Index, queries: Queries) -> NDArray[np.int64]:
    """The true neighbours, by products of matrices: for many queries at once faster than scans."""
    library = faiss()
    rows = _rows(storage)
    heap = library.ResultHeap(len(queries), min(MEASURED_AT, len(rows)), keep_max=True)
    for start in range(0, len(rows), CHUNK):
        block = rows[start : start + CHUNK].astype(np.float32)
        found = library.knn(queries, block, min(heap.k, len(block)), metric=library.METRIC_INNER_PRODUCT)
        heap.add_result(found[0], found[1] + start)
    heap.finalize()
    positions: NDArray[np.int64] = heap.I
    return positions


def _append(index: Index, vectors: Vectors) -> None:
    """FAISS's codes of half precision are the vectors' own bytes."""
    for start in range(0, len(vectors), CHUNK):
        index.add_sa_codes(np.ascontiguousarray(vectors[start : start + CHUNK]).view(np.uint8))


def _rows(storage: Index) -> Vectors:
    """The vectors in an index's memory or file, without a copy: valid as long as the index."""
    codes = faiss().rev_swig_ptr(storage.codes.data(), storage.ntotal * storage.code_size)
    rows: Vectors = codes.view(np.float16).reshape(storage.ntotal, storage.d)
    return rows
