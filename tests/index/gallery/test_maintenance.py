"""Compaction in the background: started when it pays off or an index is damaged, and never by a search itself."""

import fcntl
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.settings import GallerySettings
from index.gallery.types import Item, NewImage

from .reference import BUNDLE, index_stats, make_entries, photo, unit, wait_until


@pytest.fixture
def maintained(tmp_path: Path) -> Iterator[Gallery]:
    """A gallery that compacts itself, with enough images for a first compaction."""
    gallery = open_gallery(tmp_path / "gallery", create=True, maintain=True)
    gallery.upsert(make_items("first"), BUNDLE)
    yield gallery
    gallery.close()


def make_items(name: str) -> list[tuple[Item, list[NewImage]]]:
    """Returns 9 items with 2,250 images, which is more than `min_pending`."""
    draw = np.random.default_rng(len(name))
    return [
        (Item(id=f"{name}-{number}"), [photo(f"{view}", unit(*draw.normal(size=2))) for view in range(250)])
        for number in range(9)
    ]


@pytest.mark.slow
def test_a_maintained_gallery_compacts_when_enough_changes_are_pending(maintained: Gallery) -> None:
    def is_compacted() -> bool:
        maintained.search(unit(1, 2)[None], bundle_id=BUNDLE)
        stats = maintained.stats()
        return index_stats(maintained).revision == stats.revision and index_stats(maintained).name is not None

    wait_until(is_compacted)
    first = index_stats(maintained)
    assert (first.pending, first.kind) == (0, "exact")
    maintained.upsert([(Item(id="one more"), [photo("a", unit(1, 2))])], BUNDLE)
    maintained.search(unit(1, 2)[None], bundle_id=BUNDLE)
    assert index_stats(maintained).name == first.name, "a compaction for one image does not pay off"
    maintained.upsert(make_items("second"), BUNDLE)
    wait_until(is_compacted)
    assert index_stats(maintained).name != first.name


def test_a_maintained_gallery_drops_the_index_when_all_items_are_deleted(maintained: Gallery, tmp_path: Path) -> None:
    maintained.compact()
    maintained.delete(item.id for item, _ in make_items("first"))
    # Both at once: until the index is opened in the background, searches use the vectors of the store.
    wait_until(lambda: (index_stats(maintained).name, index_stats(maintained).pending) == (None, 0))
    assert maintained.search(unit(1, 2)[None], bundle_id=BUNDLE).hits == [[]]
    maintained.upsert([(Item(id="mug"), [photo("front", unit(1, 2))])], BUNDLE)
    assert maintained.search(unit(1, 2)[None], bundle_id=BUNDLE).hits[0][0].item.id == "mug"


def test_no_compaction_is_started_while_another_process_compacts(tmp_path: Path, maintained: Gallery) -> None:
    with (tmp_path / "gallery" / "compaction.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started: list[object] = []
        patch.setattr(subprocess, "Popen", started.append)
        for _ in range(20):
            maintained.search(unit(1, 2)[None], bundle_id=BUNDLE)
            time.sleep(0.02)
        assert index_stats(maintained).name is None
        assert started == []


@pytest.mark.slow
def test_a_maintained_gallery_follows_and_compacts_while_nobody_searches(tmp_path: Path) -> None:
    settings = GallerySettings(follow_seconds=0.05)
    with (
        open_gallery(tmp_path / "gallery", create=True, maintain=True, settings=settings),
        open_gallery(tmp_path / "gallery") as writer,
    ):
        writer.upsert(make_items("first"), BUNDLE)
        wait_until(lambda: index_stats(writer).name is not None)


def test_a_maintained_gallery_empties_the_log_when_nobody_writes(tmp_path: Path) -> None:
    settings = GallerySettings(follow_seconds=0.02)
    log = tmp_path / "gallery" / "catalogue.sqlite-wal"
    with open_gallery(tmp_path / "gallery", create=True, maintain=True, settings=settings) as gallery:
        for number in range(3):
            gallery.upsert([(Item(id=f"mug-{number}"), [photo("front", unit(1, 2))])], BUNDLE)
            assert log.stat().st_size > 0
            wait_until(lambda: log.stat().st_size == 0)
        assert gallery.stats().items == 3


def test_a_maintained_gallery_notices_that_its_store_is_gone_and_that_it_is_back(tmp_path: Path) -> None:
    store, moved = tmp_path / "gallery" / "catalogue.sqlite", tmp_path / "moved"
    settings = GallerySettings(follow_seconds=0.02)
    with open_gallery(tmp_path / "gallery", create=True, maintain=True, settings=settings) as gallery:
        gallery.upsert([(Item(id="mug"), [photo("front", unit(1, 2))])], BUNDLE)
        assert gallery.fault is None
        store.rename(moved)
        wait_until(lambda: gallery.fault is not None)
        assert gallery.fault and "was deleted, replaced or cut" in gallery.fault.problem
        moved.rename(store)
        wait_until(lambda: gallery.fault is None)


@pytest.mark.parametrize("missing", [False, True], ids=["damaged", "missing"])
def test_a_maintained_gallery_rebuilds_a_damaged_or_missing_generation(tmp_path: Path, missing: bool) -> None:
    gallery = open_gallery(tmp_path / "gallery", create=True)
    gallery.upsert(make_entries(20), BUNDLE)
    report = gallery.compact()
    assert report
    gallery.close()
    generation = tmp_path / "gallery" / "generations" / report.name
    if missing:
        shutil.rmtree(generation)
    else:
        (generation / "index.faiss").write_bytes(b"")
    maintained = open_gallery(tmp_path / "gallery", maintain=True)
    assert index_stats(maintained).name is None
    wait_until(lambda: index_stats(maintained).name not in (None, report.name))
    maintained.close()


def test_a_search_neither_locks_nor_starts_a_process(tmp_path: Path) -> None:
    # Searches must not fail when the disk becomes read-only or no process can be started.
    with open_gallery(tmp_path / "gallery", create=True, maintain=True) as gallery:
        gallery.upsert(make_items("first"), BUNDLE)
        with pytest.MonkeyPatch.context() as patch:

            def refuse(*arguments: object) -> None:
                raise OSError(30, "Read-only file system")

            patch.setattr(subprocess, "Popen", refuse)
            patch.setattr(fcntl, "flock", refuse)
            for _ in range(20):
                assert len(gallery.search(unit(1, 2)[None], bundle_id=BUNDLE).hits[0]) == 9
                time.sleep(0.01)
