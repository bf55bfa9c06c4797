"""A masked generation: removals and newer items apply to a copy, and to filters."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from index.gallery.filters import Filter
from index.gallery.store.sqlite import SQLiteStore
from index.gallery.vectors.faiss.index import FaissIndex
from index.gallery.vectors.faiss.masked import MaskedGeneration
from index.gallery.vectors.faiss.settings import FaissSettings
from tests.index.gallery.reference import BUNDLE, MUG, TRIO, unit


@pytest.fixture
def built(tmp_path: Path) -> Iterator[MaskedGeneration]:
    with closing(SQLiteStore(tmp_path)) as store:
        store.upsert(TRIO, BUNDLE)
        index = FaissIndex(tmp_path, store, FaissSettings(min_pending=2, pending_share=2))
        index.build(BUNDLE)
        bundle = store.read.bundle(BUNDLE)
        assert bundle
        yield index.open(bundle)


def test_removed_images_are_not_returned(built: MaskedGeneration) -> None:
    removed = [int(built.generation.keys[0]), 999]
    after = built.after(removed, {})
    assert (built.masked, after.masked) == (0, 1)
    assert (built.segment(None).count, after.segment(None).count) == (4, 3)
    assert after.segment(None).positions().tolist() == [1, 2, 3]
    _, positions = after.segment(None).search(unit(1, 0, 0)[None], 4, filtered=False)
    assert 0 not in positions[0].tolist()


def test_newer_items_replace_those_of_the_generation_and_decide_filters(built: MaskedGeneration) -> None:
    cheap = Filter.parse({"price": {"lt": 10}})
    dear = MUG.model_copy(update={"attributes": {"price": 90}})
    mug, unknown = int(built.generation.item_keys[0]), 999
    after = built.after([], {mug: dear, unknown: MUG})
    assert set(after.items) == {mug} and after.masked == 1
    assert (built.segment(cheap).count, after.segment(cheap).count) == (1, 0)
    assert after.segment(Filter.parse({"price": 90})).positions().tolist() == [0]
    assert (built.segment(None).item(0), after.segment(None).item(0)) == (MUG, dear)


def test_a_compaction_is_due_after_enough_changes(built: MaskedGeneration) -> None:
    assert [built.is_due(pending) for pending in (0, 2, 3)] == [False, False, True]


def test_statistics_name_the_generation_and_its_plan(built: MaskedGeneration) -> None:
    stats = built.stats(pending=5)
    assert (stats.engine, stats.name, stats.revision, stats.pending) == ("faiss", built.name, 1, 5)
    assert (stats.kind, stats.recall, stats.effort) == ("exact", 1.0, 0) and stats.bytes > 0
