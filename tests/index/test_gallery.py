"""The gallery: what was stored is found, best image of each item first, by every reader."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from index.errors import LookalikeError
from index.gallery import BundleMismatch, Gallery, open_gallery
from index.items import Item, NewImage

BUNDLE = "b" * 16


def unit(*numbers: float) -> NDArray[np.float32]:
    vector = np.array(numbers, np.float32)
    return vector / np.linalg.norm(vector)


def image(name: str, vector: NDArray[np.float32], content: int = 0) -> NewImage:
    return NewImage(name, f"{content:064x}", vector, b"jpeg of " + name.encode())


def ids(gallery: Gallery, *numbers: float, top: int = 10) -> list[str]:
    found = gallery.search(unit(*numbers)[None], bundle_id=BUNDLE, top=top)
    return [hit.item.id for hit in found.hits[0]]


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    opened = open_gallery(tmp_path / "gallery", create=True)
    opened.upsert(
        [
            (Item(id="mug", title="A mug", attributes={"price": 5.5}), [image("front", unit(1, 0, 0), 1)]),
            (Item(id="shoe"), [image("left", unit(0, 1, 0), 2), image("right", unit(0, 1, 0.2), 3)]),
            (Item(id="bag"), [image("open", unit(0.6, 0.6, 0.5), 4)]),
        ],
        BUNDLE,
    )
    opened.activate(BUNDLE)
    yield opened
    opened.close()


def test_the_most_similar_items_come_first_each_once(gallery: Gallery) -> None:
    found = gallery.search(unit(0, 1, 0.1)[None], bundle_id=BUNDLE)
    assert [hit.item.id for hit in found.hits[0]] == ["shoe", "bag", "mug"]
    scores = [hit.score for hit in found.hits[0]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(unit(0, 1, 0.1) @ unit(0, 1, 0.2), abs=1e-3)


def test_an_answer_names_the_best_image_and_the_whole_item(gallery: Gallery) -> None:
    (hit,) = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert hit.item == Item(id="mug", title="A mug", attributes={"price": 5.5})
    assert hit.image.id == "front" and gallery.thumbnail(hit.image.digest) == b"jpeg of front"


def test_many_images_of_one_item_do_not_fill_the_list(tmp_path: Path) -> None:
    gallery = open_gallery(tmp_path / "gallery", create=True)
    crowd = [image(str(number), unit(1, 0, number / 1000), number) for number in range(300)]
    gallery.upsert([(Item(id="crowd"), crowd), (Item(id="alone"), [image("one", unit(0, 1, 0), 999)])], BUNDLE)
    gallery.activate(BUNDLE)
    assert ids(gallery, 1, 0, 0, top=2) == ["crowd", "alone"]
    gallery.close()


def test_several_queries_are_answered_in_their_order(gallery: Gallery) -> None:
    found = gallery.search(np.stack([unit(0, 1, 0), unit(1, 0, 0)]), bundle_id=BUNDLE, top=1)
    assert [hits[0].item.id for hits in found.hits] == ["shoe", "mug"]


def test_a_deleted_item_is_gone_from_the_next_search(gallery: Gallery) -> None:
    gallery.delete(["mug", "never there"])
    assert ids(gallery, 1, 0, 0) == ["bag", "shoe"]
    assert gallery.get("mug") is None
    assert gallery.thumbnail(f"{1:064x}") is None, "the picture goes with the last image that shows it"


def test_a_changed_picture_replaces_the_old_vector(gallery: Gallery) -> None:
    gallery.upsert([(Item(id="mug"), [image("front", unit(0, 0, 1), 9)])], BUNDLE)
    gallery.activate(BUNDLE)
    assert ids(gallery, 0, 0, 1)[0] == "mug"
    assert ids(gallery, 1, 0, 0)[0] == "bag"


def test_upsert_changes_attributes_and_keeps_images(gallery: Gallery) -> None:
    gallery.upsert([(Item(id="mug", attributes={"price": 9}), [])], BUNDLE)
    (hit,) = gallery.search(unit(1, 0, 0)[None], bundle_id=BUNDLE, top=1).hits[0]
    assert hit.item.attributes == {"price": 9}


def test_another_process_sees_a_new_generation_at_its_next_search(gallery: Gallery, tmp_path: Path) -> None:
    reader = open_gallery(tmp_path / "gallery")
    assert ids(reader, 0, 0, 1)[0] == "bag"
    gallery.upsert([(Item(id="lamp"), [image("on", unit(0, 0, 1), 7)])], BUNDLE)
    name = gallery.activate(BUNDLE)
    assert ids(reader, 0, 0, 1)[0] == "lamp"
    assert reader.stats().generation == name
    reader.close()


def test_a_gallery_is_the_same_after_reopening(gallery: Gallery, tmp_path: Path) -> None:
    before = gallery.stats()
    gallery.close()
    again = open_gallery(tmp_path / "gallery")
    assert again.stats() == before
    assert (before.items, before.images, before.dimension, before.bundle_id) == (3, 4, 3, BUNDLE)
    assert ids(again, 1, 0, 0)[0] == "mug"
    again.close()


def test_vectors_of_another_bundle_are_never_compared(gallery: Gallery) -> None:
    with pytest.raises(BundleMismatch, match="was indexed with bundle bbbb"):
        gallery.search(unit(1, 0, 0)[None], bundle_id="c" * 16)


def test_activation_moves_to_the_vectors_of_another_bundle(gallery: Gallery) -> None:
    other = "c" * 16
    gallery.upsert([(Item(id="mug", title="A mug"), [image("front", unit(0, 1), 1)])], other)
    assert gallery.stats().bundle_id == BUNDLE, "nothing changes before the activation"
    gallery.activate(other)
    (hits,) = gallery.search(unit(0, 1)[None], bundle_id=other).hits
    assert [hit.item.id for hit in hits] == ["mug"]


def test_a_damaged_generation_is_told_and_made_again_by_activation(gallery: Gallery, tmp_path: Path) -> None:
    (file,) = (tmp_path / "gallery" / "generations").glob("*/index.faiss")
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    reader = open_gallery(tmp_path / "gallery")
    with pytest.raises(LookalikeError, match="damaged"):
        ids(reader, 1, 0, 0)
    reader.activate(BUNDLE)
    assert ids(reader, 1, 0, 0)[0] == "mug"
    reader.close()


def test_a_new_gallery_is_empty_and_answers_nothing(tmp_path: Path) -> None:
    gallery = open_gallery(tmp_path / "gallery", create=True)
    assert ids(gallery, 1, 0, 0) == []
    with pytest.raises(LookalikeError, match="no vectors of bundle"):
        gallery.activate(BUNDLE)
    gallery.close()


def test_a_folder_with_other_things_is_no_gallery(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LookalikeError, match="is not a gallery"):
        open_gallery(tmp_path, create=True)
    with pytest.raises(LookalikeError, match="lookalike reindex"):
        open_gallery(tmp_path / "nothing")


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").write_text("this is no database, but it is long enough to look at")
    with pytest.raises(LookalikeError, match="cannot be used as a catalogue"):
        open_gallery(tmp_path)
