"""Nearest neighbours with FAISS: the kinds of index, the effort a search needs for a recall, and the search itself.

An index holds positions 0..n-1 of L2-normalised vectors in half precision, compared by inner product. What a
position means, and which positions are dead, is its owner's business: a search takes them as a `Selection`.
The effort of a search is never guessed: a build measures it with vectors that it held out.
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
Results = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Scores and positions of shape (queries, count), best first; the position -1 fills up."""
Progress = Callable[[int, int], None]

EXACT_UP_TO = 20_000
"""Vectors up to which scanning all of them is fast enough that a graph is not worth its build."""
HNSW_UP_TO = 4_000_000
"""Vectors up to which a graph pays: beyond, its memory and its build time grow too large."""
LINKS = 32
CONSTRUCTION_EFFORT = 100
HELD_OUT = 256
"""Vectors that a build holds out as queries to measure recall with."""
FILTERED_TARGET = 0.995
"""A filter makes its search deeper, so it starts from more than the plain target to end above 0.99."""
LADDER = {
    "hnsw": (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    "ivf": (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
}
"""Efforts to try, from fast to accurate: the graph's efSearch, or the lists to probe."""
MEASURED_AT = 10
"""The number of results whose recall a plan promises."""
REFINE = 8
"""Of an inverted file's candidates that many times the wanted number are compared in half precision."""
CHUNK = 1 << 16

# Costs in microseconds on one core at 512 dimensions; only their ratios matter, to choose between scan and graph.
SCAN_COST = 0.09
TEST_COST = 0.0026
STEP_COST = {"hnsw": 9.0, "ivf": 15.0}

_log = logging.getLogger(__name__)


class IndexFileError(LookalikeError):
    """An index file that is missing, cut short or of another format."""

    kind = "index-file"


class Plan(Frozen):
    """How an index is searched, and the recall measured for it."""

    kind: Kind
    effort: int = Field(description="the graph's efSearch or the lists to probe that reach the target; 0: exact")
    filtered_effort: int = Field(description=f"the same for a recall of {FILTERED_TARGET}")
    recall: float = Field(description=f"recall@{MEASURED_AT} at `effort`, against exact search; 1 for exact")
    target: float
    queries: int = Field(description="held-out vectors that measured the recall; 0 for exact, which needs none")


class Built(NamedTuple):
    """A new index: position p holds row order[p] of the vectors that it was built from."""

    index: Index
    plan: Plan
    order: NDArray[np.int64]


class Selection:
    """The positions that a search may answer, from one boolean for each; made once and used for many searches."""

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        self.mask = mask
        self.count = int(np.count_nonzero(mask))

    @cached_property
    def parameters(self) -> Any:
        """FAISS's form of the selection, for a scan; it refers to the selector and that to the bits."""
        bits = np.packbits(self.mask, bitorder="little")
        return faiss().SearchParameters(sel=faiss().IDSelectorBitmap(bits))


def choose_kind(count: int) -> Kind:
    """The kind of index for a number of vectors."""
    return "exact" if count <= EXACT_UP_TO else "hnsw" if count <= HNSW_UP_TO else "ivf"


def exact_index(vectors: Vectors) -> Index:
    """An index that compares a query with every vector."""
    index = _storage(vectors.shape[1])
    _append_codes(index, vectors)
    return index


def build(
    vectors: Vectors,
    *,
    target: float = 0.98,
    kind: Kind | None = None,
    threads: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Built:
    """Builds an index of the kind that suits the number of vectors (a memory map may hold them), and its plan."""
    count, dimension = vectors.shape
    kind = kind or choose_kind(count)
    order = np.arange(count, dtype=np.int64)
    if kind == "exact":
        on_progress(count, count)
        return Built(exact_index(vectors), exact_plan(target), order)
    held_out = np.random.default_rng(0).choice(count, min(HELD_OUT, count // 10), replace=False)
    order = np.concatenate((np.delete(order, held_out), np.sort(held_out)))
    with _team(threads):
        index = _empty(kind, vectors)
        plan = _grow(index, _plan(kind, target), vectors, order, len(held_out), on_progress)
    return Built(index, plan, order)


def extend(
    index: Index,
    plan: Plan,
    vectors: Vectors,
    *,
    threads: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Built:
    """Adds vectors to an index in memory, after its own; some of them measure whether the plan still holds.

    The order counts the new vectors only: old positions stay, and position `old count + p` holds row order[p].
    """
    order = np.arange(len(vectors), dtype=np.int64)
    if plan.kind == "exact":
        _append_codes(index, vectors)
        on_progress(len(vectors), len(vectors))
        return Built(index, plan, order)
    held_out = np.random.default_rng(0).choice(len(vectors), min(HELD_OUT, len(vectors)), replace=False)
    order = np.concatenate((np.delete(order, held_out), np.sort(held_out)))
    with _team(threads):
        plan = _grow(index, plan, vectors, order, len(held_out), on_progress)
    return Built(index, plan, order)


class Searcher:
    """An index with its plan. Any number of threads may search at once."""

    def __init__(self, index: Index, plan: Plan) -> None:
        self.index = index
        self.plan = plan
        self.count: int = index.ntotal
        self._exact = storage_of(index)

    def search(
        self, queries: NDArray[np.float32], count: int, selection: Selection | None = None, *, filtered: bool = False
    ) -> Results:
        """The `count` nearest positions of each query, of the selected ones only.

        `filtered` says that the selection is a filter of the user's, not only a mask of dead positions: recall then
        does not fall below that of a search without one.
        """
        plan = self.plan
        if selection is not None and selection.count == self.count and not filtered:
            selection = None
        matching = self.count if selection is None else selection.count
        if plan.kind == "exact" or not matching:
            return self._scan(queries, count, selection)
        base = plan.filtered_effort if filtered else plan.effort
        effort = int(base * max(1.0, count / MEASURED_AT) ** 0.75 * self.count / matching)
        if effort * STEP_COST[plan.kind] >= matching * SCAN_COST + self.count * TEST_COST:
            return self._scan(queries, count, selection)
        if selection is None:
            found: Results = self.index.search(queries, count, params=_parameters(plan.kind, effort))
            return found
        return self._masked(queries, count, selection, effort)

    def _masked(self, queries: NDArray[np.float32], count: int, selection: Selection, effort: int) -> Results:
        """The graph's nearest of all positions, thinned by the selection; scanned where too few of them remain.

        A region explored around the query is trusted only if the selection is as dense in it as everywhere: a query
        far from all that matches finds few or none there, and its neighbours may be anywhere.
        """
        scores, positions = self.index.search(queries, effort, params=_parameters(self.plan.kind, effort))
        kept = selection.mask[positions] & (positions >= 0)
        found = _fill(len(queries), count)
        enough = count + effort * selection.count // self.count // 4
        for row, keep in enumerate(kept):
            if np.count_nonzero(keep) < enough:
                part = self._scan(queries[row : row + 1], count, selection)
                found[0][row], found[1][row] = part[0][0], part[1][0]
            else:
                found[0][row], found[1][row] = scores[row][keep][:count], positions[row][keep][:count]
        return found

    def _scan(self, queries: NDArray[np.float32], count: int, selection: Selection | None) -> Results:
        parameters = None if selection is None else selection.parameters
        with _team(1 if len(queries) == 1 else None):
            found: Results = self._exact.search(queries, count, params=parameters)
        return found


def storage_of(index: Index) -> Index:
    """The part of an index that holds every vector in half precision, and can be scanned."""
    library = faiss()
    if isinstance(index, library.IndexHNSW):
        return library.downcast_index(index.storage)
    if isinstance(index, library.IndexRefine):
        return library.downcast_index(index.refine_index)
    return index


def write_index(index: Index, path: Path) -> None:
    """Writes an index to a file, whole or not at all."""
    with written_whole(path) as temporary:
        faiss().write_index(index, os.fspath(temporary))


def open_index(path: Path) -> Index:
    """An index memory-mapped from its file: it opens at once and shares the page cache with other processes."""
    return _read(path, faiss().IO_FLAG_MMAP_IFC)


def read_index(path: Path) -> Index:
    """An index read into memory, so that it can be extended."""
    return _read(path, 0)


def _read(path: Path, flags: int) -> Index:
    try:
        return faiss().read_index(os.fspath(path), flags)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise IndexFileError(f"{path} is not a whole index file: {reason}.", "Build the generation again.") from None


@contextmanager
def _team(threads: int | None) -> Iterator[None]:
    """Sets the calling thread's OpenMP team, which FAISS would start for a single query too."""
    if threads is None:
        yield
        return
    library = faiss()
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(threads)
    try:
        yield
    finally:
        library.omp_set_num_threads(before)


@lru_cache(maxsize=1024)
def _parameters(kind: Kind, effort: int) -> Any:
    """Search parameters, which FAISS only reads: threads share them."""
    library = faiss()
    if kind == "hnsw":
        return library.SearchParametersHNSW(efSearch=effort)
    return library.IndexRefineSearchParameters(
        k_factor=REFINE, base_index_params=library.IVFRaBitQSearchParameters(nprobe=effort)
    )


def _fill(queries: int, count: int) -> Results:
    return np.full((queries, count), -np.inf, np.float32), np.full((queries, count), -1, np.int64)


def _storage(dimension: int) -> Index:
    library = faiss()
    return library.IndexScalarQuantizer(dimension, library.ScalarQuantizer.QT_fp16, library.METRIC_INNER_PRODUCT)


def _append_codes(index: Index, vectors: Vectors) -> None:
    """FAISS's codes of half precision are the bytes of the vectors."""
    for start in range(0, len(vectors), CHUNK):
        index.add_sa_codes(np.ascontiguousarray(vectors[start : start + CHUNK]).view(np.uint8))


def _empty(kind: Kind, vectors: Vectors) -> Index:
    """An index of the kind, trained with a sample of the vectors where it needs that."""
    library = faiss()
    count, dimension = vectors.shape
    if kind == "hnsw":
        index = library.IndexHNSWSQ(dimension, library.ScalarQuantizer.QT_fp16, LINKS, library.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = CONSTRUCTION_EFFORT
        index.is_trained = True
        return index
    lists = 1 << max(2, int(np.log2(4 * count**0.5)))
    base = library.index_factory(dimension, f"IVF{lists},RaBitQ", library.METRIC_INNER_PRODUCT)
    rows = np.random.default_rng(0).choice(count, min(count, 64 * lists), replace=False)
    base.train(np.asarray(vectors[np.sort(rows)], dtype=np.float32))
    index = library.IndexRefine(base, _storage(dimension))
    base.this.disown()
    index.own_fields = True
    return index


def exact_plan(target: float = 1.0) -> Plan:
    """How an index that compares with everything is searched."""
    return Plan(kind="exact", effort=0, filtered_effort=0, recall=1.0, target=target, queries=0)


def _plan(kind: Kind, target: float) -> Plan:
    least = LADDER[kind][0]
    return Plan(kind=kind, effort=least, filtered_effort=least, recall=0.0, target=target, queries=0)


def _grow(
    index: Index, plan: Plan, vectors: Vectors, order: NDArray[np.int64], held_out: int, on_progress: Progress
) -> Plan:
    """Adds the vectors in their order, the held-out ones at the end, after they measured the plan as queries."""
    bulk, last = order[: len(order) - held_out], order[len(order) - held_out :]
    for start in range(0, len(bulk), CHUNK):
        index.add(np.asarray(vectors[bulk[start : start + CHUNK]], dtype=np.float32))
        on_progress(min(start + CHUNK, len(bulk)), len(order))
    queries = np.asarray(vectors[last], dtype=np.float32)
    plan = _measured(index, plan, queries)
    index.add(queries)
    on_progress(len(order), len(order))
    return plan


def _measured(index: Index, plan: Plan, queries: NDArray[np.float32]) -> Plan:
    """The plan with efforts, never below its own, that reach the targets for these queries."""
    if not len(queries):
        return plan
    truth = _nearest(storage_of(index), queries)
    reached: dict[int, float] = {}
    for effort in LADDER[plan.kind]:
        if effort < plan.effort:
            continue
        _, found = index.search(queries, MEASURED_AT, params=_parameters(plan.kind, effort))
        reached[effort] = float(np.mean([len(np.intersect1d(*rows)) for rows in zip(found, truth, strict=True)])) / (
            MEASURED_AT
        )
        if reached[effort] >= max(plan.target, FILTERED_TARGET):
            break
    effort = _first(reached, plan.target)
    filtered = max(plan.filtered_effort, _first(reached, FILTERED_TARGET))
    if reached[effort] < plan.target:
        _log.warning("Recall@%d is %.4f, below the target %.4f", MEASURED_AT, reached[effort], plan.target)
    return plan.model_copy(
        update={"effort": effort, "filtered_effort": filtered, "recall": reached[effort], "queries": len(queries)}
    )


def _first(reached: dict[int, float], target: float) -> int:
    """The least effort that reached the target, or else the most accurate one."""
    return next(
        (effort for effort, recall in reached.items() if recall >= target), max(reached, key=reached.__getitem__)
    )


def _nearest(storage: Index, queries: NDArray[np.float32]) -> NDArray[np.int64]:
    """The nearest positions by exact search, through matrix products, which a scan of one query after another is not."""
    library = faiss()
    codes = library.rev_swig_ptr(storage.codes.data(), storage.ntotal * storage.code_size)
    rows = codes.view(np.float16).reshape(storage.ntotal, -1)
    heap = library.ResultHeap(len(queries), MEASURED_AT, keep_max=True)
    for start in range(0, len(rows), CHUNK):
        block = rows[start : start + CHUNK].astype(np.float32)
        scores, positions = library.knn(
            queries, block, min(MEASURED_AT, len(block)), metric=library.METRIC_INNER_PRODUCT
        )
        heap.add_result(scores, positions + start)
    heap.finalize()
    nearest: NDArray[np.int64] = heap.I
    return nearest
