"""Followers: readers catch up with every write, adopt newer generations, and fall back to the store on damage."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.errors import BundleMismatch, IndexDamaged
from index.gallery.settings import GallerySettings
from index.gallery.store.base import BundleRow
from index.gallery.types import Item
from index.gallery.vectors.faiss.index import FaissIndex
from index.gallery.vectors.faiss.masked import MaskedGeneration
from index.gallery.vectors.follower import Follower
from tests.index.gallery.memory import MemoryBuiltIndex, MemoryData, MemoryIndex, MemoryStore
from tests.index.gallery.reference import (
    BUNDLE,
    OTHER_BUNDLE,
    TRIO,
    ReferenceGallery,
    index_stats,
    make_entries,
    photo,
    unit,
    wait_until,
)

# On the store and the index in memory


@pytest.fixture
def store() -> MemoryStore:
    """A store with three items, and an index of them."""
    store = MemoryStore(MemoryData())
    store.upsert(TRIO, BUNDLE)
    MemoryIndex(store).build(BUNDLE)
    return store


def follow(store: MemoryStore, index: MemoryIndex, on_damage: Callable[[], None] = lambda: None) -> Follower:
    bundle = store.bundle(BUNDLE)
    assert bundle
    return Follower(store, index, bundle, GallerySettings(), on_damage)


def test_the_same_news_returns_the_same_view(store: MemoryStore) -> None:
    follower = follow(store, MemoryIndex(store))
    view = follower.view(store.news())
    assert follower.view(store.news()) is view
    store.delete(["mug"])
    newer = follower.view(store.news())
    assert (view.revision, newer.revision) == (1, 2)
    assert (view.index.masked, newer.index.masked) == (0, 1)


def test_a_newer_index_replaces_the_delta_and_is_logged_once(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="index")
    follower = follow(store, MemoryIndex(store))
    store.upsert([(Item(id="lamp"), [photo("on", unit(0, 0, 1))])], BUNDLE)
    first = follower.view(store.news())
    assert (first.index.name, first.pending) == (f"1-{BUNDLE}", 1)
    MemoryIndex(store).build(BUNDLE)
    follower.view(store.news())
    follower.settle()
    newer = follower.view(store.news())
    assert (newer.index.name, newer.pending, newer.revision) == (f"2-{BUNDLE}", 0, 2)
    store.delete(["mug"])
    follower.view(store.news())
    assert caplog.messages == [f"bundle {BUNDLE} is searched with the new index 2-{BUNDLE}"], "not the one of the start"


def test_a_damaged_index_is_reported_once_and_the_store_is_searched(store: MemoryStore) -> None:
    class DamagedIndex(MemoryIndex):
        def open(self, bundle: object) -> MemoryBuiltIndex:
            raise IndexDamaged("The index is damaged.", "Rebuild it.")

    reports: list[str] = []
    follower = follow(store, DamagedIndex(store), lambda: reports.append("damage"))
    store.delete(["mug"])
    view = follower.view(store.news())
    assert (view.index.name, view.revision, view.is_compaction_due) == (None, 2, True)
    assert sum(segment.count for segment in view.segments(None)) == 3
    follower.settle()
    assert reports == ["damage"]


# On SQLite and FAISS


def test_a_reader_continues_while_generations_are_replaced(tmp_path: Path) -> None:
    entries = make_entries(100)
    reference = ReferenceGallery(entries[:40])
    writer = open_gallery(tmp_path / "gallery", create=True)
    writer.upsert(entries[:40], BUNDLE)
    writer.compact()
    reader = open_gallery(tmp_path / "gallery")
    query = entries[0][1][0].vector[None]
    first = reader.search(query, bundle_id=BUNDLE, top=40).hits[0]
    expected = [expected.id for expected in reference.search(query)]
    names = set()
    for start in range(40, 100, 10):
        writer.upsert(entries[start : start + 10], BUNDLE)
        reference.upsert(entries[start : start + 10])
        deleted = [entries[start - 40][0].id]
        writer.delete(deleted)
        reference.delete(deleted)
        names.add(writer.compact(rebuild=start % 20 == 0))
        reference.check(reader.search(query, bundle_id=BUNDLE, top=50).hits[0], query, top=50)
    assert len(names) == 6
    assert [path.name for path in (tmp_path / "gallery" / "generations").iterdir()] == [index_stats(writer).name]
    assert [hit.item.id for hit in first] == expected, "hits of a removed generation can still be read"
    wait_until(lambda: index_stats(reader).name == index_stats(writer).name)
    reference.check(reader.search(query, bundle_id=BUNDLE, top=50).hits[0], query, top=50)
    reader.close()
    writer.close()


def test_a_reader_that_catches_up_in_batches_returns_the_same_results(tmp_path: Path) -> None:
    entries = make_entries(120)
    reference = ReferenceGallery(entries[:40])
    writer = open_gallery(tmp_path / "gallery", create=True)
    writer.upsert(entries[:40], BUNDLE)
    writer.compact()
    reader = open_gallery(tmp_path / "gallery", settings=GallerySettings(follow_batch=7))
    check_searches(reader, reference, 1)
    for number, entry in enumerate(entries[40:]):
        writer.upsert([entry], BUNDLE)
        reference.upsert([entry])
        if number % 3 == 0:
            deleted = [entries[number][0].id, entry[0].id]
            writer.delete(deleted)
            reference.delete(deleted)
    check_searches(reader, reference, 2)
    assert reader.search(entries[0][1][0].vector[None], bundle_id=BUNDLE).revision == writer.stats().revision
    reader.close()
    writer.close()


def test_a_reader_whose_removals_are_no_longer_listed_starts_again(tmp_path: Path) -> None:
    entries = make_entries(60)
    reference = ReferenceGallery(entries[:30])
    writer = open_gallery(tmp_path / "gallery", create=True)
    writer.upsert(entries[:30], BUNDLE)
    query = entries[0][1][0].vector[None]
    reader = open_gallery(tmp_path / "gallery")
    reader.search(query, bundle_id=BUNDLE)
    for number, entry in enumerate(entries[30:40]):
        deleted = [entries[number][0].id]
        writer.delete(deleted)
        reference.delete(deleted)
        writer.upsert([entry], BUNDLE)
        reference.upsert([entry])
        writer.compact()
    reference.check(reader.search(query, bundle_id=BUNDLE, top=50).hits[0], query, top=50)
    reader.close()
    writer.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_reader_that_missed_removals_finds_them_by_comparing_all_images(tmp_path: Path, reopened: bool) -> None:
    few = GallerySettings(listed_removals=3, delta_block=4)
    entries = make_entries(80)
    reference = ReferenceGallery(entries[:60])
    query = entries[0][1][0].vector[None]
    with open_gallery(tmp_path / "gallery", create=True, settings=few) as writer:
        writer.upsert(entries[:40], BUNDLE)
        writer.compact()
        writer.upsert(entries[40:60], BUNDLE)
        reader = open_gallery(tmp_path / "gallery", settings=few)
        reader.search(query, bundle_id=BUNDLE)
        for number in (*range(0, 30, 2), *range(40, 60, 3)):
            writer.delete([entries[number][0].id])
            reference.delete([entries[number][0].id])
        writer.upsert(entries[60:], BUNDLE)
        reference.upsert(entries[60:])
        if reopened:
            reader.close()
            reader = open_gallery(tmp_path / "gallery", settings=few)
        reference.check(reader.search(query, bundle_id=BUNDLE, top=100).hits[0], query, top=100)
        assert index_stats(reader).revision == index_stats(writer).revision == 1, "the index is still used"
        assert reader.verify() == []
        reader.close()


def test_a_reader_of_a_bundle_that_was_dropped_and_indexed_again_reads_the_new_vectors(
    tmp_path: Path,
) -> None:
    direction = dict(zip("abc", np.eye(3, dtype=np.float32), strict=True))
    writer = open_gallery(tmp_path / "gallery", create=True)

    def index(bundle: str) -> None:
        # The photo is the same for all bundles.
        writer.upsert([(Item(id="mug"), [photo("front", direction[bundle], 1)])], bundle)

    index("a")
    index("b")
    writer.activate("b")
    reader = open_gallery(tmp_path / "gallery")
    assert reader.search(direction["b"][None], bundle_id="b").hits[0][0].score == 1
    writer.activate("a")
    writer.drop_bundle("b")
    index("c")
    index("b")
    writer.activate("b")
    assert reader.search(direction["b"][None], bundle_id="b").hits[0][0].score == 1
    reader.close()
    writer.close()


def test_a_search_of_a_bundle_that_was_dropped_when_its_index_is_opened_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_gallery(tmp_path / "gallery", create=True)
    writer.upsert(TRIO, BUNDLE)
    writer.activate(BUNDLE)
    reader, open_index = open_gallery(tmp_path / "gallery"), FaissIndex.open

    def drop_before(index: FaissIndex, bundle: BundleRow) -> MaskedGeneration:
        if bundle.id == BUNDLE and writer.active_bundle() == BUNDLE:
            writer.upsert(TRIO, OTHER_BUNDLE)
            writer.activate(OTHER_BUNDLE)
            writer.drop_bundle(BUNDLE)
        return open_index(index, bundle)

    monkeypatch.setattr(FaissIndex, "open", drop_before)
    with pytest.raises(BundleMismatch):
        reader.search(unit(1, 0, 0)[None], bundle_id=BUNDLE)
    reader.close()
    writer.close()


def check_searches(gallery: Gallery, reference: ReferenceGallery, seed: int) -> None:
    for numbers in np.random.default_rng(seed).normal(size=(3, 8)):
        query = unit(*numbers)[None]
        reference.check(gallery.search(query, bundle_id=BUNDLE, top=20).hits[0], query, top=20)


def flip(file: str, at: float) -> Callable[[Path], None]:
    """Inverts one byte of a file."""

    def damage(generation: Path) -> None:
        content = bytearray((generation / file).read_bytes())
        content[int(at * (len(content) - 1))] ^= 0xFF
        (generation / file).write_bytes(content)

    return damage


def replace(file: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(generation: Path) -> None:
        text = (generation / file).read_text()
        assert old in text
        (generation / file).write_text(text.replace(old, new, 1))

    return damage


def truncate(file: str, left: float) -> Callable[[Path], None]:
    def damage(generation: Path) -> None:
        content = (generation / file).read_bytes()
        (generation / file).write_bytes(content[: int(len(content) * left)])

    return damage


def remove(file: str) -> Callable[[Path], None]:
    return lambda generation: (generation / file).unlink()


FILES = ("index.faiss", "records.arrays", "manifest.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"{file} flipped at {at}": flip(file, at) for file in FILES for at in (0, 0.4, 1)},
    **{f"{file} truncated to {left}": truncate(file, left) for file in FILES for left in (0, 0.7)},
    **{f"missing {file}": remove(file) for file in FILES},
    "missing folder": shutil.rmtree,
    "another revision": replace("manifest.json", '"revision": 1', '"revision": 2'),
    "another effort": replace("manifest.json", '"effort": 0', '"effort": 9'),
    "an empty manifest": lambda generation: (generation / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_searches_scan_the_store_until_a_damaged_generation_is_rebuilt(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    entries = make_entries(160)
    reference = ReferenceGallery(entries)
    reference.delete(["item-00000"])
    generations = tmp_path / "gallery" / "generations"
    with open_gallery(tmp_path / "gallery", create=True) as gallery:
        gallery.upsert(entries, BUNDLE)
        gallery.compact()
        gallery.delete(["item-00000"])
    (generation,) = generations.iterdir()
    damage(generation)
    reader = open_gallery(tmp_path / "gallery")
    assert index_stats(reader).name is None
    check_searches(reader, reference, 1)
    reader.upsert([(Item(id="new"), [photo("one", unit(*range(1, 9)))])], BUNDLE)
    reference.upsert([(Item(id="new"), [photo("one", unit(*range(1, 9)))])])
    check_searches(reader, reference, 2)
    report = reader.compact()
    assert report and report.name != generation.name
    assert [path.name for path in generations.iterdir()] == [report.name]
    check_searches(reader, reference, 3)
    reopened = open_gallery(tmp_path / "gallery")
    assert index_stats(reopened).name == report.name
    check_searches(reopened, reference, 3)
    reopened.close()
    reader.close()
