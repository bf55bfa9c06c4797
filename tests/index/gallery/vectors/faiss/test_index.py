"""The FAISS index of a gallery: builds, locks, cleans up, and refuses a generation that is not the expected one."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from index.gallery.errors import IndexBuildError, IndexDamaged
from index.gallery.store.base import BundleRow
from index.gallery.store.sqlite import SQLiteStore
from index.gallery.vectors.faiss.generation import Generation, Manifest, open_generation
from index.gallery.vectors.faiss.index import GENERATION_FILES, GENERATIONS, FaissIndex
from index.gallery.vectors.faiss.settings import FaissSettings
from tests.index.gallery.reference import BUNDLE, TRIO


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with closing(SQLiteStore(tmp_path)) as store:
        store.upsert(TRIO, BUNDLE)
        yield store


@pytest.fixture
def index(store: SQLiteStore, tmp_path: Path) -> FaissIndex:
    return FaissIndex(tmp_path, store)


def get_bundle(store: SQLiteStore) -> BundleRow:
    bundle = store.read.bundle(BUNDLE)
    assert bundle
    return bundle


def test_a_build_is_recorded_in_the_store_and_repeated_only_after_changes(
    store: SQLiteStore, index: FaissIndex
) -> None:
    assert get_bundle(store).index_name is None
    first = index.build(BUNDLE)
    assert first and (first.images, first.revision, first.kind, first.is_new) == (4, 1, "exact", True)
    bundle = get_bundle(store)
    assert (bundle.index_name, bundle.index_revision) == (first.name, 1)
    again = index.build(BUNDLE)
    assert again and again == first.model_copy(update={"is_new": False})
    store.delete(["mug"])
    newer = index.build(BUNDLE)
    assert newer and (newer.images, newer.revision, newer.is_new) == (3, 2, True)
    rebuilt = index.build(BUNDLE, rebuild=True)
    assert rebuilt and rebuilt.is_new and rebuilt.name != newer.name and rebuilt.revision == 2


def test_a_bundle_without_images_has_no_index(store: SQLiteStore, index: FaissIndex) -> None:
    assert index.build("unknown") is None
    index.build(BUNDLE)
    store.delete(["mug", "shoe", "bag"])
    assert index.build(BUNDLE) is None
    assert get_bundle(store).index_name is None


def test_generations_that_no_bundle_names_are_removed(index: FaissIndex, tmp_path: Path) -> None:
    report = index.build(BUNDLE)
    (tmp_path / GENERATIONS / "unused").mkdir()
    (tmp_path / GENERATIONS / "unused" / "index.faiss").write_text("")
    (tmp_path / GENERATIONS / ".vectors.tmp").write_text("")
    index.clean()
    assert report and [path.name for path in (tmp_path / GENERATIONS).iterdir()] == [report.name]


def test_one_build_runs_at_a_time(index: FaissIndex, tmp_path: Path) -> None:
    assert not index.is_building()
    with (tmp_path / "compaction.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert index.is_building()
        assert index.build(BUNDLE, wait=False) is None
    assert not index.is_building()
    assert index.build(BUNDLE, wait=False)


def test_a_build_that_cannot_be_written_is_an_error_with_a_remedy(index: FaissIndex, tmp_path: Path) -> None:
    (tmp_path / GENERATIONS).write_text("a file where the folder should be")
    with pytest.raises(IndexBuildError, match=r"could not be written: .* Free space"):
        index.build(BUNDLE)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"id": "c" * 16}, "has bundle"),
        ({"index_revision": 7}, "has revision 1, not 7"),
        ({"dimension": 5}, "has dimension 3, not 5"),
    ],
)
def test_an_intact_generation_of_another_state_is_refused(
    store: SQLiteStore, index: FaissIndex, changed: dict[str, object], problem: str
) -> None:
    index.build(BUNDLE)
    assert index.open(get_bundle(store)).revision == 1
    with pytest.raises(IndexDamaged, match=problem):
        index.open(get_bundle(store)._replace(**changed))  # type: ignore[arg-type]


def test_the_files_of_an_index_are_listed_for_a_snapshot(store: SQLiteStore, index: FaissIndex, tmp_path: Path) -> None:
    assert index.files(get_bundle(store)) == {}
    report = index.build(BUNDLE)
    assert report
    files = index.files(get_bundle(store))
    assert set(files) == {f"{GENERATIONS}/{report.name}/{name}" for name in GENERATION_FILES}
    assert all(path == tmp_path / name and path.is_file() for name, path in files.items())


def test_a_generation_that_is_removed_while_it_is_opened_counts_as_damaged(
    store: SQLiteStore, index: FaissIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.build(BUNDLE)

    def open_and_remove(directory: Path, settings: FaissSettings) -> tuple[Generation, Manifest]:
        opened = open_generation(directory, settings)
        shutil.rmtree(directory)
        return opened

    monkeypatch.setattr("index.gallery.vectors.faiss.index.open_generation", open_and_remove)
    with pytest.raises(IndexDamaged, match="was removed"):
        index.open(get_bundle(store))


def test_a_bundle_that_is_dropped_during_its_build_has_no_index(
    store: SQLiteStore, index: FaissIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_index = store.set_index
    store.upsert(TRIO, "c" * 16)
    dropped = store.read.bundle("c" * 16)
    assert dropped

    def drop_before(bundle: int, name: str | None, revision: int) -> None:
        store.drop_bundle(dropped)
        store.upsert(TRIO, "d" * 16)
        set_index(bundle, name, revision)

    monkeypatch.setattr(store, "set_index", drop_before)
    assert index.build("c" * 16) is None
    newer = store.read.bundle("d" * 16)
    assert newer and newer.index_name is None
