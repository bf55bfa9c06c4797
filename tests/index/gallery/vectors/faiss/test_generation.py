"""Generations: what was written is what is opened, and every damage is noticed."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from index.gallery.errors import IndexDamaged
from index.gallery.store.base import BundleRow
from index.gallery.store.sqlite import SQLiteStore
from index.gallery.vectors.faiss.generation import (
    DEAD,
    Generation,
    open_generation,
    pack,
    read_manifest,
    read_records,
    write_generation,
)
from index.gallery.vectors.faiss.searcher import EXACT, exact_index
from tests.index.gallery.reference import BUNDLE, MUG, SHOE, TRIO, unit


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with closing(SQLiteStore(tmp_path / "store")) as store:
        store.upsert(TRIO, BUNDLE)
        yield store


def get_bundle(store: SQLiteStore) -> BundleRow:
    bundle = store.read.bundle(BUNDLE)
    assert bundle
    return bundle


@pytest.fixture
def directory(store: SQLiteStore, tmp_path: Path) -> Path:
    """A generation of the store whose second position is dead."""
    bundle = get_bundle(store)
    with store.open_reader() as reader:
        records = read_records(reader, bundle.key)
        vectors = np.empty((4, 3), np.float16)
        reader.vectors(bundle.key, 0, vectors)
    keys = records.keys.copy()
    keys[1] = DEAD
    write_generation(
        tmp_path / "generation",
        bundle_id=BUNDLE,
        dimension=3,
        revision=records.revision,
        index=exact_index(vectors),
        plan=EXACT,
        arrays=pack(records, keys),
    )
    return tmp_path / "generation"


def test_records_have_every_image_and_item_once(store: SQLiteStore) -> None:
    with store.open_reader() as reader:
        records = read_records(reader, get_bundle(store).key)
    assert records.revision == 1 and records.revisions.tolist() == [1] * 4
    assert records.image_ids == ["front", "left", "right", "open"]
    assert records.owners.tolist() == [0, 1, 1, 2]
    assert records.digests[2].tobytes().hex() == f"{3:064x}"


def test_an_opened_generation_returns_what_was_written(directory: Path) -> None:
    generation, manifest = open_generation(directory)
    assert (manifest.images, manifest.items, manifest.dead, manifest.revision) == (3, 3, 1, 1)
    assert (generation.name, generation.revision, generation.images) == ("generation", 1, 3)
    assert generation.max_images_per_item == 1, "the dead position does not count"
    assert generation.alive.tolist() == [True, False, True, True]
    assert (generation.item(0), generation.item(1)) == (MUG, SHOE)
    image = generation.image(2)
    assert (image.id, image.digest) == ("right", f"{3:064x}")
    _, positions = generation.searcher.search(unit(0, 1, 0.2)[None], 1)
    assert positions.tolist() == [[2]]


def test_positions_and_rows_are_found_by_key(directory: Path) -> None:
    generation, _ = open_generation(directory)
    keys = generation.keys.tolist()
    assert generation.positions([keys[3], keys[0], 999, keys[3]]).tolist() == [0, 3]
    assert generation.positions([2**40]).tolist() == []
    second = int(generation.item_keys[1])
    assert generation.item_rows([999, second]) == {second: 1}
    assert generation.item_rows([]) == {}


def test_an_existing_generation_is_not_left_half_written(directory: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in directory.iterdir()) == ["index.faiss", "manifest.json", "records.arrays"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generation", "store"], "no temporary files are left"


@pytest.mark.parametrize("name", ["index.faiss", "records.arrays", "manifest.json"])
def test_a_missing_or_changed_file_is_reported_as_damage(directory: Path, name: str) -> None:
    content = (directory / name).read_bytes()
    (directory / name).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(IndexDamaged, match=r"lookalike gallery compact"):
        open_generation(directory)
    (directory / name).unlink()
    with pytest.raises(IndexDamaged, match=str(directory)):
        open_generation(directory)


def test_a_manifest_with_a_changed_figure_is_refused(directory: Path) -> None:
    manifest = directory / "manifest.json"
    assert read_manifest(directory).images == 3
    manifest.write_text(manifest.read_text().replace('"images": 3', '"images": 4'))
    with pytest.raises(IndexDamaged, match="differs from what was written"):
        read_manifest(directory)


def test_a_generation_in_memory_has_all_vectors_of_the_store_and_no_name(store: SQLiteStore) -> None:
    with store.open_reader() as reader:
        generation = Generation.in_memory(reader, get_bundle(store))
    assert (generation.name, generation.images, generation.max_images_per_item) == (None, 4, 2)
    scores, positions = generation.searcher.search(unit(1, 0, 0)[None], 1)
    assert (scores.tolist(), generation.image(int(positions[0, 0])).id) == ([[1.0]], "front")
