"""Kills and full disks: no acknowledged write is lost, and searches continue."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery, restore_gallery, verify_gallery
from index.gallery.types import Item
from tests.support.disk import files_up_to
from tests.support.filled_gallery import fill
from tests.support.tiny_bundle import make_tiny_bundle

from .reference import BUNDLE, ReferenceGallery, make_entries, photo, unit, wait_until
from .writer_process import DIMENSION, run_writer_process, write

KILLS = 50
COMPACTION_KILLS = 20


def contents(gallery: Gallery) -> dict[str, tuple[Item, dict[str, str]]]:
    """Returns all items with the digests of their images, which depend on the vectors here."""
    return {item.id: (item, gallery.digests(item.id, BUNDLE)) for item in gallery.scan(count=5000).items}


def reference_contents(reference: ReferenceGallery) -> dict[str, tuple[Item, dict[str, str]]]:
    return {
        item_id: (item, {name: image.digest for name, image in reference.images[item_id].items()})
        for item_id, item in reference.items.items()
    }


def check_searches(gallery: Gallery, reference: ReferenceGallery, seed: int, *, dimension: int = DIMENSION) -> None:
    for numbers in np.random.default_rng(seed).normal(size=(3, dimension)):
        query = unit(*numbers)[None]
        reference.check(gallery.search(query, bundle_id=BUNDLE, top=20).hits[0], query, top=20)


def index_name(gallery: Gallery) -> str | None:
    index = gallery.stats().index
    return index.name if index else None


def compact(gallery: Gallery, *, rebuild: bool = False) -> str:
    report = gallery.compact(rebuild=rebuild)
    assert report
    return report.name


def generations(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "generations").iterdir())


@pytest.mark.slow
def test_a_killed_writer_loses_no_acknowledged_write(tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    random = Random(seed)
    directory = tmp_path / "gallery"
    reader = open_gallery(directory, create=True)
    reference = ReferenceGallery()
    write(reader, 0)
    write(reference, 0)
    number = 1
    with run_writer_process(directory) as process:
        for kill in range(KILLS):
            pid = process.start("write", number)
            if kill % 3:
                process.receive()  # the first write: the kill hits a later write, not the opening
                write(reference, number)
                number += 1
            time.sleep(random.uniform(0, 0.15))
            acknowledged = process.kill(pid)
            assert acknowledged == list(range(number, number + len(acknowledged)))
            for one in acknowledged:
                write(reference, one)
            number += len(acknowledged)
            # Sometimes a handle that stays open reads; a new one must recover from the log that the killed one left.
            gallery = reader if kill % 5 == 0 else open_gallery(directory)
            found = contents(gallery)
            if found != reference_contents(reference):
                # The last write was committed, but killed before it was acknowledged.
                write(reference, number)
                number += 1
                assert found == reference_contents(reference)
            check_searches(gallery, reference, kill)
            if gallery is not reader:
                gallery.close()
    assert number > KILLS, "too few writes"
    check_searches(reader, reference, seed % 2**32)
    reader.compact()
    assert contents(reader) == reference_contents(reference)
    check_searches(reader, reference, seed % 2**32)
    assert len(generations(directory)) == 1, "files of killed compactions are removed"
    reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("exact_up_to", [100, 100_000], ids=["hnsw", "exact"])
def test_a_killed_compaction_changes_nothing(tmp_path: Path, exact_up_to: int) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    random = Random(seed)
    directory = tmp_path / "gallery"
    entries = make_entries(600)
    reference = ReferenceGallery(entries)
    gallery = open_gallery(directory, create=True)
    gallery.upsert(entries, BUNDLE)
    gallery.compact()
    with run_writer_process(directory) as process:
        for kill in range(COMPACTION_KILLS):
            pid = process.start("compact", exact_up_to)
            if kill % 2:
                process.receive()  # the first compaction: the kill hits the next one
            time.sleep(random.uniform(0.01, 0.2))
            process.kill(pid)
            reader = open_gallery(directory)
            assert index_name(reader) is not None, "a generation that the store names is complete"
            if kill % 5 == 0:
                check_searches(reader, reference, kill, dimension=8)
                check_searches(gallery, reference, kill, dimension=8)
            reader.close()
    name = compact(gallery, rebuild=True)
    assert generations(directory) == [name]
    check_searches(gallery, reference, seed % 2**32, dimension=8)
    assert contents(gallery) == reference_contents(reference)
    gallery.close()


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from index.embedding.bundle import Bundle
from index.gallery import backup, open_gallery, restore_gallery

def kill(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

gallery, target = Path(sys.argv[2]), Path(sys.argv[3])
if sys.argv[1] == "snapshot":
    backup._write = kill
    open_gallery(gallery).snapshot(target)
if sys.argv[1] == "restore":
    backup._forget_missing_indexes = kill
    restore_gallery(gallery, target)
shutil.copyfile = kill
Bundle.load(gallery).copy_to(target)
"""


def run_killed(work: str, source: Path, target: Path) -> None:
    """Runs some work in a process that is killed in the middle, and checks that it left something."""
    killed = subprocess.run([sys.executable, "-c", KILLED, work, str(source), str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert any(path.name.startswith(f".{target.name}.") for path in target.parent.iterdir())


def test_what_killed_copies_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    directory, bundle, out = fill(tmp_path / "gallery"), make_tiny_bundle(tmp_path / "bundle"), tmp_path / "out"
    out.mkdir()
    run_killed("snapshot", directory, out / "monday.tar")
    with open_gallery(directory) as gallery:
        gallery.snapshot(out / "tuesday.tar")
    assert [path.name for path in out.iterdir()] == ["tuesday.tar"]
    run_killed("restore", out / "tuesday.tar", out / "monday")
    restore_gallery(out / "tuesday.tar", out / "tuesday")
    run_killed("copy", bundle, out / "first")
    Bundle.load(bundle).copy_to(out / "second")
    assert sorted(path.name for path in out.iterdir()) == ["second", "tuesday", "tuesday.tar"]
    assert verify_gallery(out / "tuesday") == []


SEARCH_TRUNCATED = """
import os, sys
from pathlib import Path
import numpy as np
from index.gallery import open_gallery

gallery = open_gallery(sys.argv[1])
query = np.eye(8, dtype=np.float32)[:1]
assert gallery.search(query, bundle_id="b" * 16).hits[0]
for file in Path(sys.argv[1]).glob("generations/*/index.faiss"):
    os.truncate(file, 0)
gallery.search(query, bundle_id="b" * 16)
"""


def test_a_process_that_a_truncated_index_ended_recovers_when_it_is_started_again(tmp_path: Path) -> None:
    directory = tmp_path / "gallery"
    entries = make_entries(600)
    reference = ReferenceGallery(entries)
    with open_gallery(directory, create=True) as gallery:
        gallery.upsert(entries, BUNDLE)
        gallery.compact()
    ended = subprocess.run([sys.executable, "-c", SEARCH_TRUNCATED, str(directory)], check=False)
    assert ended.returncode == -signal.SIGBUS
    [fault] = verify_gallery(directory)
    assert "differs from what was written" in fault.problem and "gallery compact" in fault.remedy
    with open_gallery(directory, maintain=True) as gallery:
        check_searches(gallery, reference, 1, dimension=8)
        wait_until(lambda: index_name(gallery) is not None)
        check_searches(gallery, reference, 2, dimension=8)
    assert verify_gallery(directory) == []


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[tuple[Gallery, ReferenceGallery]]:
    """A gallery with a generation, and the reference with the same items."""
    entries = make_entries(160)
    gallery = open_gallery(tmp_path / "gallery", create=True)
    gallery.upsert(entries, BUNDLE)
    gallery.compact()
    yield gallery, ReferenceGallery(entries)
    gallery.close()


def test_a_write_to_a_full_disk_is_refused_and_changes_nothing(
    filled: tuple[Gallery, ReferenceGallery], tmp_path: Path
) -> None:
    gallery, reference = filled
    largest = max(path.stat().st_size for path in (tmp_path / "gallery").glob("catalogue*"))
    more = iter(make_entries(400, seed=3)[160:])
    with files_up_to(largest + 400_000):
        with pytest.raises(LookalikeError, match="Free space") as refused:
            for entry in more:
                gallery.upsert([entry], BUNDLE)
                reference.upsert([entry])
        assert "Nothing was written" in refused.value.problem
        assert len(reference.items) > 160, "some writes succeed"
        check_searches(gallery, reference, 1, dimension=8)
        with pytest.raises(LookalikeError, match="Free space"):
            gallery.upsert(make_entries(400, seed=4), BUNDLE)
        check_searches(gallery, reference, 2, dimension=8)
    for handle in (gallery, open_gallery(tmp_path / "gallery")):
        assert contents(handle) == reference_contents(reference)
        entry = next(more)
        handle.upsert([entry], BUNDLE)
        reference.upsert([entry])
        check_searches(handle, reference, 3, dimension=8)
        handle.close()


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_compaction_on_a_full_disk_is_refused_and_changes_nothing(
    filled: tuple[Gallery, ReferenceGallery], tmp_path: Path, share: float
) -> None:
    gallery, reference = filled
    (before,) = generations(tmp_path / "gallery")
    size = (tmp_path / "gallery" / "generations" / before / "index.faiss").stat().st_size
    new = Item(id="new"), [photo("one", unit(*range(1, 9)))]
    gallery.upsert([new], BUNDLE)
    reference.upsert([new])
    with files_up_to(int(size * share)), pytest.raises(LookalikeError, match="Free space"):
        gallery.compact(rebuild=True)
    assert generations(tmp_path / "gallery") == [before]
    check_searches(gallery, reference, 1, dimension=8)
    name = compact(gallery)
    assert generations(tmp_path / "gallery") == [name]
    check_searches(gallery, reference, 1, dimension=8)
