"""Builds an index: chooses its kind by size, and measures with held-out vectors the effort that a search needs."""

import logging
import math
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index._util.imports import faiss
from index.gallery.vectors.faiss import settings as defaults
from index.gallery.vectors.faiss.gpu import POOL, GpuError, GpuPool, build_graph, load_vectors
from index.gallery.vectors.faiss.searcher import (
    RECALL_AT,
    SCAN,
    Index,
    IndexFileError,
    Plan,
    Queries,
    Searcher,
    Vectors,
    append,
    empty_storage,
    lists_of,
    storage_of,
    store_vectors,
    stored_vectors,
    thread_limit,
)
from index.gallery.vectors.faiss.settings import FaissSettings, IndexKind

Progress = Callable[[int, int], None]
"""Callback with the number of vectors done and their total."""

_MIN_MEASURABLE = 128
"""Vectors below which none are held out: a recall measured with fewer than 64 queries is too noisy."""
_ROUNDING = 1e-5
"""Largest difference between two ways to sum one score."""

_log = logging.getLogger(__name__)


class BuildResult(NamedTuple):
    """An index with its plan; its newest positions hold the rows `order` of the vectors that were passed in."""

    index: Index
    plan: Plan
    order: NDArray[np.int64]


def build(
    vectors: Vectors,
    *,
    target: float = 0.98,
    kind: IndexKind | None = None,
    settings: FaissSettings | None = None,
    threads: int | None = None,
    scratch: Path | None = None,
    on_progress: Progress = lambda done, total: None,
    gpus: GpuPool = POOL,
) -> BuildResult:
    """Builds an index of vectors, which may be a memory map, and measures its plan.

    The number of vectors decides the kind by default. Inverted lists keep the vectors that re-rank in the scratch file,
    which must exist until the index was written: they may exceed the memory, in which they are without it.
    """
    settings = settings or defaults.DEFAULT
    kind = kind or settings.choose_kind(len(vectors))
    effort = settings.efforts(kind)[0]
    plan = Plan(kind=kind, effort=effort, filtered_effort=effort, growth=0.0, recall=1.0, target=target, queries=0)
    with thread_limit(threads):
        if kind == "ivf":
            lists = _empty_lists(vectors, settings)
            return _add_to_lists(lists, None, plan, vectors, settings, scratch, on_progress, gpus)
        return _add(_empty_index(kind, vectors.shape[1], settings), plan, vectors, settings, on_progress, gpus)


def extend(
    index: Index,
    plan: Plan,
    vectors: Vectors,
    *,
    settings: FaissSettings | None = None,
    threads: int | None = None,
    scratch: Path | None = None,
    on_progress: Progress = lambda done, total: None,
    gpus: GpuPool = POOL,
) -> BuildResult:
    """Adds vectors to an index that was read for it, and measures with some of them whether its plan still holds.

    Old positions stay; position `old count + p` holds row order[p] of the new vectors. `scratch` as for `build`.
    """
    if plan.kind == "ivf":
        base, old = lists_of(index), stored_vectors(storage_of(index))
        with thread_limit(threads):
            return _add_to_lists(base, old, plan, vectors, settings or defaults.DEFAULT, scratch, on_progress, gpus)
    if not storage_of(index).codes.is_owned:  # FAISS would abort the process
        raise IndexFileError("A memory-mapped index cannot be extended.", "Read it with read_index.")
    with thread_limit(threads):
        return _add(index, plan, vectors, settings or defaults.DEFAULT, on_progress, gpus)


def _empty_index(kind: IndexKind, dimension: int, settings: FaissSettings) -> Index:
    library = faiss()
    if kind == "exact":
        return empty_storage(dimension)
    index = library.IndexHNSWSQ(
        dimension, library.ScalarQuantizer.QT_fp16, settings.graph_links, library.METRIC_INNER_PRODUCT
    )
    index.hnsw.efConstruction = settings.construction_effort
    return index


def _empty_lists(vectors: Vectors, settings: FaissSettings) -> Index:
    """Returns empty inverted lists, trained with a sample of the vectors; a graph finds the lists to read."""
    library = faiss()
    count, dimension = vectors.shape
    lists = settings.choose_lists(count)
    index = library.index_factory(
        dimension, f"IVF{lists}_HNSW{settings.graph_links},RaBitQfs", library.METRIC_INNER_PRODUCT
    )
    index.cp.niter = settings.training_rounds
    sample = np.random.default_rng(0).choice(count, min(count, settings.training_vectors * lists), replace=False)
    index.train(vectors[np.sort(sample)].astype(np.float32))
    return index


def _add(
    index: Index, plan: Plan, vectors: Vectors, settings: FaissSettings, on_progress: Progress, gpus: GpuPool
) -> BuildResult:
    """Adds the vectors; a random sample of them is added last, after it has measured the plan as queries."""
    count = len(vectors)
    rows = np.arange(count)
    if plan.kind == "exact":
        append(index, vectors, settings.chunk_rows)
        on_progress(count, count)
        return BuildResult(index, plan, rows)
    held_out = _choose_queries(count, settings)
    rest = np.delete(rows, held_out)
    is_duplicate = _find_duplicates(vectors, settings.chunk_rows)[rest]
    order = np.concatenate((rest[~is_duplicate], rest[is_duplicate], held_out))
    first = rest[~is_duplicate]
    is_linked = plan.kind == "hnsw" and not index.ntotal and _link_on_gpus(index, vectors[first], settings, gpus)
    done = len(first) if is_linked else 0
    for group in (first[done:], rest[is_duplicate]):
        for start in range(0, len(group), settings.chunk_rows):
            chunk = group[start : start + settings.chunk_rows]
            index.add(vectors[chunk].astype(np.float32))
            done += len(chunk)
            on_progress(done, count)
    queries = vectors[held_out].astype(np.float32)
    if len(queries):
        measured = _measure_plan(Searcher(index, plan, settings), queries, gpus)
        if is_linked and measured.scans:
            gpus.give_up(GpuError("no effort reaches the recall with the graph that the GPU has built"))
            return _add(_empty_index("hnsw", index.d, settings), plan, vectors, settings, on_progress, gpus)
        plan = measured
        index.add(queries)
    on_progress(count, count)
    return BuildResult(index, plan, order)


def _link_on_gpus(index: Index, vectors: Vectors, settings: FaissSettings, gpus: GpuPool) -> bool:
    """Adds the first vectors to an HNSW index with the links that GPUs have built; returns false if they cannot."""
    graph = build_graph(gpus, vectors, settings)
    if graph is None:
        return False
    append(index.storage, vectors, settings.chunk_rows)
    index.hnsw, index.ntotal = graph.hnsw, len(vectors)  # a copy
    index.hnsw.efConstruction = settings.construction_effort
    return True


def _add_to_lists(
    lists: Index,
    old: Vectors | None,
    plan: Plan,
    vectors: Vectors,
    settings: FaissSettings,
    scratch: Path | None,
    on_progress: Progress,
    gpus: GpuPool,
) -> BuildResult:
    """Adds the vectors to inverted lists with the old ones, those last that have measured the plan as queries."""
    library = faiss()
    count = len(vectors)
    held_out = _choose_queries(count, settings)
    order = np.concatenate((np.delete(np.arange(count), held_out), held_out))
    rest = count - len(held_out)
    parts = () if old is None else (old,)
    storage = store_vectors(chain(parts, _chunks(vectors, order, settings)), scratch)
    for start in range(0, rest, settings.chunk_rows):
        lists.add(vectors[order[start : min(start + settings.chunk_rows, rest)]].astype(np.float32))
        on_progress(min(start + settings.chunk_rows, rest), count)
    total, storage.ntotal = storage.ntotal, lists.ntotal  # until the plan is measured, without the queries
    index = library.IndexRefine(lists, storage)
    queries = vectors[held_out].astype(np.float32)
    if len(queries):
        plan = _measure_plan(Searcher(index, plan, settings), queries, gpus)
        lists.add(queries)
    storage.ntotal = index.ntotal = total
    on_progress(count, count)
    return BuildResult(index, plan, order)


def _chunks(vectors: Vectors, order: NDArray[np.int64], settings: FaissSettings) -> Iterator[Vectors]:
    for start in range(0, len(order), settings.chunk_rows):
        yield vectors[order[start : start + settings.chunk_rows]]


def _choose_queries(count: int, settings: FaissSettings) -> NDArray[np.int64]:
    """Returns the rows of the vectors that a build holds out."""
    size = min(settings.held_out, count // 2) if count >= _MIN_MEASURABLE else 0
    return np.sort(np.random.default_rng(0).choice(count, size, replace=False))


def _find_duplicates(vectors: Vectors, chunk_rows: int) -> NDArray[np.bool_]:
    """Marks rows that equal an earlier row, by a hash.

    Thousands of copies of one image, such as "no photo yet", fill each other's links. Added among the other vectors
    they disconnect a graph; added after them they do not.
    """
    factors = np.random.default_rng(0).integers(1 << 63, size=vectors.shape[1], dtype=np.uint64) | np.uint64(1)
    hashes = np.empty(len(vectors), np.uint64)
    step = max(1, chunk_rows // 16)
    for start in range(0, len(vectors), step):
        block = np.ascontiguousarray(vectors[start : start + step]).view(np.uint16)
        hashes[start : start + step] = block.astype(np.uint64) @ factors
    duplicates = np.ones(len(vectors), np.bool_)
    duplicates[np.unique(hashes, return_index=True)[1]] = False
    return duplicates


def _measure_plan(searcher: Searcher, queries: Queries, gpus: GpuPool) -> Plan:
    """Returns the plan with the efforts that reach the targets for these queries; efforts never decrease."""
    plan, settings = searcher.plan, searcher.settings
    if plan.scans:
        return plan
    truth = _best_scores(searcher.storage, queries, settings, gpus)

    def find_effort(results: int, target: float, at_least: int) -> tuple[int, float]:
        """Returns the smallest effort that reaches the target, and its recall."""
        for effort in _affordable_efforts(searcher):
            if effort >= at_least:
                scores, _ = searcher.approximate_search(queries, results, effort)
                # Compares scores, not positions: duplicates of one photo are interchangeable.
                recall = float(np.mean(scores >= truth[:, results - 1 : results] - _ROUNDING))
                if recall >= target:
                    return effort, recall
        return SCAN, 1.0

    top = min(RECALL_AT, truth.shape[1])
    effort, recall = find_effort(top, plan.target, plan.effort)
    if effort == SCAN:
        _log.warning("No effort reaches a recall of %.4f: searches compare with every vector.", plan.target)
        filtered, growth = SCAN, plan.growth
    else:
        target = settings.filtered_target
        already_scans = plan.filtered_effort == SCAN
        filtered = SCAN if already_scans else find_effort(top, target, max(effort, plan.filtered_effort))[0]
        depths = [depth for depth in settings.depths if depth <= truth.shape[1] and filtered != SCAN]
        deeper = {depth: find_effort(depth, target, filtered)[0] for depth in depths}
        growth = max([plan.growth, *(_exponent(effort, filtered, depth / top) for depth, effort in deeper.items())])
    return plan.model_copy(
        update={
            "effort": effort,
            "filtered_effort": filtered,
            "growth": growth,
            "recall": recall,
            "queries": len(queries),
        }
    )


def _affordable_efforts(searcher: Searcher) -> Iterator[int]:
    """Yields the settings' efforts, then doubles the last one for as long as it costs less than a scan."""
    settings, kind = searcher.settings, searcher.plan.kind
    yield from settings.efforts(kind)
    effort = 2 * settings.efforts(kind)[-1]
    while effort * settings.step_cost(kind) < searcher.count * settings.scan_cost:
        yield effort
        effort *= 2


def _exponent(effort: int, base: int, factor: float) -> float:
    """Returns x of `effort = base * factor ** x`, at most 1; 1 where no effort was enough."""
    return 1.0 if effort == SCAN else min(1.0, math.log(effort / base) / math.log(factor))


def _best_scores(storage: Index, queries: Queries, settings: FaissSettings, gpus: GpuPool) -> NDArray[np.float32]:
    """Returns the scores of the true neighbours, from GPUs or by matrix products, which beat scans here."""
    library = faiss()
    vectors = stored_vectors(storage)
    count = min(settings.depths[-1], len(vectors))
    loaded = load_vectors(gpus, storage, settings)
    if loaded and (found := loaded.search(queries, count)):
        return found[0]
    heap = library.ResultHeap(len(queries), count, keep_max=True)
    for start in range(0, len(vectors), settings.chunk_rows):
        block = vectors[start : start + settings.chunk_rows].astype(np.float32)
        scores, positions = library.knn(queries, block, min(heap.k, len(block)), metric=library.METRIC_INNER_PRODUCT)
        heap.add_result(scores, positions + start)
    heap.finalize()
    best: NDArray[np.float32] = heap.D
    return best
