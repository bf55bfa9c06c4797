"""Approximate search against NumPy's exact one: recall, selections, growth and files, for each kind of index."""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from index._util.imports import faiss
from index.gallery.vectors.faiss import builder
from index.gallery.vectors.faiss import searcher as ann
from index.gallery.vectors.faiss.builder import BuildResult
from index.gallery.vectors.faiss.searcher import AllowList, IndexFileError, IndexKind, Queries, Searcher, Vectors

COUNT, DIMENSION, CLUSTERS = 2500, 32, 20
KINDS: tuple[IndexKind, ...] = ("exact", "hnsw", "ivf")


@cache
def shop(count: int = COUNT, seed: int = 0) -> tuple[Vectors, NDArray[np.int64]]:
    """Normalised vectors of products in clusters, and the cluster of each."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(9).standard_normal((CLUSTERS, DIMENSION))
    clusters = random.integers(CLUSTERS, size=count)
    vectors = centres[clusters] + 0.7 * random.standard_normal((count, DIMENSION))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16), clusters


def photos(rows: NDArray[np.int64], seed: int = 1) -> Queries:
    """Queries near the given rows, but none of them."""
    vectors = shop()[0][rows].astype(np.float32)
    shifted = vectors + 0.1 * np.random.default_rng(seed).standard_normal(vectors.shape).astype(np.float32)
    shifted /= np.linalg.norm(shifted, axis=1, keepdims=True)
    return shifted


@cache
def built(kind: IndexKind) -> BuildResult:
    return builder.build(shop()[0], kind=kind, threads=1)


def true_rows(
    queries: Queries, vectors: Vectors, count: int, allowed: NDArray[np.bool_] | None = None
) -> list[set[int]]:
    scores = queries @ vectors.astype(np.float32).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    best = np.argsort(-scores, axis=1)[:, :count]
    return [{int(row) for row in rows if np.isfinite(scores[query, row])} for query, rows in enumerate(best)]


def recall(found: NDArray[np.int64], order: NDArray[np.int64], truth: list[set[int]]) -> float:
    rows = [{int(order[position]) for position in positions if position >= 0} for positions in found]
    return sum(len(have & want) for have, want in zip(rows, truth, strict=True)) / sum(map(len, truth))


@pytest.fixture
def cheap_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes walks look so cheap that a test gallery is not simply scanned."""
    monkeypatch.setattr(ann, "STEP_COST", {"hnsw": 0.5, "ivf": 0.5})


def test_the_number_of_vectors_decides_the_kind() -> None:
    counts = (1, builder.EXACT_UP_TO, builder.EXACT_UP_TO + 1, builder.HNSW_UP_TO, builder.HNSW_UP_TO + 1)
    assert [builder.choose_kind(count) for count in counts] == ["exact", "exact", "hnsw", "hnsw", "ivf"]


def test_an_exact_index_stores_the_vectors_bit_by_bit() -> None:
    vectors = shop()[0]
    through_floats = ann.exact_index(vectors[:0])
    through_floats.add(vectors.astype(np.float32))
    queries = photos(np.arange(50))
    for ours, theirs in zip(
        ann.exact_index(vectors).search(queries, 10), through_floats.search(queries, 10), strict=True
    ):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 10, 60])
@pytest.mark.usefixtures("cheap_walks")
def test_a_search_has_the_recall_that_its_plan_promises(kind: IndexKind, count: int) -> None:
    index, plan, order = built(kind)
    queries = photos(np.arange(0, COUNT, 20))
    scores, positions = Searcher(index, plan).search(queries, count)
    assert plan.recall >= plan.target
    assert recall(positions, order, true_rows(queries, shop()[0], count)) >= 0.96
    rows = shop()[0][order[positions]].astype(np.float32)
    assert np.allclose(scores, np.einsum("qd,qcd->qc", queries, rows), atol=1e-3)
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_build_holds_every_row_once_and_reports_its_progress(
    kind: IndexKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ann, builder):
        monkeypatch.setattr(module, "CHUNK", 300)
    seen: list[tuple[int, int]] = []
    index, plan, order = builder.build(shop()[0][:1000], kind=kind, on_progress=lambda *step: seen.append(step))
    assert index.ntotal == 1000
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert np.array_equal(ann.storage_of(index).reconstruct_n(0, 1000), shop()[0][order].astype(np.float32))
    assert seen[-1] == (1000, 1000)
    assert seen == sorted(seen)
    assert plan.queries == (0 if kind == "exact" else builder.HELD_OUT)


def test_a_build_reads_vectors_from_a_memory_map(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", shop()[0])
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert builder.build(mapped, kind="hnsw").plan == built("hnsw").plan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.usefixtures("cheap_walks")
def test_a_filter_that_matches_at_random_finds_what_an_exact_search_finds(
    kind: IndexKind, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ann, "GATHERED", 100)
    index, plan, order = built(kind)
    allowed = np.random.default_rng(2).random(COUNT) < share
    queries = photos(np.arange(0, COUNT, 20))
    _, positions = Searcher(index, plan).search(queries, 10, AllowList(allowed[order]), filtered=True)
    assert allowed[order[positions]].all()
    assert recall(positions, order, true_rows(queries, shop()[0], 10, allowed)) >= 0.99


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("categories", [1, 5, 15])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.usefixtures("cheap_walks")
def test_a_filter_on_whole_clusters_serves_queries_in_and_out_of_them(
    kind: IndexKind, categories: int, inside: bool
) -> None:
    index, plan, order = built(kind)
    vectors, clusters = shop()
    allowed = clusters < categories
    queries = photos(np.flatnonzero(allowed == inside)[::10])
    _, positions = Searcher(index, plan).search(queries, 10, AllowList(allowed[order]), filtered=True)
    assert allowed[order[positions]].all()
    assert recall(positions, order, true_rows(queries, vectors, 10, allowed)) >= 0.99


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("cheap_walks")
def test_dead_positions_are_never_answered(kind: IndexKind) -> None:
    index, plan, order = built(kind)
    queries = photos(np.arange(100))
    alive = ~np.isin(order, np.arange(100))  # each query's own product is dead
    _, positions = Searcher(index, plan).search(queries, 10, AllowList(alive))
    assert alive[positions].all()
    assert recall(positions, order, true_rows(queries, shop()[0], 10, np.arange(COUNT) >= 100)) >= 0.96


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filtered", [True, False])
def test_selections_of_nothing_and_of_one_fill_up(kind: IndexKind, filtered: bool) -> None:
    index, plan, _ = built(kind)
    mask = np.zeros(COUNT, dtype=np.bool_)
    scores, positions = Searcher(index, plan).search(photos(np.arange(3)), 5, AllowList(mask), filtered=filtered)
    assert (positions == -1).all()
    assert scores.shape == (3, 5)
    mask[7] = True
    _, positions = Searcher(index, plan).search(photos(np.arange(3)), 5, AllowList(mask), filtered=filtered)
    assert positions.tolist() == [[7, -1, -1, -1, -1]] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_more_results_than_vectors_answers_each_once_and_fills_up(kind: IndexKind) -> None:
    index, plan, _ = built(kind)
    _, positions = Searcher(index, plan).search(photos(np.arange(2)), COUNT + 5)
    assert (positions[:, COUNT:] == -1).all()
    assert np.array_equal(np.sort(positions[:, :COUNT], axis=1), np.tile(np.arange(COUNT), (2, 1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_tiny_galleries_of_any_kind_can_be_built_and_searched(kind: IndexKind, count: int) -> None:
    index, plan, order = builder.build(shop()[0][:count], kind=kind)
    queries = shop()[0][:count].astype(np.float32)
    _, positions = Searcher(index, plan).search(queries, 1)
    assert order[positions[:, 0]].tolist() == list(range(count))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("cheap_walks")
def test_copies_of_one_photo_are_all_found(kind: IndexKind) -> None:
    vectors = np.concatenate((shop()[0][:1500], np.tile(shop()[0][:1], (30, 1))))
    index, plan, order = builder.build(vectors, kind=kind)
    scores, positions = Searcher(index, plan).search(vectors[:1].astype(np.float32), 31)
    assert len(set(positions[0].tolist())) == 31
    assert set(order[positions[0]].tolist()) == {0, *range(1500, 1530)}
    assert np.allclose(scores, 1.0, atol=2e-3)


def test_thousands_of_copies_of_one_photo_do_not_cut_the_graph() -> None:
    """A shop has many items with the picture that says that there is none yet."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((400, 64))[random.integers(400, size=30_000)]
    vectors += 0.7 * random.standard_normal(vectors.shape)
    places = random.permutation(len(vectors))
    for copies in (places[:1500], places[1500:3000]):
        vectors[copies] = random.standard_normal(64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index, plan, order = builder.build(vectors.astype(np.float16), kind="hnsw")
    assert not plan.scans and plan.effort <= 64
    assert sorted(order.tolist()) == list(range(len(vectors)))
    assert np.array_equal(ann.stored_vectors(ann.storage_of(index)), vectors[order].astype(np.float16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("cheap_walks")
def test_an_extended_index_keeps_its_positions_and_finds_the_new_vectors(kind: IndexKind) -> None:
    old, new = shop()[0][:2000], shop()[0][2000:]
    index, plan, order = builder.build(old, kind=kind)
    index, extended, new_order = builder.extend(index, plan, new)
    assert np.array_equal(np.sort(new_order), np.arange(500))
    assert extended.effort >= plan.effort
    assert extended.recall >= extended.target
    rows = np.concatenate((order, 2000 + new_order))
    queries = photos(np.arange(0, COUNT, 20))
    _, positions = Searcher(index, extended).search(queries, 10)
    assert recall(positions, rows, true_rows(queries, shop()[0], 10)) >= 0.96
    assert np.array_equal(ann.storage_of(index).reconstruct_n(0, COUNT), shop()[0][rows].astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [0, 1])
def test_an_index_may_be_extended_by_little_or_nothing(kind: IndexKind, added: int) -> None:
    index, plan, _ = builder.build(shop()[0][:500], kind=kind)
    extended = builder.extend(index, plan, shop()[0][500 : 500 + added])
    assert extended.index.ntotal == 500 + added
    assert extended.plan == plan
    assert extended.order.tolist() == list(range(added))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("cheap_walks")
def test_a_written_index_answers_the_same_mapped_or_read(kind: IndexKind, tmp_path: Path) -> None:
    index, plan, order = built(kind)
    queries, selection = photos(np.arange(100)), AllowList(order % 2 == 0)
    ann.write_index(index, tmp_path / "index.faiss")
    mapped, read = ann.open_index(tmp_path / "index.faiss"), ann.read_index(tmp_path / "index.faiss")
    for other in (mapped, read):
        for chosen in (None, selection):
            ours = Searcher(index, plan).search(queries, 10, chosen)
            theirs = Searcher(other, plan).search(queries, 10, chosen)
            assert np.array_equal(ours[0], theirs[0])
            assert np.array_equal(ours[1], theirs[1])
    assert not ann.storage_of(mapped).codes.is_owned
    assert builder.extend(read, plan, shop()[0][:50]).index.ntotal == COUNT + 50
    with pytest.raises(IndexFileError, match="memory-mapped"):
        builder.extend(mapped, plan, shop()[0][:50])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_a_file_cut_short_is_refused(kind: IndexKind, kept: float, tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    ann.write_index(built(kind).index, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    for opening in (ann.open_index, ann.read_index):
        with pytest.raises(IndexFileError, match=r"index\.faiss"):
            opening(path)


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("not an index at all, but long enough to look at" * 100)
    for opening in (ann.open_index, ann.read_index):
        for name in ("missing", "foreign"):
            with pytest.raises(IndexFileError, match=name):
                opening(tmp_path / name)


def test_where_no_effort_reaches_the_target_every_vector_is_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(builder.LADDER, "hnsw", (1, 2))
    monkeypatch.setattr(builder, "SCAN_COST", 0)
    with caplog.at_level(logging.WARNING):
        index, plan, order = builder.build(shop()[0][:2000], kind="hnsw", target=0.999)
    assert plan.scans
    assert plan.recall == 1.0
    assert "0.999" in caplog.text
    index, plan, more = builder.extend(index, plan, shop()[0][2000:])
    assert plan.scans
    order = np.concatenate((order, 2000 + more))
    queries, allowed = photos(np.arange(0, COUNT, 20)), np.arange(COUNT) % 2 == 0
    _, positions = Searcher(index, plan).search(queries, 10)
    assert recall(positions, order, true_rows(queries, shop()[0], 10)) >= 0.999
    _, positions = Searcher(index, plan).search(queries, 10, AllowList(allowed[order]), filtered=True)
    assert recall(positions, order, true_rows(queries, shop()[0], 10, allowed)) >= 0.999


def test_filters_that_no_walk_serves_well_enough_stay_scans_when_good_vectors_come() -> None:
    index, plan, _ = builder.build(shop()[0][:2000], kind="hnsw", threads=1)
    hard = plan.model_copy(update={"filtered_effort": ann.SCAN})
    extended = builder.extend(index, hard, shop()[0][2000:], threads=1).plan
    assert extended.filtered_effort == ann.SCAN and not extended.scans


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_build_learns_how_the_effort_grows_with_the_results(kind: IndexKind) -> None:
    plan = built(kind).plan
    assert 0 <= plan.growth <= 1
    efforts = [plan.effort_for(results, filtered=True) for results in (1, 10, 40, 160, 640)]
    assert efforts[0] == plan.filtered_effort or kind == "hnsw"
    assert efforts == sorted(efforts)
    assert efforts[-1] >= plan.filtered_effort * 64**plan.growth - 1
    for results in (40, 160):
        _, positions = Searcher(*built(kind)[:2]).approximate_search(
            photos(np.arange(0, COUNT, 20)), results, plan.effort_for(results, filtered=True)
        )
        truth = true_rows(photos(np.arange(0, COUNT, 20)), shop()[0], results)
        assert recall(positions, built(kind).order, truth) >= 0.98


@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_keeps_its_number_of_threads(kind: IndexKind) -> None:
    library = faiss()
    before = library.omp_get_max_threads()
    library.omp_set_num_threads(3)
    try:
        index, plan, _ = builder.build(shop()[0][:500], kind=kind, threads=1)
        Searcher(index, plan).search(photos(np.arange(1)), 10)
        assert library.omp_get_max_threads() == 3
    finally:
        library.omp_set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("cheap_walks")
def test_threads_share_a_searcher_and_a_selection(kind: IndexKind) -> None:
    index, plan, order = built(kind)
    searcher, selection = Searcher(index, plan), AllowList(order % 3 > 0)
    queries = photos(np.arange(200))
    _, together = searcher.search(queries, 10, selection, filtered=True)
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda query: searcher.search(query[None], 10, selection, filtered=True)[1][0], queries))
    assert np.array_equal(together, alone)
