"""The delta: images that came after a generation was built, searched exactly, in small immutable blocks.

A search holds the blocks that it began with while newer ones are made, so nothing here changes in place.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from index.gallery.store.sqlite_reader import ImageRow
from index.gallery.types import StoredImage
from index.gallery.vectors.faiss.searcher import EXACT, AllowList, Searcher, exact_index

_SMALL = 4096
"""Blocks up to this size are made anew with what is added; copying more would slow down the searches."""


class Block:
    """Images with their vectors; those that have gone since are dead until the block is made anew."""

    def __init__(
        self,
        keys: NDArray[np.int64],
        items: NDArray[np.int64],
        images: list[StoredImage],
        vectors: NDArray[np.float16],
        alive: NDArray[np.bool_] | None = None,
        searcher: Searcher | None = None,
    ) -> None:
        self.keys = keys
        self.items = items
        """Of each image the key of its item."""
        self.images = images
        self.vectors = vectors
        self.alive = np.ones(len(keys), np.bool_) if alive is None else alive
        self.searcher = searcher or Searcher(exact_index(vectors), EXACT)
        self.selection = None if alive is None else AllowList(alive)

    @classmethod
    def of(cls, rows: Sequence[ImageRow], dimension: int) -> "Block":
        vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f2").reshape(len(rows), dimension)
        return cls(
            np.array([row.key for row in rows], np.int64),
            np.array([row.item for row in rows], np.int64),
            [StoredImage.model_construct(id=row.id, digest=row.digest) for row in rows],
            vectors,
        )

    def __len__(self) -> int:
        return len(self.keys)

    def without(self, gone: NDArray[np.int64]) -> "Block":
        """The same block with some image keys dead."""
        alive = self.alive & ~np.isin(self.keys, gone)
        if alive.sum() == self.alive.sum():
            return self
        return Block(self.keys, self.items, self.images, self.vectors, alive, self.searcher)

    def joined(self, other: "Block") -> "Block":
        """One block of the living of both."""
        mine, theirs = np.flatnonzero(self.alive), np.flatnonzero(other.alive)
        return Block(
            np.concatenate((self.keys[mine], other.keys[theirs])),
            np.concatenate((self.items[mine], other.items[theirs])),
            [self.images[place] for place in mine] + [other.images[place] for place in theirs],
            np.concatenate((self.vectors[mine], other.vectors[theirs])),
        )


def after(
    blocks: tuple[Block, ...], gone: Sequence[int], rows: Sequence[ImageRow], dimension: int
) -> tuple[Block, ...]:
    """The blocks after some images went (or got another vector) and others came."""
    if gone and blocks:
        keys = np.array(gone, np.int64)
        blocks = tuple(kept for block in blocks if (kept := block.without(keys)).alive.any())
    if not rows:
        return blocks
    new = Block.of(rows, dimension)
    # Sizes at least double from the newest to the oldest, so there are few, and an image is copied few times.
    while blocks and len(blocks[-1]) <= max(_SMALL, len(new)):
        new = blocks[-1].joined(new)
        blocks = blocks[:-1]
    return (*blocks, new)
