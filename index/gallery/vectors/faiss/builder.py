"""Building an index: its kind by size, and how hard a search must try, measured with vectors that are held out."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.imports import faiss
from index.gallery.vectors.faiss.searcher import (
    CHUNK,
    MEASURED_AT,
    SCAN,
    SCAN_COST,
    STEP_COST,
    Index,
    IndexFileError,
    IndexKind,
    Plan,
    Queries,
    Searcher,
    Vectors,
    append,
    empty_storage,
    storage_of,
    stored_vectors,
    thread_limit,
)

Progress = Callable[[int, int], None]

EXACT_UP_TO = 20_000
"""Vectors up to which comparing with all of them is fast enough that a graph is not worth its build."""
HNSW_UP_TO = 4_000_000
"""Vectors up to which a graph is built: beyond, its build takes hours, and inverted lists must do."""
LINKS = 32
CONSTRUCTION_EFFORT = 128
HELD_OUT = 256
"""Vectors that a build holds out as queries to measure recall with, or half of all; below 64 chance would decide."""
FILTERED_TARGET = 0.995
"""Filtered searches walk further out, where a graph is less accurate: they start from this to end above 0.99."""
DEPTHS = (40, 160, 640)
"""Numbers of results by which a build learns how the effort grows: to find ten among a tenth of all is to find
a hundred."""
ROUNDING = 1e-5
"""What two ways to sum one score may differ by."""
LADDER = {
    "exact": (0,),
    "hnsw": (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    "ivf": (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
}
"""Efforts to try, from fast to accurate: the graph's efSearch, or the inverted lists to read."""

_log = logging.getLogger(__name__)


class BuildResult(NamedTuple):
    """An index with its plan; its newest positions hold the rows `order` of the vectors that it was given."""

    index: Index
    plan: Plan
    order: NDArray[np.int64]


def choose_kind(count: int) -> IndexKind:
    """The kind of index for a number of vectors."""
    return "exact" if count <= EXACT_UP_TO else "hnsw" if count <= HNSW_UP_TO else "ivf"


def build(
    vectors: Vectors,
    *,
    target: float = 0.98,
    kind: IndexKind | None = None,
    threads: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> BuildResult:
    """An index of the kind that suits the number of vectors, which may be a memory map, and its measured plan."""
    kind = kind or choose_kind(len(vectors))
    least = LADDER[kind][0]
    plan = Plan(kind=kind, effort=least, filtered_effort=least, growth=0.0, recall=1.0, target=target, queries=0)
    with thread_limit(threads):
        return _grow(_empty(kind, vectors), plan, vectors, on_progress)


def extend(
    index: Index,
    plan: Plan,
    vectors: Vectors,
    *,
    threads: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> BuildResult:
    """Adds vectors to an index that was read into memory, and measures with some of them whether its plan still holds.

    Old positions stay; position `old count + p` holds row order[p] of the new vectors.
    """
    if not storage_of(index).codes.is_owned:  # FAISS would abort the process
        raise IndexFileError("A memory-mapped index cannot be extended.", "Read it with read_index.")
    with thread_limit(threads):
        return _grow(index, plan, vectors, on_progress)


def _empty(kind: IndexKind, vectors: Vectors) -> Index:
    """An index of a kind, trained with a sample of the vectors where it needs that."""
    library = faiss()
    count, dimension = vectors.shape
    if kind == "exact":
        return empty_storage(dimension)
    if kind == "hnsw":
        index = library.IndexHNSWSQ(dimension, library.ScalarQuantizer.QT_fp16, LINKS, library.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = CONSTRUCTION_EFFORT
        return index
    lists = max(1, min(int(4 * count**0.5), count // 40))
    base = library.index_factory(dimension, f"IVF{lists},RaBitQ", library.METRIC_INNER_PRODUCT)
    sample = np.random.default_rng(0).choice(count, min(count, 40 * lists), replace=False)
    base.train(vectors[np.sort(sample)].astype(np.float32))
    return library.IndexRefine(base, empty_storage(dimension))


def _grow(index: Index, plan: Plan, vectors: Vectors, on_progress: Progress) -> BuildResult:
    """Adds the vectors; a random part of them comes last, after it has measured the plan as queries."""
    count = len(vectors)
    rows = np.arange(count)
    if plan.kind == "exact":
        append(index, vectors)
        on_progress(count, count)
        return BuildResult(index, plan, rows)
    size = min(HELD_OUT, count // 2) if count >= 128 else 0
    held_out = np.sort(np.random.default_rng(0).choice(count, size, replace=False))
    rest = np.delete(rows, held_out)
    repeats = _are_repeats(vectors)[rest]
    order = np.concatenate((rest[~repeats], rest[repeats], held_out))
    done = 0
    for group in (rest[~repeats], rest[repeats]):
        for start in range(0, len(group), CHUNK):
            part = group[start : start + CHUNK]
            index.add(vectors[part].astype(np.float32))
            done += len(part)
            on_progress(done, count)
    queries = vectors[held_out].astype(np.float32)
    if size:
        plan = _measured(Searcher(index, plan), queries)
        index.add(queries)
    on_progress(count, count)
    return BuildResult(index, plan, order)


def _are_repeats(vectors: Vectors) -> NDArray[np.bool_]:
    """Which rows have been there before, by a hash.

    Thousands of copies of one picture, say "no photo yet", fill each other's links: added among the others, they cut a
    graph in pieces, after them they do not.
    """
    factors = np.random.default_rng(0).integers(1 << 63, size=vectors.shape[1], dtype=np.uint64) | np.uint64(1)
    names = np.empty(len(vectors), np.uint64)
    step = CHUNK // 16
    for start in range(0, len(vectors), step):
        block = np.ascontiguousarray(vectors[start : start + step]).view(np.uint16)
        names[start : start + step] = block.astype(np.uint64) @ factors
    repeats = np.ones(len(vectors), np.bool_)
    repeats[np.unique(names, return_index=True)[1]] = False
    return repeats


def _measured(searcher: Searcher, queries: Queries) -> Plan:
    """The plan with the efforts, never below those it has, that reach the targets for these queries."""
    plan = searcher.plan
    if plan.scans:
        return plan
    truth = _best_scores(searcher.storage, queries, DEPTHS[-1])

    def least(results: int, target: float, first: int) -> tuple[int, float]:
        """The least effort, from the first on, that reaches the target, and its recall."""
        for effort in _affordable(searcher):
            if effort >= first:
                scores, _ = searcher.approximate_search(queries, results, effort)
                # By score, not by position: of copies of one photo any will do.
                recall = float(np.mean(scores >= truth[:, results - 1 : results] - ROUNDING))
                if recall >= target:
                    return effort, recall
        return SCAN, 1.0

    top = min(MEASURED_AT, truth.shape[1])
    effort, recall = least(top, plan.target, plan.effort)
    if effort == SCAN:
        _log.warning("No effort reaches a recall of %.4f: searches compare with every vector.", plan.target)
        filtered, growth = SCAN, plan.growth
    else:
        beyond = plan.filtered_effort == SCAN  # for what is there already
        filtered = SCAN if beyond else least(top, FILTERED_TARGET, max(effort, plan.filtered_effort))[0]
        depths = [depth for depth in DEPTHS if depth <= truth.shape[1] and filtered != SCAN]
        deeper = {depth: least(depth, FILTERED_TARGET, filtered)[0] for depth in depths}
        growth = max([plan.growth, *(_power(effort, filtered, depth / top) for depth, effort in deeper.items())])
    return plan.model_copy(
        update={
            "effort": effort,
            "filtered_effort": filtered,
            "growth": growth,
            "recall": recall,
            "queries": len(queries),
        }
    )


def _affordable(searcher: Searcher) -> Iterator[int]:
    """The efforts of the ladder, and those above it that cost less than comparing with every vector."""
    kind = searcher.plan.kind
    yield from LADDER[kind]
    effort = 2 * LADDER[kind][-1]
    while effort * STEP_COST[kind] < searcher.count * SCAN_COST:
        yield effort
        effort *= 2


def _power(effort: int, base: int, times: float) -> float:
    """The power of `times` that the effort is of its base; the whole of it where no effort was enough."""
    return 1.0 if effort == SCAN else min(1.0, math.log(effort / base) / math.log(times))


def _best_scores(storage: Index, queries: Queries, count: int) -> NDArray[np.float32]:
    """The scores of the true neighbours, by products of matrices: for many queries at once faster than scans."""
    library = faiss()
    rows = stored_vectors(storage)
    heap = library.ResultHeap(len(queries), min(count, len(rows)), keep_max=True)
    for start in range(0, len(rows), CHUNK):
        block = rows[start : start + CHUNK].astype(np.float32)
        found = library.knn(queries, block, min(heap.k, len(block)), metric=library.METRIC_INNER_PRODUCT)
        heap.add_result(found[0], found[1] + start)
    heap.finalize()
    scores: NDArray[np.float32] = heap.D
    return scores
