"""One gallery in many hands: threads and processes that write, search and compact at the same time."""

import fcntl
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.types import Item, NewImage

from .reference import BUNDLE, TOLERANCE, PlainGallery, Vector, index_stats, photo, shop, unit
from .writing_process import DIMENSION, WRITERS, WRITTEN, forging, found, write

QUERY = unit(*range(1, DIMENSION + 1))


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for what happens in the background; a minute is far more than it takes."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def plainly_found(plain: PlainGallery) -> set[str]:
    return {
        f"{item_id} {plain.items[item_id].title} {images[max(scores, key=lambda name: scores[name])].digest}"
        for item_id, images in plain.images.items()
        if (scores := plain.scores(item_id, QUERY[None]))
    }


def test_a_write_of_one_process_is_in_the_very_next_search_of_another(tmp_path: Path) -> None:
    rounds = 300
    random = Random(0)
    plain = PlainGallery()
    mine = open_gallery(tmp_path / "gallery", create=True)
    with forging(tmp_path / "gallery") as other:
        other.start("obey", rounds)
        assert other.told() == ("ready", "")
        for number in range(rounds // 2):
            write(plain, number)
            if random.random() < 0.5:
                write(mine, number)
                other.order("search")
                other.order("search")
                for _ in range(2):
                    _, answer = other.told()
                    assert answer == ",".join(sorted(plainly_found(plain)))
            else:
                other.order("write", number)
                assert other.told() == ("wrote", str(number))
                assert found(mine) == plainly_found(plain)
            if number % 10 == 9:
                mine.compact(rebuild=number % 20 == 9)
    mine.close()


def test_processes_that_make_and_fill_a_gallery_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    with forging(tmp_path / "gallery") as forge:
        for attempt in range(8):
            forge.start("race", attempt)
            assert forge.told() == ("raced", " ".join(["0"] * WRITERS)), "one of the writers failed"
            assert forge.told()[0] == "ended"
            gallery = open_gallery(tmp_path / f"gallery-{attempt}")
            names = {f"{writer}-{number}" for writer in range(WRITERS) for number in range(WRITTEN)}
            assert {item.id for item in gallery.scan(count=1000).items} == {*names, "all"}
            assert len(gallery.digests("all", BUNDLE)) == WRITERS
            assert gallery.stats().revision == WRITERS * WRITTEN
            gallery.close()


class Ledger:
    """Versions of a few items: which write was begun and which acknowledged, as their one writer knows."""

    names = [f"item-{number:02d}" for number in range(20)]

    def __init__(self) -> None:
        self.begun = dict.fromkeys(self.names, 0)
        self.acknowledged = dict.fromkeys(self.names, 0)
        self.stop = threading.Event()
        self.looks = 0

    @staticmethod
    def vector(name: str, version: int) -> Vector:
        return unit(*np.random.default_rng([int(name[-2:]), version]).normal(size=DIMENSION))

    @staticmethod
    def is_there(version: int) -> bool:
        """Every third version is a deletion, and so is the beginning."""
        return version % 3 != 0

    def write_on(self, gallery: Gallery) -> None:
        random = Random(1)
        while not self.stop.is_set():
            name = random.choice(self.names)
            version = self.begun[name] + 1
            self.begun[name] = version
            if self.is_there(version):
                picture = photo("one", self.vector(name, version))
                gallery.upsert([(Item(id=name, title=str(version)), [picture])], BUNDLE)
            else:
                gallery.delete([name])
            self.acknowledged[name] = version

    def compact_on(self, gallery: Gallery) -> None:
        rebuild = False
        while not self.stop.is_set():
            gallery.compact(rebuild=rebuild)
            rebuild = not rebuild

    def look_on(self, gallery: Gallery) -> None:
        while not self.stop.is_set():
            self.look(gallery)
            self.looks += 1

    def look(self, gallery: Gallery) -> None:
        """A search shows of each item a version between the one acknowledged before it and the one begun after it."""
        before = dict(self.acknowledged)
        hits = {hit.item.id: hit for hit in gallery.search(QUERY[None], bundle_id=BUNDLE, top=1000).hits[0]}
        after = dict(self.begun)
        for name in self.names:
            versions = range(before[name], after[name] + 1)
            if name not in hits:
                assert not all(map(self.is_there, versions)), f"{name} is missing, whatever of {versions} is seen"
                continue
            scores = [
                min(1.0, float(self.vector(name, version).astype(np.float16) @ QUERY))
                for version in filter(self.is_there, versions)
            ]
            told = hits[name].score
            assert any(abs(told - score) <= TOLERANCE for score in scores), (
                f"{name} has the score {told} of none of its versions {versions}: {scores}"
            )


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_searches_beside_writes_and_compactions_are_never_wrong_nor_behind(tmp_path: Path) -> None:
    ledger = Ledger()
    mine = open_gallery(tmp_path / "gallery", create=True)
    other = open_gallery(tmp_path / "gallery")
    failures: list[BaseException] = []

    def watched(work: Callable[[Gallery], None], gallery: Gallery) -> None:
        try:
            work(gallery)
        except BaseException as error:
            failures.append(error)
            ledger.stop.set()

    jobs = [(ledger.write_on, mine), (ledger.compact_on, other)]
    jobs += [(ledger.look_on, gallery) for gallery in (mine, mine, other, other)]
    threads = [threading.Thread(target=watched, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    ledger.stop.wait(6)
    ledger.stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert ledger.looks > 20 and sum(ledger.begun.values()) > 20
    for gallery in (mine, other):
        ledger.look(gallery)
        gallery.close()


def test_a_reader_answers_on_while_generations_are_replaced_under_it(tmp_path: Path) -> None:
    entries = shop(100)
    plain = PlainGallery(entries[:40])
    writer = open_gallery(tmp_path / "gallery", create=True)
    writer.upsert(entries[:40], BUNDLE)
    writer.compact()
    reader = open_gallery(tmp_path / "gallery")
    query = entries[0][1][0].vector[None]
    first = reader.search(query, bundle_id=BUNDLE, top=40).hits[0]
    expected = [expected.id for expected in plain.search(query)]
    names = set()
    for start in range(40, 100, 10):
        writer.upsert(entries[start : start + 10], BUNDLE)
        plain.upsert(entries[start : start + 10])
        gone = [entries[start - 40][0].id]
        writer.delete(gone)
        plain.delete(gone)
        names.add(writer.compact(rebuild=start % 20 == 0))
        plain.check(reader.search(query, bundle_id=BUNDLE, top=50).hits[0], query, top=50)
    assert len(names) == 6
    assert [path.name for path in (tmp_path / "gallery" / "generations").iterdir()] == [index_stats(writer).name]
    assert [hit.item.id for hit in first] == expected, "hits of a generation that is long gone can still be read"
    eventually(lambda: index_stats(reader).name == index_stats(writer).name)
    plain.check(reader.search(query, bundle_id=BUNDLE, top=50).hits[0], query, top=50)
    reader.close()
    writer.close()


def test_a_reader_that_looked_away_for_long_finds_what_is_there_now(tmp_path: Path) -> None:
    entries = shop(60)
    plain = PlainGallery(entries[:30])
    writer = open_gallery(tmp_path / "gallery", create=True)
    writer.upsert(entries[:30], BUNDLE)
    query = entries[0][1][0].vector[None]
    reader = open_gallery(tmp_path / "gallery")
    reader.search(query, bundle_id=BUNDLE)
    for number, entry in enumerate(entries[30:40]):
        gone = [entries[number][0].id]
        writer.delete(gone)
        plain.delete(gone)
        writer.upsert([entry], BUNDLE)
        plain.upsert([entry])
        writer.compact()
    plain.check(reader.search(query, bundle_id=BUNDLE, top=50).hits[0], query, top=50)
    reader.close()
    writer.close()


@pytest.fixture
def maintained(tmp_path: Path) -> Iterator[Gallery]:
    """A gallery that compacts itself, with more images than are worth a generation."""
    gallery = open_gallery(tmp_path / "gallery", create=True, maintain=True)
    gallery.upsert(many("first"), BUNDLE)
    yield gallery
    gallery.close()


def many(name: str) -> list[tuple[Item, list[NewImage]]]:
    """A few items with 2,100 images."""
    draw = np.random.default_rng(len(name))
    return [
        (Item(id=f"{name}-{number}"), [photo(f"{view}", unit(*draw.normal(size=2))) for view in range(300)])
        for number in range(7)
    ]


def test_a_gallery_that_maintains_itself_compacts_when_it_is_worth_it(maintained: Gallery) -> None:
    def compacted() -> bool:
        maintained.search(unit(1, 2)[None], bundle_id=BUNDLE)
        stats = maintained.stats()
        return index_stats(maintained).revision == stats.revision and index_stats(maintained).name is not None

    eventually(compacted)
    first = index_stats(maintained)
    assert (first.pending, first.kind) == (0, "exact")
    maintained.upsert([(Item(id="one more"), [photo("a", unit(1, 2))])], BUNDLE)
    maintained.search(unit(1, 2)[None], bundle_id=BUNDLE)
    assert index_stats(maintained).name == first.name, "one image is not worth it"
    maintained.upsert(many("second"), BUNDLE)
    eventually(compacted)
    assert index_stats(maintained).name != first.name


def test_a_reader_that_looked_away_while_its_bundle_was_dropped_and_indexed_anew_never_mixes_two(
    tmp_path: Path,
) -> None:
    direction = dict(zip("abc", np.eye(3, dtype=np.float32), strict=True))
    writer = open_gallery(tmp_path / "gallery", create=True)

    def index(bundle: str) -> None:
        # The content of the photo is the same, whatever a bundle makes of it.
        writer.upsert([(Item(id="mug"), [photo("front", direction[bundle], 1)])], bundle)

    index("a")
    index("b")
    writer.activate("b")
    reader = open_gallery(tmp_path / "gallery")
    assert reader.search(direction["b"][None], bundle_id="b").hits[0][0].score == 1
    writer.activate("a")
    writer.drop_bundle("b")
    index("c")  # in the place that b had in the catalogue
    index("b")
    writer.activate("b")
    assert reader.search(direction["b"][None], bundle_id="b").hits[0][0].score == 1
    reader.close()
    writer.close()


def test_a_gallery_that_was_emptied_has_nothing_to_compact(maintained: Gallery, tmp_path: Path) -> None:
    maintained.compact()
    maintained.delete(item.id for item, _ in many("first"))
    eventually(lambda: index_stats(maintained).name is None)
    assert index_stats(maintained).pending == 0
    assert maintained.search(unit(1, 2)[None], bundle_id=BUNDLE).hits == [[]]
    maintained.upsert([(Item(id="mug"), [photo("front", unit(1, 2))])], BUNDLE)
    assert maintained.search(unit(1, 2)[None], bundle_id=BUNDLE).hits[0][0].item.id == "mug"


def test_no_compaction_is_started_while_another_process_is_at_one(tmp_path: Path, maintained: Gallery) -> None:
    with (tmp_path / "gallery" / "compaction.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started: list[object] = []
        patch.setattr(subprocess, "Popen", started.append)
        for _ in range(20):
            maintained.search(unit(1, 2)[None], bundle_id=BUNDLE)
            time.sleep(0.02)
        assert index_stats(maintained).name is None
        assert started == []


@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "lost"])
def test_a_gallery_that_maintains_itself_makes_a_bad_generation_again(tmp_path: Path, lost: bool) -> None:
    gallery = open_gallery(tmp_path / "gallery", create=True)
    gallery.upsert(shop(20), BUNDLE)
    report = gallery.compact()
    assert report
    gallery.close()
    generation = tmp_path / "gallery" / "generations" / report.name
    if lost:
        shutil.rmtree(generation)
    else:
        (generation / "index.faiss").write_bytes(b"")
    maintained = open_gallery(tmp_path / "gallery", maintain=True)
    assert index_stats(maintained).name is None
    eventually(lambda: index_stats(maintained).name not in (None, report.name))
    maintained.close()


def test_a_search_never_takes_the_lock_of_a_compaction_nor_starts_a_process(tmp_path: Path) -> None:
    # A disk that turned read-only, or a table of processes that is full, must not make searches fail.
    with open_gallery(tmp_path / "gallery", create=True, maintain=True) as gallery:
        gallery.upsert(many("first"), BUNDLE)
        with pytest.MonkeyPatch.context() as patch:

            def refuse(*arguments: object) -> None:
                raise OSError(30, "Read-only file system")

            patch.setattr(subprocess, "Popen", refuse)
            patch.setattr(fcntl, "flock", refuse)
            for _ in range(20):
                assert len(gallery.search(unit(1, 2)[None], bundle_id=BUNDLE).hits[0]) == 7
                time.sleep(0.01)
