"""Searches every kind of index and compares with an exact search in NumPy: recall, allow lists, threads, files."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from index._util.imports import faiss
from index.gallery.vectors.faiss import searcher
from index.gallery.vectors.faiss.builder import build, extend
from index.gallery.vectors.faiss.searcher import AllowList, IndexFileError, Searcher
from index.gallery.vectors.faiss.settings import IndexKind
from tests.support.clustered_vectors import (
    CHEAP_STEPS,
    COUNT,
    KINDS,
    build_shop,
    nearest_rows,
    queries_near,
    recall,
    shop_vectors,
)


def test_an_exact_index_stores_the_bytes_of_the_vectors() -> None:
    vectors = shop_vectors()[0]
    through_floats = searcher.exact_index(vectors[:0])
    through_floats.add(vectors.astype(np.float32))
    queries = queries_near(np.arange(50))
    for ours, theirs in zip(
        searcher.exact_index(vectors).search(queries, 10), through_floats.search(queries, 10), strict=True
    ):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 10, 60])
def test_a_search_has_the_recall_of_its_plan(kind: IndexKind, count: int) -> None:
    index, plan, order = build_shop(kind)
    queries = queries_near(np.arange(0, COUNT, 20))
    scores, positions = Searcher(index, plan, CHEAP_STEPS).search(queries, count)
    assert plan.recall >= plan.target
    assert recall(positions, order, nearest_rows(queries, shop_vectors()[0], count)) >= 0.96
    rows = shop_vectors()[0][order[positions]].astype(np.float32)
    assert np.allclose(scores, np.einsum("qd,qcd->qc", queries, rows), atol=1e-3)
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 1.0])
def test_a_filter_on_scattered_rows_finds_what_an_exact_search_finds(kind: IndexKind, share: float) -> None:
    settings = CHEAP_STEPS.model_copy(update={"copied_up_to": 100})
    index, plan, order = build_shop(kind)
    allowed = np.random.default_rng(2).random(COUNT) < share
    queries = queries_near(np.arange(0, COUNT, 20))
    _, positions = Searcher(index, plan, settings).search(queries, 10, AllowList(allowed[order]), filtered=True)
    assert allowed[order[positions]].all()
    assert recall(positions, order, nearest_rows(queries, shop_vectors()[0], 10, allowed)) >= 0.99


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("categories", [1, 5, 15])
@pytest.mark.parametrize("inside", [True, False])
def test_a_filter_on_clusters_finds_neighbours_of_queries_inside_and_outside_them(
    kind: IndexKind, categories: int, inside: bool
) -> None:
    index, plan, order = build_shop(kind)
    vectors, clusters = shop_vectors()
    allowed = clusters < categories
    queries = queries_near(np.flatnonzero(allowed == inside)[::10])
    _, positions = Searcher(index, plan, CHEAP_STEPS).search(queries, 10, AllowList(allowed[order]), filtered=True)
    assert allowed[order[positions]].all()
    assert recall(positions, order, nearest_rows(queries, vectors, 10, allowed)) >= 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_dead_positions_are_never_returned(kind: IndexKind) -> None:
    index, plan, order = build_shop(kind)
    queries = queries_near(np.arange(100))
    alive = ~np.isin(order, np.arange(100))  # each query's own product is dead
    _, positions = Searcher(index, plan, CHEAP_STEPS).search(queries, 10, AllowList(alive))
    assert alive[positions].all()
    assert recall(positions, order, nearest_rows(queries, shop_vectors()[0], 10, np.arange(COUNT) >= 100)) >= 0.96


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filtered", [True, False])
def test_results_are_padded_if_one_position_or_none_is_allowed(kind: IndexKind, filtered: bool) -> None:
    index, plan, _ = build_shop(kind)
    mask = np.zeros(COUNT, dtype=np.bool_)
    scores, positions = Searcher(index, plan).search(queries_near(np.arange(3)), 5, AllowList(mask), filtered=filtered)
    assert (positions == -1).all()
    assert scores.shape == (3, 5)
    mask[7] = True
    _, positions = Searcher(index, plan).search(queries_near(np.arange(3)), 5, AllowList(mask), filtered=filtered)
    assert positions.tolist() == [[7, -1, -1, -1, -1]] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_padded_if_more_are_requested_than_vectors_exist(kind: IndexKind) -> None:
    index, plan, _ = build_shop(kind)
    _, positions = Searcher(index, plan).search(queries_near(np.arange(2)), COUNT + 5)
    assert (positions[:, COUNT:] == -1).all()
    assert np.array_equal(np.sort(positions[:, :COUNT], axis=1), np.tile(np.arange(COUNT), (2, 1)))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("filtered", [False, True])
def test_results_are_complete_if_the_effort_reaches_too_few_vectors(queries: int, filtered: bool) -> None:
    index, plan, _ = build_shop("ivf")
    poor = plan.model_copy(update={"effort": 1, "filtered_effort": 1, "growth": 0.0})
    allowed = AllowList(np.arange(COUNT) % 3 > 0) if filtered else None
    found = Searcher(index, poor, CHEAP_STEPS).search(
        queries_near(np.arange(queries)), 1500, allowed, filtered=filtered
    )
    assert (found[1] >= 0).all() and all(len(set(row)) == 1500 for row in found[1].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_index_finds_the_same_mapped_or_read(kind: IndexKind, tmp_path: Path) -> None:
    index, plan, order = build_shop(kind)
    queries, even = queries_near(np.arange(100)), AllowList(order % 2 == 0)
    searcher.write_index(index, tmp_path / "index.faiss")
    mapped, read = searcher.open_index(tmp_path / "index.faiss"), searcher.read_index(tmp_path / "index.faiss")
    for other in (mapped, read):
        for allowed in (None, even):
            ours = Searcher(index, plan, CHEAP_STEPS).search(queries, 10, allowed)
            theirs = Searcher(other, plan, CHEAP_STEPS).search(queries, 10, allowed)
            assert np.array_equal(ours[0], theirs[0])
            assert np.array_equal(ours[1], theirs[1])
    assert not searcher.storage_of(mapped).codes.is_owned
    assert extend(read, plan, shop_vectors()[0][:50]).index.ntotal == COUNT + 50
    if kind == "ivf":
        assert extend(mapped, plan, shop_vectors()[0][:50]).index.ntotal == COUNT + 50
    else:
        with pytest.raises(IndexFileError, match="memory-mapped"):
            extend(mapped, plan, shop_vectors()[0][:50])


def test_vectors_are_stored_in_the_format_of_faiss(tmp_path: Path) -> None:
    vectors = shop_vectors()[0]
    searcher.store_vectors([vectors[:700], vectors[700:]], tmp_path / "stored")
    searcher.write_index(searcher.exact_index(vectors), tmp_path / "written")
    assert (tmp_path / "stored").read_bytes() == (tmp_path / "written").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(kind: IndexKind, kept: float, tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    searcher.write_index(build_shop(kind).index, path)
    intact = path.read_bytes()
    path.write_bytes(intact[: int(kept * len(intact))])
    for open_file in (searcher.open_index, searcher.read_index):
        with pytest.raises(IndexFileError, match=r"index\.faiss"):
            open_file(path)


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("not an index, but long enough to be read" * 100)
    for open_file in (searcher.open_index, searcher.read_index):
        for name in ("missing", "foreign"):
            with pytest.raises(IndexFileError, match=name):
                open_file(tmp_path / name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_limit_ends_with_the_call(kind: IndexKind) -> None:
    library = faiss()
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(3)
    try:
        index, plan, _ = build(shop_vectors()[0][:500], kind=kind, threads=1)
        Searcher(index, plan).search(queries_near(np.arange(1)), 10)
        assert library.omp_get_max_threads() == 3
    finally:
        library.omp_set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_searcher_and_an_allow_list(kind: IndexKind) -> None:
    index, plan, order = build_shop(kind)
    shared, allowed = Searcher(index, plan, CHEAP_STEPS), AllowList(order % 3 > 0)
    queries = queries_near(np.arange(200))
    _, together = shared.search(queries, 10, allowed, filtered=True)
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda query: shared.search(query[None], 10, allowed, filtered=True)[1][0], queries))
    assert np.array_equal(together, alone)


def test_a_memory_map_is_read_ahead_only_while_its_vectors_are_read_in_order(tmp_path: Path) -> None:
    storage = searcher.store_vectors([np.zeros((5000, 64), np.float16)], tmp_path / "vectors")

    def advice() -> set[str]:
        parts = Path("/proc/self/smaps").read_text().split(str(tmp_path / "vectors"))[1:]
        flags = " ".join(part[part.index("VmFlags:") :].splitlines()[0] for part in parts)
        return {"sr", "rr"}.intersection(flags.split())

    assert advice() == {"rr"}
    with searcher.sequential_reads(storage):
        assert "sr" in advice()
    assert advice() == {"rr"}


def test_vectors_in_memory_need_no_advice() -> None:
    storage = searcher.exact_index(np.ones((3, 8), np.float16))
    with searcher.sequential_reads(storage):
        assert searcher.stored_vectors(storage).sum() == 24
