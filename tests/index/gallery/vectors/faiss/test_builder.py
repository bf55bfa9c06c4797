"""Builds and extends every kind of index, and checks its order, plan and recall against an exact search in NumPy."""

import logging
from pathlib import Path

import numpy as np
import pytest

from index.gallery.vectors.faiss.builder import build, extend
from index.gallery.vectors.faiss.searcher import (
    SCAN,
    AllowList,
    Searcher,
    open_index,
    storage_of,
    stored_vectors,
    write_index,
)
from index.gallery.vectors.faiss.settings import FaissSettings, IndexKind
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_build_stores_every_row_once_and_reports_progress(kind: IndexKind) -> None:
    settings = FaissSettings(chunk_rows=300)
    seen: list[tuple[int, int]] = []
    index, plan, order = build(
        shop_vectors()[0][:1000], kind=kind, settings=settings, on_progress=lambda *step: seen.append(step)
    )
    assert index.ntotal == 1000
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert np.array_equal(storage_of(index).reconstruct_n(0, 1000), shop_vectors()[0][order].astype(np.float32))
    assert seen[-1] == (1000, 1000)
    assert seen == sorted(seen)
    assert plan.queries == (0 if kind == "exact" else settings.held_out)


def test_a_build_reads_vectors_from_a_memory_map(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", shop_vectors()[0])
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert build(mapped, kind="hnsw").plan == build_shop("hnsw").plan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_an_index_may_have_only_a_few_vectors(kind: IndexKind, count: int) -> None:
    index, plan, order = build(shop_vectors()[0][:count], kind=kind)
    queries = shop_vectors()[0][:count].astype(np.float32)
    _, positions = Searcher(index, plan).search(queries, 1)
    assert order[positions[:, 0]].tolist() == list(range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_every_duplicate_of_one_photo_is_found(kind: IndexKind) -> None:
    vectors = np.concatenate((shop_vectors()[0][:1500], np.tile(shop_vectors()[0][:1], (30, 1))))
    index, plan, order = build(vectors, kind=kind)
    scores, positions = Searcher(index, plan, CHEAP_STEPS).search(vectors[:1].astype(np.float32), 31)
    assert len(set(positions[0].tolist())) == 31
    assert set(order[positions[0]].tolist()) == {0, *range(1500, 1530)}
    assert np.allclose(scores, 1.0, atol=2e-3)


@pytest.mark.slow
def test_thousands_of_duplicates_do_not_disconnect_the_graph() -> None:
    """A shop has many items with the same "no photo yet" image."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((400, 64))[random.integers(400, size=30_000)]
    vectors += 0.7 * random.standard_normal(vectors.shape)
    rows = random.permutation(len(vectors))
    for copies in (rows[:1500], rows[1500:3000]):
        vectors[copies] = random.standard_normal(64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    index, plan, order = build(vectors.astype(np.float16), kind="hnsw")
    assert not plan.scans
    assert plan.effort <= 64
    assert sorted(order.tolist()) == list(range(len(vectors)))
    assert np.array_equal(stored_vectors(storage_of(index)), vectors[order].astype(np.float16))


@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_index_keeps_its_positions_and_finds_the_new_vectors(kind: IndexKind) -> None:
    old, new = shop_vectors()[0][:2000], shop_vectors()[0][2000:]
    index, plan, order = build(old, kind=kind)
    index, extended, new_order = extend(index, plan, new)
    assert np.array_equal(np.sort(new_order), np.arange(500))
    assert extended.effort >= plan.effort
    assert extended.recall >= extended.target
    rows = np.concatenate((order, 2000 + new_order))
    queries = queries_near(np.arange(0, COUNT, 20))
    _, positions = Searcher(index, extended, CHEAP_STEPS).search(queries, 10)
    assert recall(positions, rows, nearest_rows(queries, shop_vectors()[0], 10)) >= 0.96
    assert np.array_equal(storage_of(index).reconstruct_n(0, COUNT), shop_vectors()[0][rows].astype(np.float32))


def test_inverted_lists_are_extended_without_reading_the_vectors_into_memory(tmp_path: Path) -> None:
    old, new = shop_vectors()[0][:2000], shop_vectors()[0][2000:]
    index, plan, order = build(old, kind="ivf", scratch=tmp_path / "old")
    write_index(index, tmp_path / "index.faiss")
    mapped = open_index(tmp_path / "index.faiss")
    index, _, new_order = extend(mapped, plan, new, scratch=tmp_path / "new")
    assert not storage_of(mapped).codes.is_owned and not storage_of(index).codes.is_owned
    write_index(index, tmp_path / "index.faiss")
    reopened = open_index(tmp_path / "index.faiss")
    found = stored_vectors(storage_of(reopened))
    assert np.array_equal(found, shop_vectors()[0][np.concatenate((order, 2000 + new_order))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [0, 1])
def test_an_index_can_be_extended_by_one_vector_or_none(kind: IndexKind, added: int) -> None:
    index, plan, _ = build(shop_vectors()[0][:500], kind=kind)
    extended = extend(index, plan, shop_vectors()[0][500 : 500 + added])
    assert extended.index.ntotal == 500 + added
    assert extended.plan == plan
    assert extended.order.tolist() == list(range(added))


def test_the_plan_is_a_scan_if_no_effort_reaches_the_target(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A scan costs nothing, so no effort beyond the listed ones is tried.
    settings = FaissSettings(graph_efforts=(1, 2), scan_cost=0)
    with caplog.at_level(logging.WARNING):
        index, plan, order = build(shop_vectors()[0][:2000], kind="hnsw", target=0.999, settings=settings)
    assert plan.scans
    assert plan.recall == 1.0
    assert "0.999" in caplog.text
    index, plan, more = extend(index, plan, shop_vectors()[0][2000:], settings=settings)
    assert plan.scans
    order = np.concatenate((order, 2000 + more))
    queries, allowed = queries_near(np.arange(0, COUNT, 20)), np.arange(COUNT) % 2 == 0
    _, positions = Searcher(index, plan).search(queries, 10)
    assert recall(positions, order, nearest_rows(queries, shop_vectors()[0], 10)) >= 0.999
    _, positions = Searcher(index, plan).search(queries, 10, AllowList(allowed[order]), filtered=True)
    assert recall(positions, order, nearest_rows(queries, shop_vectors()[0], 10, allowed)) >= 0.999


def test_filtered_searches_that_scan_still_scan_after_an_extension() -> None:
    index, plan, _ = build(shop_vectors()[0][:2000], kind="hnsw", threads=1)
    scanning = plan.model_copy(update={"filtered_effort": SCAN})
    extended = extend(index, scanning, shop_vectors()[0][2000:], threads=1).plan
    assert extended.filtered_effort == SCAN and not extended.scans


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_build_measures_how_the_effort_grows_with_the_results(kind: IndexKind) -> None:
    plan = build_shop(kind).plan
    assert 0 <= plan.growth <= 1
    efforts = [plan.effort_for(results, filtered=True) for results in (1, 10, 40, 160, 640)]
    assert efforts[0] == plan.filtered_effort or kind == "hnsw"
    assert efforts == sorted(efforts)
    assert efforts[-1] >= plan.filtered_effort * 64**plan.growth - 1
    for results in (40, 160):
        _, positions = Searcher(*build_shop(kind)[:2]).approximate_search(
            queries_near(np.arange(0, COUNT, 20)), results, plan.effort_for(results, filtered=True)
        )
        truth = nearest_rows(queries_near(np.arange(0, COUNT, 20)), shop_vectors()[0], results)
        assert recall(positions, build_shop(kind).order, truth) >= 0.98
