"""Copies between galleries of any engines: equal content and answers, also after kills and while others write."""

import json
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.gallery.copy import CopyReport, CopyStopped
from index.gallery.errors import JobRunning, StoreReadOnly
from index.gallery.jobs import Job
from index.gallery.types import Item
from tests.support.memory import peak_memory, reset_peak_memory
from tests.support.postgres import PostgresServer
from tests.support.qdrant import QUICK_OPTIONS, Cluster
from tests.support.tiny_bundle import make_tiny_bundle

from .memory import MemoryData, MemoryIndex, MemoryStore
from .reference import BUNDLE, OTHER_BUNDLE, TOLERANCE, TRIO, make_entries, photo, unit

ENGINES = ["sqlite", "memory", "postgres"]
DIRECTIONS = [
    *((source, target) for source in ENGINES for target in ENGINES),
    pytest.param("sqlite", "qdrant", marks=pytest.mark.slow),
    pytest.param("qdrant", "sqlite", marks=pytest.mark.slow),
]
BUNDLES = {BUNDLE: 3, OTHER_BUNDLE: 4, "d" * 16: 2}
"""Bundle id to dimension."""

Open = Callable[[str, str], Gallery]


class Galleries(ExitStack):
    """Opens new galleries by engine and name, and closes them."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        super().__init__()
        self._folder = folder
        self._request = request
        self._memories: dict[str, MemoryData] = {}

    def open(self, engine: str, name: str) -> Gallery:
        if engine == "memory":
            store = MemoryStore(self._memories.setdefault(name, MemoryData()))
            return self.enter_context(Gallery(store, MemoryIndex(store), address=f"memory://{name}"))
        if engine == "sqlite":
            return self.enter_context(open_gallery(self._folder / name, create=True))
        server: PostgresServer = self._request.getfixturevalue("postgres")
        schema = f"copy_{secrets.token_hex(4)}"
        self.callback(server.execute, f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        address = f"{server.url()}?schema={schema}"
        if engine == "qdrant":
            cluster: Cluster = self._request.getfixturevalue("qdrant_cluster")
            self.callback(cluster.drop, schema)
            address += f" {cluster.address(schema, QUICK_OPTIONS)}"
        return self.enter_context(open_gallery(address, create=True, cache=self._folder / f"cache-{name}"))


@pytest.fixture
def galleries(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Galleries]:
    with Galleries(tmp_path, request) as opened:
        yield opened


def contents(gallery: Gallery) -> object:
    """Returns everything that a client can read from a gallery, without versions."""
    found = {}
    for item in gallery.iter_items():
        stored = gallery.get_item(item.id)
        assert stored
        vectors = {
            bundle.id: {name: vector.tobytes() for name, vector in gallery.item_vectors(item.id, bundle.id).items()}
            for bundle in gallery.bundles()
        }
        thumbnails = [gallery.thumbnail(image.digest) for image in stored.images]
        found[item.id] = (json.dumps(item.model_dump(), sort_keys=True), stored.images, vectors, thumbnails)
    stats = gallery.stats()
    bundles = [(bundle.id, bundle.vectors) for bundle in sorted(gallery.bundles(), key=lambda bundle: bundle.id)]
    return found, bundles, stats.bundle_id, stats.previous_bundle_id, stats.images, stats.unsearchable


def answers(gallery: Gallery) -> list[dict[str, float]]:
    """Returns item id to score of what some searches with the active bundle find."""
    stats = gallery.stats()
    if not (stats.bundle_id and stats.dimension):
        return []
    queries = np.random.default_rng(1).normal(size=(3, stats.dimension)).astype(np.float32)
    results = gallery.search(queries, bundle_id=stats.bundle_id, top=1000).hits
    return [{hit.item.id: hit.score for hit in hits} for hits in results]


def check_answers(source: Gallery, target: Gallery) -> None:
    for found, wanted in zip(answers(target), answers(source), strict=True):
        assert found == pytest.approx(wanted, abs=TOLERANCE), "engines may round the last digit differently"


def check_equal(source: Gallery, target: Gallery, report: CopyReport) -> None:
    assert report.is_equal, report
    assert report.source.revision == source.stats().revision
    assert report.target.revision == target.stats().revision
    assert contents(target) == contents(source)
    check_answers(source, target)


def fill_two_bundles(gallery: Gallery, count: int = 40) -> None:
    """Two bundles with vectors, the second active, the first previous; items without images; some images of one."""
    entries = make_entries(count)
    gallery.upsert(entries, BUNDLE)
    gallery.activate(BUNDLE)
    gallery.upsert([(item, images[:1]) for item, images in entries[: count // 2]], OTHER_BUNDLE)
    gallery.upsert([(Item(id="bare", title="No image", attributes={"one": 1, "float": 1.0, "true": True}), [])], "")
    gallery.activate(OTHER_BUNDLE)


@pytest.mark.parametrize(("source_engine", "target_engine"), DIRECTIONS)
def test_a_copy_has_the_same_content_and_answers(galleries: Galleries, source_engine: str, target_engine: str) -> None:
    source, target = galleries.open(source_engine, "source"), galleries.open(target_engine, "target")
    fill_two_bundles(source)
    report = source.copy_to(target)
    check_equal(source, target, report)
    assert (report.written, report.deleted, report.passes) == (41, 0, 1)
    assert target.rollback() == BUNDLE


@pytest.mark.parametrize(("source_engine", "target_engine"), DIRECTIONS)
def test_a_repeated_copy_writes_only_what_changed(galleries: Galleries, source_engine: str, target_engine: str) -> None:
    source, target = galleries.open(source_engine, "source"), galleries.open(target_engine, "target")
    fill_two_bundles(source)
    first = source.copy_to(target)
    again = source.copy_to(target)
    assert (again.written, again.deleted) == (0, 0)
    assert again.target.revision == first.target.revision, "nothing was written"
    source.delete(["item-00003", "bare"])
    source.delete_images("item-00004", ["view-0"])
    item, _ = make_entries(40)[5]
    source.upsert([(item.model_copy(update={"attributes": {"price": 1}}), [])], BUNDLE)
    source.upsert([(make_entries(40)[6][0], [photo("view-0", unit(*range(1, 9)), 77)])], BUNDLE)
    source.upsert(
        [(make_entries(40)[7][0], [make_entries(40)[7][1][0]._replace(vector=unit(*range(8, 0, -1)))])], BUNDLE
    )
    report = source.copy_to(target)
    check_equal(source, target, report)
    assert (report.written, report.deleted) == (4, 2)


ITEM_IDS = st.sampled_from(["Z", "a", "a ", "é", "\uffee", "\U0001f600"])
IMAGE_IDS = st.sampled_from(["1", "2", "3"])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("upsert"), ITEM_IDS, st.lists(IMAGE_IDS, unique=True), st.sampled_from(list(BUNDLES)),
            st.integers(0, 3), st.sampled_from([1, 1.0, True, "1", -0.0, 1e300]),
        ),
        st.tuples(st.just("delete"), ITEM_IDS),
        st.tuples(st.just("delete_image"), ITEM_IDS, IMAGE_IDS),
        st.tuples(st.just("activate"), st.sampled_from(list(BUNDLES))),
        st.tuples(st.just("drop"), st.sampled_from(list(BUNDLES))),
    ),
    max_size=25,
)  # fmt: skip


def apply(gallery: Gallery, operation: tuple[object, ...]) -> None:
    match operation:
        case ("upsert", str(item), list(names), str(bundle), int(content), value):
            images = [
                photo(name, unit(*(len(item) + content + n for n in range(BUNDLES[bundle]))), content) for name in names
            ]
            gallery.upsert([(Item(id=item, attributes={"value": value}), images)], bundle, activate_first=False)  # type: ignore[dict-item]
        case ("delete", str(item)):
            gallery.delete([item])
        case ("delete_image", str(item), str(name)):
            gallery.delete_images(item, [name])
        case ("activate", str(bundle)):
            if any(one.id == bundle and one.vectors for one in gallery.bundles()):
                gallery.activate(bundle)
        case ("drop", str(bundle)):
            if bundle in {one.id for one in gallery.bundles()} and bundle != gallery.active_bundle():
                gallery.drop_bundle(bundle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source_engine", "target_engine"),
    [("sqlite", "memory"), ("memory", "sqlite"), ("sqlite", "postgres"), ("postgres", "sqlite")],
)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=OPERATIONS, then=OPERATIONS)
def test_any_gallery_is_copied_and_followed(
    request: pytest.FixtureRequest,
    source_engine: str,
    target_engine: str,
    first: list[tuple[object, ...]],
    then: list[tuple[object, ...]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, Galleries(Path(folder), request) as galleries:
        source, target = galleries.open(source_engine, "source"), galleries.open(target_engine, "target")
        for operations in (first, then):
            for operation in operations:
                apply(source, operation)
            check_equal(source, target, source.copy_to(target))


def test_the_order_of_images_is_kept_whatever_their_bundles(galleries: Galleries) -> None:
    source, target = galleries.open("sqlite", "source"), galleries.open("sqlite", "target")
    item = Item(id="item")
    for number, bundle in enumerate([BUNDLE, OTHER_BUNDLE, BUNDLE, "d" * 16, OTHER_BUNDLE]):
        source.upsert([(item, [photo(f"{9 - number}", unit(1, number), number)])], bundle)
    source.drop_bundle("d" * 16)
    check_equal(source, target, source.copy_to(target))
    stored = target.get_item("item")
    assert stored and [image.id for image in stored.images] == ["9", "8", "7", "6", "5"]
    source.delete_images("item", ["8"])
    source.upsert([(item, [photo("8", unit(1, 1), 1)])], OTHER_BUNDLE)
    check_equal(source, target, source.copy_to(target))


def test_models_of_the_bundles_are_copied(galleries: Galleries, tmp_path: Path) -> None:
    source, target = galleries.open("sqlite", "source"), galleries.open("sqlite", "target")
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    source.keep_bundle(bundle)
    source.upsert([(Item(id="item"), [photo("front", unit(*range(1, bundle.dimension + 1)), 1)])], bundle.id)
    source.activate(bundle.id)
    check_equal(source, target, source.copy_to(target))
    assert target.load_bundle(bundle.id).id == bundle.id


def test_a_target_with_other_content_is_refused(galleries: Galleries) -> None:
    source, target = galleries.open("sqlite", "source"), galleries.open("sqlite", "target")
    fill_two_bundles(source)
    target.upsert([(Item(id="precious"), [photo("front", unit(1, 2), 1)])], "e" * 16)
    target.activate("e" * 16)
    with pytest.raises(LookalikeError, match=r"other content.*--replace"):
        source.copy_to(target)
    assert target.get_item("precious")
    check_equal(source, target, source.copy_to(target, replace=True))
    assert target.get_item("precious") is None


def test_a_copy_that_was_written_to_is_refused(galleries: Galleries) -> None:
    source, target = galleries.open("memory", "source"), galleries.open("sqlite", "target")
    fill_two_bundles(source)
    source.copy_to(target)
    target.upsert([(Item(id="new"), [])], BUNDLE)
    with pytest.raises(LookalikeError, match=r"written to since it was copied.*--replace"):
        source.copy_to(target)
    assert target.get_item("new")


def test_a_gallery_is_not_copied_to_itself(galleries: Galleries, tmp_path: Path) -> None:
    folder = galleries.open("sqlite", "source")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    memory = galleries.open("memory", "source")
    store = memory._store
    other_address = Gallery(store, memory._index, address="memory://another-name")
    memory.upsert(TRIO, BUNDLE)
    for source, target in ((folder, open_gallery(tmp_path / "link")), (memory, memory), (memory, other_address)):
        with source, target, pytest.raises(LookalikeError):
            source.copy_to(target, replace=True)
    assert memory.stats().items == 3


def test_a_second_copy_to_the_same_target_is_refused(galleries: Galleries) -> None:
    source, target = galleries.open("sqlite", "source"), galleries.open("sqlite", "target")
    fill_two_bundles(source)

    def copy_again(job: Job) -> None:
        source.copy_to(target, replace=True)

    with pytest.raises(JobRunning):
        source.copy_to(target, on_start=copy_again)


def test_passwords_do_not_get_into_the_history_of_the_target(galleries: Galleries) -> None:
    memory = galleries.open("memory", "source")
    source = Gallery(memory._store, memory._index, address="postgresql://me:secret@host/shop qdrant://key@host")
    target = galleries.open("sqlite", "target")
    source.upsert(TRIO, BUNDLE)
    source.copy_to(target)
    assert [job.source for job in target.jobs.newest()] == ["copy of postgresql://host/shop qdrant://host"]


def test_a_read_only_target_is_refused_and_a_read_only_source_copied(
    galleries: Galleries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_two_bundles(galleries.open("sqlite", "source"))
    galleries.close()
    monkeypatch.setattr("index.gallery.store.sqlite_connection.is_read_only", lambda path: "source" in path.parts)
    monkeypatch.setattr("index.gallery.store.sqlite.is_read_only", lambda path: "source" in path.parts)
    monkeypatch.setattr("index.gallery.store.schema.is_read_only", lambda path: "source" in path.parts)
    monkeypatch.setattr("index.gallery.store.sqlite_jobs.is_read_only", lambda path: "source" in path.parts)
    with open_gallery(tmp_path / "source") as source, open_gallery(tmp_path / "target", create=True) as target:
        check_equal(source, target, source.copy_to(target))
        with pytest.raises(StoreReadOnly, match="target"):
            target.copy_to(source, replace=True)


def test_a_stopped_copy_activates_nothing_and_is_continued(galleries: Galleries) -> None:
    source, target = galleries.open("sqlite", "source"), galleries.open("sqlite", "target")
    fill_two_bundles(source, 1200)
    jobs: list[Job] = []
    with pytest.raises(CopyStopped):
        source.copy_to(target, on_start=jobs.append, on_progress=lambda done, total, stage: jobs[0].stop())
    assert 0 < target.stats().items < 1201
    assert target.active_bundle() is None
    assert target.jobs.newest()[0].state == "cancelled"
    report = source.copy_to(target)
    check_equal(source, target, report)
    assert report.written < 1201, "what was copied before is not written again"


def test_writes_during_the_copy_are_followed(galleries: Galleries) -> None:
    source, target = galleries.open("sqlite", "source"), galleries.open("sqlite", "target")
    fill_two_bundles(source, 1500)
    deletions = iter([["item-00001"], ["item-01499"]])

    def change(done: int, total: int, stage: str) -> None:
        for item_id in next(deletions, []):
            source.delete([item_id])
            source.upsert([(Item(id=f"new-{item_id}"), [photo("front", unit(*range(1, 9)), 5)])], BUNDLE)

    report = source.copy_to(target, on_progress=change)
    assert report.passes == 2
    check_equal(source, target, report)


@pytest.mark.slow
def test_a_copy_of_a_gallery_that_a_process_writes_is_of_one_revision(galleries: Galleries, tmp_path: Path) -> None:
    source, target = galleries.open("sqlite", "source"), galleries.open("sqlite", "target")
    fill_two_bundles(source, 2000)
    stopped = threading.Event()

    def write() -> None:
        with open_gallery(tmp_path / "source") as writer:
            entries = make_entries(2000, seed=9)
            for number in range(100_000):
                if stopped.is_set():
                    return
                item, images = entries[number % 2000]
                writer.upsert([(item.model_copy(update={"title": f"{number}"}), images)], BUNDLE)
                writer.delete([entries[(number * 7) % 2000][0].id])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(3):
            assert source.copy_to(target).is_equal
    finally:
        stopped.set()
        thread.join()
    check_equal(source, target, source.copy_to(target))


@pytest.mark.slow
def test_a_killed_copy_is_continued(galleries: Galleries, tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    chance = random.Random(seed)
    source = galleries.open("sqlite", "source")
    fill_two_bundles(source, 3000)
    command = [sys.executable, "-m", "lookalike", "gallery", "copy", str(tmp_path / "source"), str(tmp_path / "target")]
    kills = 0
    for _ in range(12):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=chance.uniform(0.4, 2))
            assert process.returncode == 0, errors
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
        source.delete([f"item-{chance.randrange(3000):05}"])
    assert kills
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    with open_gallery(tmp_path / "target") as target:
        assert contents(target) == contents(source)
        check_answers(source, target)


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_gallery(galleries: Galleries) -> None:
    peaks = []
    for count in (5_000, 40_000):
        source, target = galleries.open("sqlite", f"source-{count}"), galleries.open("sqlite", f"target-{count}")
        for start in range(0, count, 1000):
            entries = [
                (
                    Item(id=f"item-{number:06}"),
                    [photo("front", unit(*range(1, 65)), number)._replace(thumbnail=bytes(4000))],
                )
                for number in range(start, start + 1000)
            ]
            source.upsert(entries, BUNDLE, activate_first=False)
        reset_peak_memory()
        before = peak_memory()
        assert source.copy_to(target).is_equal
        peaks.append(peak_memory() - before)
    assert peaks[1] < peaks[0] + 40e6, peaks
