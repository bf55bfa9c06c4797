"""The delta: images that were stored after an index was built, searched exactly, in small immutable blocks.

A search keeps the blocks that it started with while newer ones are made, so nothing here changes in place.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from index.gallery.store.base import ImageRow
from index.gallery.vectors.faiss.searcher import EXACT, AllowList, Searcher, exact_index


class Block:
    """Images with their vectors; those that were removed since are masked until the block is merged."""

    def __init__(
        self,
        keys: NDArray[np.int64],
        items: NDArray[np.int64],
        images: list[tuple[str, str]],
        vectors: NDArray[np.float16],
        alive: NDArray[np.bool_] | None = None,
        searcher: Searcher | None = None,
    ) -> None:
        self.keys = keys
        self.items = items
        """The key of each image's item."""
        self.images = images
        """The id and the digest of each image: tuples, which the garbage collector need not visit."""
        self.vectors = vectors
        self.alive = np.ones(len(keys), np.bool_) if alive is None else alive
        self.searcher = searcher or Searcher(exact_index(vectors), EXACT)
        self.selection = None if alive is None else AllowList(alive)

    @classmethod
    def from_rows(cls, rows: Sequence[ImageRow], dimension: int) -> "Block":
        vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f2").reshape(len(rows), dimension)
        return cls(
            np.array([row.key for row in rows], np.int64),
            np.array([row.item for row in rows], np.int64),
            [(row.id, row.digest) for row in rows],
            vectors,
        )

    def __len__(self) -> int:
        return len(self.keys)

    def without(self, gone: NDArray[np.int64]) -> "Block":
        """Returns the block with some image keys masked."""
        alive = self.alive & ~np.isin(self.keys, gone)
        if alive.sum() == self.alive.sum():
            return self
        return Block(self.keys, self.items, self.images, self.vectors, alive, self.searcher)

    def merge(self, other: "Block") -> "Block":
        """Returns one block of the images of both that are not masked."""
        mine, theirs = np.flatnonzero(self.alive), np.flatnonzero(other.alive)
        return Block(
            np.concatenate((self.keys[mine], other.keys[theirs])),
            np.concatenate((self.items[mine], other.items[theirs])),
            [self.images[row] for row in mine] + [other.images[row] for row in theirs],
            np.concatenate((self.vectors[mine], other.vectors[theirs])),
        )


def apply_changes(
    blocks: tuple[Block, ...], gone: Sequence[int], rows: Sequence[ImageRow], dimension: int, merge_up_to: int
) -> tuple[Block, ...]:
    """Returns the blocks after some images were removed (or got another vector) and others were stored."""
    if gone and blocks:
        keys = np.array(gone, np.int64)
        blocks = tuple(kept for block in blocks if (kept := block.without(keys)).alive.any())
    if not rows:
        return blocks
    new = Block.from_rows(rows, dimension)
    # Sizes at least double from the newest to the oldest, so there are few, and an image is copied few times.
    while blocks and len(blocks[-1]) <= max(merge_up_to, len(new)):
        new = blocks[-1].merge(new)
        blocks = blocks[:-1]
    return (*blocks, new)
