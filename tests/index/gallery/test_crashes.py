"""Kills, full disks and damaged files: nothing that was acknowledged is lost, and searches go on."""

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest

from index.errors import LookalikeError
from index.gallery import Gallery, open_gallery
from index.gallery.store import sqlite
from index.gallery.types import Item
from tests.support.disk import files_up_to

from .reference import BUNDLE, PlainGallery, photo, shop, unit
from .writing_process import DIMENSION, forging, write

KILLS = 50
COMPACTION_KILLS = 20


def contents(gallery: Gallery) -> dict[str, tuple[Item, dict[str, str]]]:
    """All items with the digests of their images, which are those of their vectors here."""
    return {item.id: (item, gallery.digests(item.id, BUNDLE)) for item in gallery.scan(count=5000).items}


def plain_contents(plain: PlainGallery) -> dict[str, tuple[Item, dict[str, str]]]:
    return {
        item_id: (item, {name: image.digest for name, image in plain.images[item_id].items()})
        for item_id, item in plain.items.items()
    }


def check_searches(gallery: Gallery, plain: PlainGallery, seed: int, *, dimension: int = DIMENSION) -> None:
    for numbers in np.random.default_rng(seed).normal(size=(3, dimension)):
        query = unit(*numbers)[None]
        plain.check(gallery.search(query, bundle_id=BUNDLE, top=20).hits[0], query, top=20)


def index_name(gallery: Gallery) -> str | None:
    index = gallery.stats().index
    return index.name if index else None


def compact(gallery: Gallery, *, rebuild: bool = False) -> str:
    report = gallery.compact(rebuild=rebuild)
    assert report
    return report.name


def generations(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "generations").iterdir())


def test_a_writer_that_is_killed_at_any_moment_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    random = Random(seed)
    directory = tmp_path / "gallery"
    reader = open_gallery(directory, create=True)
    plain = PlainGallery()
    write(reader, 0)
    write(plain, 0)
    number = 1
    with forging(directory) as forge:
        for kill in range(KILLS):
            pid = forge.start("write", number)
            if kill % 3:
                forge.told()  # the first write: what follows is killed in the middle of writes, not of opening
                write(plain, number)
                number += 1
            time.sleep(random.uniform(0, 0.15))
            killed = forge.kill(pid)
            assert killed.numbers == list(range(number, number + len(killed.numbers)))
            for acknowledged in killed.numbers:
                write(plain, acknowledged)
            number += len(killed.numbers)
            # Now and then a process that stays open looks; the others must recover what the dead one left.
            gallery = reader if kill % 5 == 0 else open_gallery(directory)
            found = contents(gallery)
            if found != plain_contents(plain):
                # The write that was under way is there as a whole, though nobody was told.
                write(plain, number)
                number += 1
                assert found == plain_contents(plain)
            check_searches(gallery, plain, kill)
            if gallery is not reader:
                gallery.close()
    assert number > KILLS, "the writers got nowhere"
    check_searches(reader, plain, seed % 2**32)
    reader.compact()
    assert contents(reader) == plain_contents(plain)
    check_searches(reader, plain, seed % 2**32)
    assert len(generations(directory)) == 1, "what killed compactions left is cleaned up"
    reader.close()


@pytest.mark.parametrize("graphs_from", [100, 100_000], ids=["graphs", "exact"])
def test_a_compaction_that_is_killed_at_any_moment_changes_nothing(tmp_path: Path, graphs_from: int) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    random = Random(seed)
    directory = tmp_path / "gallery"
    entries = shop(600)
    plain = PlainGallery(entries)
    gallery = open_gallery(directory, create=True)
    gallery.upsert(entries, BUNDLE)
    gallery.compact()
    with forging(directory) as forge:
        for kill in range(COMPACTION_KILLS):
            pid = forge.start("compact", graphs_from)
            if kill % 2:
                forge.told()  # the first one is done: the kill hits the next
            time.sleep(random.uniform(0.01, 0.2))
            forge.kill(pid)
            reader = open_gallery(directory)
            assert index_name(reader) is not None, "a generation that is named is whole"
            if kill % 5 == 0:
                check_searches(reader, plain, kill, dimension=8)
                check_searches(gallery, plain, kill, dimension=8)
            reader.close()
    name = compact(gallery, rebuild=True)
    assert generations(directory) == [name]
    check_searches(gallery, plain, seed % 2**32, dimension=8)
    assert contents(gallery) == plain_contents(plain)
    gallery.close()


@pytest.fixture
def stocked(tmp_path: Path) -> Iterator[tuple[Gallery, PlainGallery]]:
    """A gallery with a generation, and the same in plain Python."""
    entries = shop(160)
    gallery = open_gallery(tmp_path / "gallery", create=True)
    gallery.upsert(entries, BUNDLE)
    gallery.compact()
    yield gallery, PlainGallery(entries)
    gallery.close()


def test_a_full_disk_refuses_writes_and_loses_nothing(stocked: tuple[Gallery, PlainGallery], tmp_path: Path) -> None:
    gallery, plain = stocked
    largest = max(path.stat().st_size for path in (tmp_path / "gallery").glob("catalogue*"))
    more = iter(shop(400, seed=3)[160:])
    with files_up_to(largest + 400_000):
        with pytest.raises(LookalikeError, match="Free space") as refused:
            for entry in more:
                gallery.upsert([entry], BUNDLE)
                plain.upsert([entry])
        assert "nothing of this write was kept" in refused.value.problem
        assert len(plain.items) > 160, "some writes fitted"
        check_searches(gallery, plain, 1, dimension=8)
        with pytest.raises(LookalikeError, match="Free space"):
            gallery.upsert(shop(400, seed=4), BUNDLE)
        check_searches(gallery, plain, 2, dimension=8)
    for handle in (gallery, open_gallery(tmp_path / "gallery")):
        assert contents(handle) == plain_contents(plain)
        entry = next(more)
        handle.upsert([entry], BUNDLE)
        plain.upsert([entry])
        check_searches(handle, plain, 3, dimension=8)
        handle.close()


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_full_disk_refuses_a_compaction_and_loses_nothing(
    stocked: tuple[Gallery, PlainGallery], tmp_path: Path, share: float
) -> None:
    gallery, plain = stocked
    (before,) = generations(tmp_path / "gallery")
    size = (tmp_path / "gallery" / "generations" / before / "index.faiss").stat().st_size
    new = Item(id="new"), [photo("one", unit(*range(1, 9)))]
    gallery.upsert([new], BUNDLE)
    plain.upsert([new])
    with files_up_to(int(size * share)), pytest.raises(LookalikeError, match="Free space"):
        gallery.compact(rebuild=True)
    assert generations(tmp_path / "gallery") == [before]
    check_searches(gallery, plain, 1, dimension=8)
    name = compact(gallery)
    assert generations(tmp_path / "gallery") == [name]
    check_searches(gallery, plain, 1, dimension=8)


def flip(file: str, place: float) -> Callable[[Path], None]:
    """Turns over the bits of one byte."""

    def damage(generation: Path) -> None:
        content = bytearray((generation / file).read_bytes())
        content[int(place * (len(content) - 1))] ^= 0xFF
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
    **{f"{file} flipped at {place}": flip(file, place) for file in FILES for place in (0, 0.4, 1)},
    **{f"{file} cut to {left}": truncate(file, left) for file in FILES for left in (0, 0.7)},
    **{f"no {file}": remove(file) for file in FILES},
    "no folder": shutil.rmtree,
    "another revision": replace("manifest.json", '"revision": 1', '"revision": 2'),
    "another effort": replace("manifest.json", '"effort": 0', '"effort": 9'),
    "an empty manifest": lambda generation: (generation / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_generation_is_answered_from_the_catalogue_and_made_again(
    stocked: tuple[Gallery, PlainGallery], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    gallery, plain = stocked
    gallery.delete(["item-00000"])
    plain.delete(["item-00000"])
    gallery.close()
    (name,) = generations(tmp_path / "gallery")
    damage(tmp_path / "gallery" / "generations" / name)
    reader = open_gallery(tmp_path / "gallery")
    assert index_name(reader) is None
    check_searches(reader, plain, 1, dimension=8)
    reader.upsert([(Item(id="new"), [photo("one", unit(*range(1, 9)))])], BUNDLE)
    plain.upsert([(Item(id="new"), [photo("one", unit(*range(1, 9)))])])
    check_searches(reader, plain, 2, dimension=8)
    made = compact(reader)
    assert made != name
    assert generations(tmp_path / "gallery") == [made]
    check_searches(reader, plain, 3, dimension=8)
    again = open_gallery(tmp_path / "gallery")
    assert index_name(again) == made
    check_searches(again, plain, 3, dimension=8)
    again.close()
    reader.close()


# Opening


def test_a_folder_with_other_things_is_no_gallery(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LookalikeError, match="is not a gallery"):
        open_gallery(tmp_path, create=True)
    with pytest.raises(LookalikeError, match="lookalike reindex"):
        open_gallery(tmp_path / "nothing")


def test_a_catalogue_of_another_release_is_told_and_kept(tmp_path: Path) -> None:
    open_gallery(tmp_path, create=True).close()
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
    for _ in range(2):
        with pytest.raises(LookalikeError, match=r"schema version 99; this release reads .* Use the release that"):
            open_gallery(tmp_path)


def test_a_catalogue_that_is_busy_or_not_ours_is_not_told_to_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_gallery(tmp_path, create=True).close()
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        open_gallery(tmp_path).close()  # nobody waits for a writer to read

    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr(sqlite, "prepare", refuse)
    with pytest.raises(LookalikeError, match=r"readonly database\. Check the permissions"):
        open_gallery(tmp_path)


def test_a_file_that_is_no_database_is_told_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.sqlite"
    file.write_text("this is no database, but it is long enough to look at")
    with pytest.raises(LookalikeError, match="cannot be opened"):
        open_gallery(tmp_path)
    assert file.read_text().startswith("this is no database")
