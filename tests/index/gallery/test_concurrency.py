"""Threads and processes that write, search and compact one gallery concurrently."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest

from index.gallery import Gallery, open_gallery
from index.gallery.errors import TooManyImages
from index.gallery.store.base import BundleRow
from index.gallery.types import Item
from index.gallery.vectors.base import BuiltIndex
from index.items import MAX_IMAGES_PER_ITEM

from .reference import BUNDLE, TOLERANCE, ReferenceGallery, Vector, photo, unit
from .writer_process import DIMENSION, ITEMS_PER_WRITER, WRITERS, describe_hits, run_writer_process, write

QUERY = unit(*range(1, DIMENSION + 1))


def describe_expected_hits(reference: ReferenceGallery) -> set[str]:
    """Returns what `describe_hits` should return."""
    return {
        f"{item_id} {reference.items[item_id].title} {images[max(scores, key=lambda name: scores[name])].digest}"
        for item_id, images in reference.images.items()
        if (scores := reference.scores(item_id, QUERY[None]))
    }


def test_a_write_is_visible_to_the_next_search_of_another_process(tmp_path: Path) -> None:
    rounds = 300
    random = Random(0)
    reference = ReferenceGallery()
    mine = open_gallery(tmp_path / "gallery", create=True)
    with run_writer_process(tmp_path / "gallery") as other:
        other.start("serve", rounds)
        assert other.receive() == ("ready", "")
        for number in range(rounds // 2):
            write(reference, number)
            if random.random() < 0.5:
                write(mine, number)
                other.send("search")
                other.send("search")
                for _ in range(2):
                    _, found = other.receive()
                    assert found == ",".join(sorted(describe_expected_hits(reference)))
            else:
                other.send("write", number)
                assert other.receive() == ("wrote", str(number))
                assert describe_hits(mine) == describe_expected_hits(reference)
            if number % 10 == 9:
                mine.compact(rebuild=number % 20 == 9)
    mine.close()


def test_two_writers_do_not_exceed_the_limit_of_images_together(tmp_path: Path) -> None:
    def add(writer: int) -> None:
        with open_gallery(tmp_path / "gallery") as gallery:
            for number in range(0, 300, 10):
                images = [photo(f"{writer}-{view}", unit(writer, view, 1)) for view in range(number, number + 10)]
                with suppress(TooManyImages):
                    gallery.upsert([(Item(id="crate"), images)], BUNDLE)

    open_gallery(tmp_path / "gallery", create=True).close()
    with ThreadPoolExecutor() as pool:
        list(pool.map(add, (1, 2)))
    with open_gallery(tmp_path / "gallery") as gallery:
        assert MAX_IMAGES_PER_ITEM - 10 < gallery.stats().images <= MAX_IMAGES_PER_ITEM


def test_processes_that_create_and_fill_a_gallery_concurrently_lose_no_write(tmp_path: Path) -> None:
    with run_writer_process(tmp_path / "gallery") as process:
        for attempt in range(8):
            process.start("race", attempt)
            assert process.receive() == ("raced", " ".join(["0"] * WRITERS)), "one of the writers failed"
            assert process.receive()[0] == "ended"
            gallery = open_gallery(tmp_path / f"gallery-{attempt}")
            names = {f"{writer}-{number}" for writer in range(WRITERS) for number in range(ITEMS_PER_WRITER)}
            assert {item.id for item in gallery.scan(count=1000).items} == {*names, "shared"}
            assert len(gallery.digests("shared", BUNDLE)) == WRITERS
            assert gallery.stats().revision == WRITERS * ITEMS_PER_WRITER
            gallery.close()


class Ledger:
    """The versions of a few items that their only writer began to write, and those that were acknowledged."""

    names = [f"item-{number:02d}" for number in range(20)]

    def __init__(self) -> None:
        self.begun = dict.fromkeys(self.names, 0)
        self.acknowledged = dict.fromkeys(self.names, 0)
        self.stop = threading.Event()
        self.checks = 0

    @staticmethod
    def vector(name: str, version: int) -> Vector:
        return unit(*np.random.default_rng([int(name[-2:]), version]).normal(size=DIMENSION))

    @staticmethod
    def exists(version: int) -> bool:
        """Returns whether a version is an item; every third one, and the first, is a deletion."""
        return version % 3 != 0

    def keep_writing(self, gallery: Gallery) -> None:
        random = Random(1)
        while not self.stop.is_set():
            name = random.choice(self.names)
            version = self.begun[name] + 1
            self.begun[name] = version
            if self.exists(version):
                image = photo("one", self.vector(name, version))
                gallery.upsert([(Item(id=name, title=str(version)), [image])], BUNDLE)
            else:
                gallery.delete([name])
            self.acknowledged[name] = version

    def keep_compacting(self, gallery: Gallery) -> None:
        rebuild = False
        while not self.stop.is_set():
            gallery.compact(rebuild=rebuild)
            rebuild = not rebuild

    def keep_checking(self, gallery: Gallery) -> None:
        while not self.stop.is_set():
            self.check(gallery)
            self.checks += 1

    def check(self, gallery: Gallery) -> None:
        """Asserts that a search returns versions from the last acknowledged before it to the last begun after it."""
        before = dict(self.acknowledged)
        hits = {hit.item.id: hit for hit in gallery.search(QUERY[None], bundle_id=BUNDLE, top=1000).hits[0]}
        after = dict(self.begun)
        for name in self.names:
            versions = range(before[name], after[name] + 1)
            if name not in hits:
                assert not all(map(self.exists, versions)), f"{name} is missing, but exists in all of {versions}"
                continue
            scores = [
                min(1.0, float(self.vector(name, version).astype(np.float16) @ QUERY))
                for version in filter(self.exists, versions)
            ]
            score = hits[name].score
            assert any(abs(score - possible) <= TOLERANCE for possible in scores), (
                f"{name} has the score {score}, but its versions {versions} have {scores}"
            )


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_searches_concurrent_with_writes_and_compactions_are_exact_and_current(tmp_path: Path) -> None:
    ledger = Ledger()
    mine = open_gallery(tmp_path / "gallery", create=True)
    other = open_gallery(tmp_path / "gallery")
    failures: list[BaseException] = []

    def run(work: Callable[[Gallery], None], gallery: Gallery) -> None:
        try:
            work(gallery)
        except BaseException as error:
            failures.append(error)
            ledger.stop.set()

    jobs = [(ledger.keep_writing, mine), (ledger.keep_compacting, other)]
    jobs += [(ledger.keep_checking, gallery) for gallery in (mine, mine, other, other)]
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    ledger.stop.wait(6)
    ledger.stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert ledger.checks > 20 and sum(ledger.begun.values()) > 20
    for gallery in (mine, other):
        ledger.check(gallery)
        gallery.close()


def test_searches_of_the_previous_bundle_continue_while_the_next_one_is_opened(tmp_path: Path) -> None:
    with open_gallery(tmp_path / "gallery", create=True) as writer, open_gallery(tmp_path / "gallery") as reader:
        item, vector = Item(id="mug"), unit(1, 0, 0)
        for bundle in ("a", "b"):
            writer.upsert([(item, [photo("front", vector, 1)])], bundle)
        reader.search(vector[None], bundle_id="a")
        opened, proceed = threading.Event(), threading.Event()
        index, open_index = reader._index, reader._index.open

        def open_slowly(bundle: BundleRow) -> BuiltIndex:
            if bundle.id == "b":
                opened.set()
                assert proceed.wait(20)
            return open_index(bundle)

        index.open = open_slowly  # type: ignore[method-assign]
        writer.activate("b")
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(reader.search, vector[None], bundle_id="b")
            assert opened.wait(20)
            writer.upsert([(Item(id="lamp"), [photo("on", unit(0, 1, 0), 2)])], "a")
            try:
                assert [hit.item.id for hit in reader.search(vector[None], bundle_id="a").hits[0]] == ["mug", "lamp"]
            finally:
                proceed.set()
            assert following.result(20).bundle_id == "b"
