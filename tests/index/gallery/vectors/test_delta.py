"""Delta blocks: masking and merging return new blocks, and their number stays small."""

import numpy as np
import pytest

from index.gallery.store.base import ImageRow
from index.gallery.vectors.delta import Block, apply_changes

DIMENSION = 4


def make_rows(*keys: int) -> list[ImageRow]:
    """Returns an image per key, each of its own item; its vector points in the direction of the key modulo 4."""
    identity = np.eye(DIMENSION, dtype="<f2")
    return [
        ImageRow(key, 100 + key, f"image-{key}", f"{key:064x}", identity[key % DIMENSION].tobytes()) for key in keys
    ]


def make_block(*keys: int) -> Block:
    return Block.from_rows(make_rows(*keys), DIMENSION)


def alive_keys(block: Block) -> list[int]:
    keys: list[int] = block.keys[block.alive].tolist()
    return keys


def test_a_block_holds_the_rows_with_their_vectors() -> None:
    block = make_block(3, 5)
    assert (len(block), block.keys.tolist(), block.items.tolist()) == (2, [3, 5], [103, 105])
    assert block.images == [("image-3", f"{3:064x}"), ("image-5", f"{5:064x}")]
    assert block.vectors.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert block.selection is None


def test_masking_returns_a_new_block_and_leaves_the_old_one() -> None:
    block = make_block(1, 2, 3)
    masked = block.without(np.array([2, 99]))
    assert (alive_keys(block), alive_keys(masked)) == ([1, 2, 3], [1, 3])
    assert masked.selection and masked.selection.count == 2
    assert masked.searcher is block.searcher, "the vectors are not copied"
    _, positions = masked.searcher.search(np.eye(DIMENSION, dtype=np.float32)[2:3], 3, masked.selection)
    assert set(positions[0].tolist()) == {0, 2, -1}


def test_masking_unknown_keys_returns_the_same_block() -> None:
    block = make_block(1, 2)
    assert block.without(np.array([7])) is block
    masked = block.without(np.array([1]))
    assert masked.without(np.array([1])) is masked


def test_merging_drops_masked_images() -> None:
    merged = make_block(1, 2).without(np.array([1])).merge(make_block(3, 4).without(np.array([4])))
    assert (merged.keys.tolist(), merged.items.tolist()) == ([2, 3], [102, 103])
    assert [name for name, _ in merged.images] == ["image-2", "image-3"]
    assert merged.vectors.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert merged.alive.all() and merged.selection is None


def test_a_block_is_dropped_when_all_its_images_are_removed() -> None:
    blocks = (make_block(1, 2), make_block(3))
    assert [alive_keys(block) for block in apply_changes(blocks, [1, 2], [], DIMENSION, 1)] == [[3]]


def test_a_replaced_image_is_masked_in_its_old_block_and_stored_in_a_new_one() -> None:
    blocks = apply_changes((make_block(1, 2, 3),), [2], make_rows(2), DIMENSION, 1)
    assert [alive_keys(block) for block in blocks] == [[1, 3], [2]]


@pytest.mark.parametrize("merge_up_to", [1, 16])
def test_the_number_of_blocks_grows_logarithmically(merge_up_to: int) -> None:
    blocks: tuple[Block, ...] = ()
    for key in range(500):
        blocks = apply_changes(blocks, [key], make_rows(key), DIMENSION, merge_up_to)
        assert len(blocks) <= 10
    assert sorted(key for block in blocks for key in alive_keys(block)) == list(range(500))
