"""Snapshots: one file holds the gallery of one instant, and only a complete file is restored."""

import io
import json
import shutil
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from index.errors import LookalikeError
from index.gallery import open_gallery
from index.gallery import restore_gallery as restore
from index.gallery import verify_gallery as verify
from index.gallery.backup import Snapshot
from index.gallery.errors import SnapshotError
from tests.support.disk import files_up_to
from tests.support.filled_gallery import BUNDLE, entry, fill, vector
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    return fill(tmp_path / "gallery", later=4)


def snapshot(directory: Path, file: Path, *, force: bool = False) -> Snapshot:
    with open_gallery(directory) as gallery:
        return gallery.snapshot(file, force=force)


def search_results(directory: Path) -> list[tuple[float, str, str]]:
    """Returns the results of a few searches."""
    opened = open_gallery(directory)
    try:
        queries = [vector(number)[None] for number in (1, 20, 45, 777)]
        found = [opened.search(query, bundle_id=BUNDLE, top=6).hits[0] for query in queries]
        return [(hit.score, hit.item.model_dump_json(), hit.image.id) for hits in found for hit in hits]
    finally:
        opened.close()


def test_a_restored_gallery_returns_the_same_results(gallery: Path, tmp_path: Path) -> None:
    written = snapshot(gallery, tmp_path / "backup.tar")
    assert (written.items, written.images, written.bundle_ids) == (24, 47, [BUNDLE])
    assert restore(tmp_path / "backup.tar", tmp_path / "elsewhere") == written
    assert search_results(tmp_path / "elsewhere") == search_results(gallery)
    assert read_stats(tmp_path / "elsewhere") == read_stats(gallery)
    assert verify(tmp_path / "elsewhere") == []
    assert {path.name for path in tmp_path.iterdir()} == {"gallery", "backup.tar", "elsewhere"}, (
        "no temporary files are left"
    )


def read_stats(directory: Path) -> object:
    opened = open_gallery(directory)
    try:
        return opened.stats()
    finally:
        opened.close()


def test_a_snapshot_during_writes_is_of_one_instant(tmp_path: Path) -> None:
    directory = fill(tmp_path / "gallery", items=1)
    stop = threading.Event()

    def write() -> None:
        opened = open_gallery(directory)
        for number in range(1, 100_000):
            if stop.is_set():
                break
            opened.upsert([entry(number)], BUNDLE)
            if number % 20 == 0:
                opened.compact()
        opened.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        cards = [snapshot(directory, tmp_path / f"{number}.tar") for number in range(8)]
    finally:
        stop.set()
        writer.join()
    assert cards[-1].items > cards[0].items, "there were writes between the snapshots"
    for number, card in enumerate(cards):
        restored = tmp_path / f"restored-{number}"
        restore(tmp_path / f"{number}.tar", restored)
        assert verify(restored) == []
        opened = open_gallery(restored)
        found = opened.scan(count=100_000).items
        assert found == [entry(number)[0] for number in range(card.items)], "a prefix of the writes"
        assert opened.stats().images == card.images == 2 * card.items
        opened.close()


def test_a_snapshot_without_a_generation_is_restored_and_searched_exactly(gallery: Path, tmp_path: Path) -> None:
    before = search_results(gallery)
    shutil.rmtree(gallery / "generations")
    assert snapshot(gallery, tmp_path / "backup.tar").index_name is None
    restore(tmp_path / "backup.tar", tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere") == []
    assert search_results(tmp_path / "elsewhere") == before
    opened = open_gallery(tmp_path / "elsewhere")
    assert opened.compact()
    opened.close()
    assert search_results(tmp_path / "elsewhere") == before and verify(tmp_path / "elsewhere") == []


def test_a_snapshot_has_the_vectors_of_all_bundles_and_the_active_generation(gallery: Path, tmp_path: Path) -> None:
    opened = open_gallery(gallery)
    opened.upsert([entry(number) for number in range(24)], "c" * 16)
    active = opened.prepare("c" * 16).name
    opened.activate("c" * 16)
    opened.close()
    assert snapshot(gallery, tmp_path / "backup.tar").index_name == active
    restore(tmp_path / "backup.tar", tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere") == []
    opened = open_gallery(tmp_path / "elsewhere")
    opened.activate(BUNDLE)
    opened.close()
    shutil.rmtree(gallery)
    assert len(search_results(tmp_path / "elsewhere")) == 24


def test_a_snapshot_has_the_copies_of_bundles(tmp_path: Path) -> None:
    bundle = Bundle.load(make_tiny_bundle(tmp_path / "bundle"))
    directory = make_tiny_gallery(tmp_path / "gallery", bundle.directory)
    opened = open_gallery(directory)
    opened.keep_bundle(bundle)
    opened.close()
    snapshot(directory, tmp_path / "backup.tar")
    restore(tmp_path / "backup.tar", tmp_path / "elsewhere")
    opened = open_gallery(tmp_path / "elsewhere")
    assert opened.load_bundle(bundle.id).card == bundle.card
    opened.close()


def test_an_empty_gallery_can_be_restored(tmp_path: Path) -> None:
    open_gallery(tmp_path / "gallery", create=True).close()
    snapshot(tmp_path / "gallery", tmp_path / "backup.tar")
    restore(tmp_path / "backup.tar", tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere") == []


def test_an_existing_file_is_replaced_only_with_force(gallery: Path, tmp_path: Path) -> None:
    file = tmp_path / "backup.tar"
    file.write_text("precious")
    with pytest.raises(SnapshotError, match=r"exists.*--force"):
        snapshot(gallery, file)
    assert file.read_text() == "precious"
    snapshot(gallery, file, force=True)
    assert tarfile.is_tarfile(file)


def test_a_full_disk_leaves_no_files(gallery: Path, tmp_path: Path) -> None:
    file, target = tmp_path / "backup.tar", tmp_path / "target"
    snapshot(gallery, file)
    target.mkdir()
    for size in (40_000, file.stat().st_size - 1000):  # while the store is copied, and while the file is written
        with files_up_to(size), pytest.raises(SnapshotError, match="nothing was left behind"):
            snapshot(gallery, target / "backup.tar")
        assert list(target.iterdir()) == []
    with files_up_to(40_000), pytest.raises(SnapshotError, match="nothing was left behind"):
        restore(file, target / "gallery")
    assert list(target.iterdir()) == []


def test_a_gallery_is_restored_only_into_a_new_or_empty_folder(gallery: Path, tmp_path: Path) -> None:
    snapshot(gallery, tmp_path / "backup.tar")
    with pytest.raises(SnapshotError, match="is not empty"):
        restore(tmp_path / "backup.tar", gallery)
    with pytest.raises(SnapshotError, match="is not empty"):
        restore(tmp_path / "backup.tar", tmp_path / "backup.tar")
    (tmp_path / "empty").mkdir()
    restore(tmp_path / "backup.tar", tmp_path / "empty")
    restore(tmp_path / "backup.tar", tmp_path / "far" / "away")
    assert search_results(tmp_path / "empty") == search_results(tmp_path / "far" / "away") == search_results(gallery)


def assert_refused(file: Path, match: str) -> None:
    """Asserts that a file is not restored, and that no files are left."""
    before = set(file.parent.rglob("*"))
    with pytest.raises(SnapshotError, match=match):
        restore(file, file.with_name("restored"))
    assert set(file.parent.rglob("*")) == before


def test_a_snapshot_truncated_anywhere_is_refused(gallery: Path, tmp_path: Path) -> None:
    snapshot(gallery, tmp_path / "complete.tar")
    data = (tmp_path / "complete.tar").read_bytes()
    end = len(data.rstrip(b"\0"))
    for length in (0, 300, 512, 700, 1024, 2048, 3 << 12, end // 2, end - 4000):
        (tmp_path / "truncated.tar").write_bytes(data[:length])
        assert_refused(tmp_path / "truncated.tar", "not a complete snapshot|is truncated|differs from what was written")


@pytest.mark.parametrize("data", [b"", b"not a tar file" * 100, bytes(2048)])
def test_a_foreign_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "foreign.tar").write_bytes(data)
    assert_refused(tmp_path / "foreign.tar", "is not a complete snapshot of a gallery")


def test_a_snapshot_of_a_later_release_is_refused(gallery: Path, tmp_path: Path) -> None:
    tampered = rewrite_snapshot(gallery, tmp_path, card=lambda card: card | {"format_version": 3})
    assert_refused(tampered, "snapshot.json is invalid")


def rewrite_snapshot(
    gallery: Path,
    tmp_path: Path,
    *,
    card: Callable[[dict[str, object]], dict[str, object]] = lambda card: card,
    name: Callable[[str], str] = lambda name: name,
    change: Callable[[tarfile.TarInfo], None] = lambda member: None,
    content: Callable[[bytes], bytes] = lambda data: data,
) -> Path:
    """Writes a snapshot with another card, or another name, header or content of its store."""
    snapshot(gallery, tmp_path / "complete.tar")
    with tarfile.open(tmp_path / "complete.tar") as source, tarfile.open(tmp_path / "tampered.tar", "w") as target:
        for member in source:
            file = source.extractfile(member)
            assert file
            data = file.read()
            if member.name == "snapshot.json":
                data = json.dumps(card(json.loads(data))).encode()
            elif member.name == "catalogue.sqlite":
                data = content(data)
                member.name = name(member.name)
            member.size = len(data)
            if member.name != "snapshot.json":
                change(member)
            target.addfile(member, io.BytesIO(data))
    (tmp_path / "complete.tar").unlink()
    return tmp_path / "tampered.tar"


def test_a_tampered_member_is_refused(gallery: Path, tmp_path: Path) -> None:
    file = rewrite_snapshot(gallery, tmp_path, content=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert_refused(file, "catalogue.sqlite in .* differs from what was written")


PATHS = ["../escaped", "/tmp/escaped", "generations/../../escaped", "bundles/x/escaped", "notes.txt"]


@pytest.mark.parametrize("path", PATHS)
def test_a_member_with_a_foreign_path_is_refused(gallery: Path, tmp_path: Path, path: str) -> None:
    assert_refused(rewrite_snapshot(gallery, tmp_path, name=lambda name: path), "not part of a snapshot")

    def add_path(card: dict[str, object]) -> dict[str, object]:
        digests = card["digests"]
        assert isinstance(digests, dict)
        return card | {"digests": digests | {path: digests["catalogue.sqlite"]}}

    assert_refused(rewrite_snapshot(gallery, tmp_path, name=lambda name: path, card=add_path), "snapshot.json names")
    assert not (tmp_path.parent / "escaped").exists() and not Path("/tmp/escaped").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_a_member_that_is_not_a_regular_file_is_refused(gallery: Path, tmp_path: Path, kind: bytes) -> None:
    def make_link(member: tarfile.TarInfo) -> None:
        member.type, member.linkname, member.size = kind, "/etc/passwd", 0

    assert_refused(rewrite_snapshot(gallery, tmp_path, change=make_link), "not part of a snapshot")


def test_invalid_paths_are_refused(gallery: Path, tmp_path: Path) -> None:
    with pytest.raises(LookalikeError, match="is not a gallery"):
        snapshot(tmp_path, tmp_path / "backup.tar")
    with pytest.raises(SnapshotError, match="does not exist"):
        snapshot(gallery, tmp_path / "nowhere" / "backup.tar")
    with pytest.raises(SnapshotError, match="is a folder"):
        snapshot(gallery, tmp_path, force=True)
    with pytest.raises(SnapshotError, match="No snapshot at"):
        restore(tmp_path / "nothing.tar", tmp_path / "restored")
