"""Verification: an intact gallery has no faults, and every damage is reported with its remedy."""

import json
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from index.embedding.bundle import Bundle
from index.gallery import open_gallery
from index.gallery import verify_gallery as verify
from index.gallery.vectors.faiss.settings import FaissSettings, IndexKind
from index.gallery.verify import Fault
from tests.support.filled_gallery import BUNDLE, entry, fill, vector
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    return fill(tmp_path / "gallery", later=4)


def edit_store(gallery: Path, statement: str, *values: object) -> None:
    """Changes the store directly, as no write of a gallery does."""
    with closing(sqlite3.connect(gallery / "catalogue.sqlite")) as database, database:
        assert database.execute(statement, values).rowcount > 0


def flip(path: Path, offset: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


def single(faults: list[Fault]) -> Fault:
    (fault,) = faults
    return fault


def test_an_intact_gallery_has_no_faults_and_every_image_is_compared(gallery: Path) -> None:
    progress: list[tuple[int, int]] = []
    assert verify(gallery, on_progress=lambda done, total: progress.append((done, total))) == []
    assert progress[-1] == (47, 47)


def test_galleries_without_a_generation_or_images_have_no_faults(tmp_path: Path) -> None:
    opened = open_gallery(tmp_path / "gallery", create=True)
    assert verify(tmp_path / "gallery") == []
    opened.upsert([entry(1)], BUNDLE)
    assert verify(tmp_path / "gallery") == []
    opened.activate(BUNDLE)
    opened.delete(["item-00001"])
    assert verify(tmp_path / "gallery") == []
    opened.close()


def test_a_generation_of_another_release_is_reported_and_rebuilt(gallery: Path) -> None:
    [manifest] = gallery.glob("generations/*/manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema_version": 2}))
    assert "schema_version" in single(verify(gallery)).problem
    with closing(open_gallery(gallery)) as opened:
        opened.compact()
        assert opened.search(vector(1)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert verify(gallery) == []


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_the_vectors_of_every_kind_of_index_are_compared(gallery: Path, kind: IndexKind) -> None:
    settings = FaissSettings(exact_up_to=0, hnsw_up_to=0 if kind == "ivf" else 4_000_000)
    with open_gallery(gallery, faiss_settings=settings) as opened:
        report = opened.compact(rebuild=True)
    assert report and report.kind == kind
    assert verify(gallery) == []
    edit_store(gallery, "UPDATE vectors SET vector = ? WHERE image = 7", vector(999).astype("<f2").tobytes())
    assert "1 images have another vector in the index" in single(verify(gallery)).problem


@pytest.mark.parametrize("name", ["index.faiss", "records.arrays", "manifest.json"])
def test_a_changed_byte_in_a_generation_is_reported(gallery: Path, name: str) -> None:
    (file,) = gallery.glob(f"generations/*/{name}")
    flip(file, file.read_bytes().index(b"images") + 2 if name == "manifest.json" else file.stat().st_size // 2)
    fault = single(verify(gallery))
    assert str(file.parent) in fault.problem
    assert fault.remedy == f"Rebuild it: lookalike gallery compact {gallery}."
    compact(gallery)
    assert verify(gallery) == []


def compact(gallery: Path, *, rebuild: bool = False) -> None:
    opened = open_gallery(gallery)
    opened.compact(rebuild=rebuild)
    opened.close()


def test_a_generation_of_another_gallery_is_reported(gallery: Path, tmp_path: Path) -> None:
    (mine,) = (gallery / "generations").iterdir()
    other = fill(tmp_path / "other")
    opened = open_gallery(other)
    opened.upsert([entry(99)], BUNDLE)
    report = opened.compact()
    assert report
    theirs = report.name
    opened.close()
    shutil.rmtree(mine)
    shutil.copytree(other / "generations" / theirs, mine)
    assert f"has name {theirs}, not {mine.name}" in single(verify(gallery)).problem
    compact(gallery, rebuild=True)
    assert verify(gallery) == []


def test_a_changed_byte_in_the_store_is_reported(gallery: Path) -> None:
    file = gallery / "catalogue.sqlite"
    intact = file.read_bytes()
    flip(file, intact.index(vector(3).astype("<f2").tobytes()) + 3)
    assert "item-00001/back" in single(verify(gallery)).problem
    file.write_bytes(intact)
    flip(file, intact.index("Möbel 7".encode()) + 2, bit=128)
    fault = single(verify(gallery))
    assert "cannot be read" in fault.problem and "lookalike gallery restore" in fault.remedy
    for offset in (3, 8192 + 3, 8192 * (len(intact) // 8192 // 2)):
        file.write_bytes(intact)
        flip(file, offset)
        assert verify(gallery), f"byte {offset}"


def test_a_missing_generation_is_reported(gallery: Path) -> None:
    shutil.rmtree(gallery / "generations")
    assert "cannot be read" in single(verify(gallery)).problem
    compact(gallery)
    assert verify(gallery) == []


CHANGES = [
    ("UPDATE vectors SET vector = (SELECT vector FROM vectors WHERE image = 1) WHERE image = 8", "another vector"),
    (
        "UPDATE images SET digest = (SELECT digest FROM images WHERE key = 1) WHERE key = 8",
        "another item, id or digest",
    ),
    ("UPDATE images SET id = 'side' WHERE key = 8", "another item, id or digest"),
    ("UPDATE images SET item = 9, id = 'third' WHERE key = 8", "another item, id or digest"),
    ("UPDATE items SET title = 'Changed' WHERE key = 4", "2 images have another item"),
    ("UPDATE items SET id = 'other' WHERE key = 4", "2 images have another item"),
    ("UPDATE items SET attributes = replace(attributes, 'true', '1') WHERE key = 4", "have another item"),
    ("DELETE FROM images WHERE key = 9", "found by searches, but are not in the store"),
    ("INSERT INTO vectors SELECT 1, 8, 1, vector FROM vectors WHERE image = 9", "found by no search: item-00003/back"),
]


@pytest.mark.parametrize(("statement", "problem"), CHANGES, ids=[problem for _, problem in CHANGES])
def test_a_row_that_differs_from_the_index_is_reported(tmp_path: Path, statement: str, problem: str) -> None:
    gallery = fill(tmp_path / "gallery")
    if statement.startswith("INSERT"):
        edit_store(gallery, "DELETE FROM vectors WHERE image = 8")
        compact(gallery, rebuild=True)
    edit_store(gallery, statement)
    if statement.startswith("DELETE"):
        edit_store(gallery, "DELETE FROM vectors WHERE image = 9")
    fault = single(verify(gallery))
    assert problem in fault.problem
    assert f"compact {gallery} --rebuild" in fault.remedy and "restore a snapshot" in fault.remedy
    compact(gallery, rebuild=True)
    assert verify(gallery) == []


MALFORMED = [
    ("UPDATE vectors SET vector = x'00' WHERE image = 8", "1 vectors are not of their bundle's dimension"),
    ("UPDATE items SET attributes = '{' WHERE key = 4", "1 items have attributes that are not a JSON object"),
    ("UPDATE images SET digest = 'abc' WHERE key = 8", "1 images have an invalid digest"),
    ("DELETE FROM thumbnails WHERE digest LIKE '%8'", "2 images lack their thumbnail"),
    ("DELETE FROM images WHERE key = 8", "1 rows refer to rows that do not exist"),
    ("UPDATE counters SET value = 0 WHERE name = 'revision'", "rows have a revision that was never written"),
]


@pytest.mark.parametrize(("statement", "problem"), MALFORMED, ids=[problem for _, problem in MALFORMED])
def test_malformed_rows_are_reported(tmp_path: Path, statement: str, problem: str) -> None:
    gallery = fill(tmp_path / "gallery")
    edit_store(gallery, statement)
    assert any(problem in fault.problem and "restore" in fault.remedy for fault in verify(gallery))


def test_a_vector_in_the_delta_that_is_not_finite_is_reported(gallery: Path) -> None:
    invalid = np.full(8, np.nan, "<f2").tobytes()
    edit_store(gallery, "UPDATE vectors SET vector = ? WHERE image = 47", invalid)
    assert "item-00023/front" in single(verify(gallery)).problem


def test_all_faults_are_reported_together(gallery: Path) -> None:
    edit_store(gallery, "DELETE FROM thumbnails WHERE digest LIKE '%7'")
    shutil.rmtree(gallery / "generations")
    assert len(verify(gallery)) == 2


def test_the_generation_of_the_previous_bundle_is_checked(gallery: Path) -> None:
    (old,) = (gallery / "generations").iterdir()
    opened = open_gallery(gallery)
    opened.upsert([entry(number) for number in range(24)], "c" * 16)
    opened.activate("c" * 16)
    opened.close()
    assert verify(gallery) == []
    (old / "index.faiss").unlink()
    fault = single(verify(gallery))
    assert old.name in fault.problem and "activated" in fault.remedy


@pytest.mark.parametrize("damage", ["lost", "damaged"])
def test_activation_rebuilds_a_bad_generation_although_nothing_was_written_since(tmp_path: Path, damage: str) -> None:
    opened = open_gallery(tmp_path / "gallery", create=True)
    opened.upsert([entry(number) for number in range(3)], BUNDLE)
    opened.upsert([entry(number) for number in range(3)], "c" * 16)
    prepared = tmp_path / "gallery" / "generations" / opened.prepare("c" * 16).name
    if damage == "lost":
        shutil.rmtree(prepared)
    else:
        flip(prepared / "index.faiss", -3)
    opened.activate("c" * 16)
    assert opened.verify() == []
    opened.close()


def test_an_emptied_store_is_a_fault_and_never_becomes_a_new_gallery(gallery: Path) -> None:
    (gallery / "catalogue.sqlite").write_bytes(b"")
    for _ in range(2):
        fault = single(verify(gallery))
        assert "is missing or empty" in fault.problem and "restore" in fault.remedy
    assert list((gallery / "generations").iterdir())


def test_a_damaged_copy_of_a_bundle_is_reported(tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle.directory)
    opened = open_gallery(gallery)
    opened.keep_bundle(bundle)
    opened.close()
    assert verify(gallery) == []
    model = gallery / "bundles" / bundle.id / "model.onnx"
    flip(model, 100)
    fault = single(verify(gallery))
    assert "is damaged" in fault.problem and bundle.id in fault.remedy


def test_concurrent_writes_and_compactions_are_not_faults(tmp_path: Path) -> None:
    gallery = fill(tmp_path / "gallery")
    stop = threading.Event()

    def write() -> None:
        opened = open_gallery(gallery)
        number = 20
        while not stop.is_set():
            opened.upsert([entry(number)], BUNDLE)
            opened.delete([f"item-{number - 10:05}"])
            if number % 10 == 0:
                opened.compact()
            number += 1
        opened.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert [fault for _ in range(20) for fault in verify(gallery)] == []
    finally:
        stop.set()
        writer.join()


def test_a_damaged_job_history_is_a_fault_that_hides_no_other(gallery: Path) -> None:
    (gallery / "jobs.sqlite").write_bytes(b"not a database, but long enough to be read as one" * 20)
    with open_gallery(gallery) as opened:
        assert opened.jobs.newest() == []
    fault = single(verify(gallery))
    assert "job history was damaged" in fault.problem and "Delete jobs.sqlite" in fault.remedy
    edit_store(gallery, "UPDATE items SET title = 'Changed' WHERE key = 9")
    assert ["job history" in fault.problem for fault in verify(gallery)] == [True, False]


def test_a_store_that_is_older_than_its_index_or_its_jobs_has_lost_writes(
    gallery: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(gallery / "catalogue.sqlite", tmp_path / "old.sqlite")
    with open_gallery(gallery) as opened:
        opened.upsert([entry(100)], BUNDLE)
        report = opened.compact()
        opened.jobs.begin("shop.csv", BUNDLE).update(state="done", revision=opened.stats().revision)
    assert report and verify(gallery) == []
    shutil.copy(tmp_path / "old.sqlite", gallery / "catalogue.sqlite")
    faults = verify(gallery)
    lost = [fault.problem for fault in faults if "lost" in fault.problem]
    assert lost == [
        f"The store is at revision 4, but {event} at revision 5: later writes were lost."
        for event in ("an index was built", "a job ended")
    ]
    assert "later writes were lost" in caplog.text, "opening reports it too"
    with open_gallery(gallery) as opened:
        opened.compact()
        assert (gallery / "generations" / report.name).is_dir(), "the last copy of the lost vectors is kept"
        for number in range(200, 202):
            opened.upsert([entry(number)], BUNDLE)
        opened.compact()
    assert not (gallery / "generations" / report.name).is_dir()
    assert verify(gallery) == []
