"""Exact ranks of right answers: all that retrieval metrics need to know, without sorting a gallery for each query.

The rank of an answer is one more than the number of better ones. When each photo of a set searches among all the
others, those are counted in square blocks of scores, each computed once and used for its rows and for its columns:
half of a matrix product, and a few comparisons while the block is in the cache. Otherwise rows of scores are sorted
down to their lowest right answer.
"""

import hashlib
import os
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from index.errors import LookalikeError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_HELD = 2**26
"""Scores held at a time at most: 256 MiB."""
_PART = 255
"""Rows that are counted at a time: the largest count of a byte."""
_SIDE = 4 * _PART
_FEW = 32
"""Right answers up to which counting is quicker than sorting."""


@dataclass(frozen=True)
class RetrievalProtocol:
    """Who searches for what, by position: the right answers of a query are the gallery's others of its class."""

    classes: Ints
    """Numbers that count from 0 in order of appearance."""
    gallery: Ints
    queries: Ints
    """Those with a right answer to find."""
    relevant: Ints
    """Right answers of each query."""
    unanswerable: int
    """Queries left out, because the gallery has no other photo of their class."""

    @classmethod
    def from_labels(
        cls, labels: Iterable[Hashable], is_query: ArrayLike | None = None, is_gallery: ArrayLike | None = None
    ) -> "RetrievalProtocol":
        """By default each searches among all the others. Labels may be anything that can be told apart."""
        numbers: dict[Hashable, int] = {}
        classes = np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)
        asks, is_there = (
            np.ones(len(classes), bool) if role is None else np.asarray(role, bool) for role in (is_query, is_gallery)
        )
        if not len(classes) == len(asks) == len(is_there):
            raise ValueError(f"{len(classes)} labels, but roles of {len(asks)} and {len(is_there)} photos")
        gallery = np.flatnonzero(is_there)
        others = np.bincount(classes[gallery], minlength=len(numbers))[classes] - is_there
        queries = np.flatnonzero(asks & (others > 0))
        if not len(queries):
            raise LookalikeError("No query has a right answer to find.", "Give at least two photos of a class.")
        return cls(classes, gallery, queries, others[queries], int(asks.sum()) - len(queries))

    @property
    def is_self_retrieval(self) -> bool:
        """Whether everything that is searched for also searches."""
        return len(self.gallery) == len(self.queries) + self.unanswerable == len(self.classes)


def relevant_ranks(unit: Floats, protocol: RetrievalProtocol) -> Ints:
    """The ranks of each query's right answers by inner product, rising, one query after the other.

    A query never finds itself: it is left out by its position. Equal scores rank by position, and equal vectors have
    equal scores: BLAS rounds by the place in the matrix, so copies are given the score of one of them.
    """
    searched = unit if len(protocol.gallery) == len(unit) else unit[protocol.gallery]
    copies, originals = _duplicates(searched)
    workers = os.cpu_count() or 1
    # Each thread multiplies and counts by itself: BLAS with threads of its own would spin beside them.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        few_copies = len(np.unique(originals)) * len(unit) <= _HELD
        if protocol.is_self_retrieval and protocol.relevant.max() <= _FEW and few_copies:
            return _Counting(unit, protocol, copies, originals).ranks(pool)
        height = max(1, min(_SIDE, _HELD // (workers * len(searched))))
        blocks = [protocol.queries[start : start + height] for start in range(0, len(protocol.queries), height)]
        return np.concatenate(list(pool.map(_Sorting(unit, searched, protocol, copies, originals).ranks, blocks)))


def _duplicates(vectors: Floats) -> tuple[Ints, Ints]:
    """Positions of vectors that were there before, and where."""
    first: dict[bytes, int] = {}
    digests = (hashlib.blake2b(vector + np.float32(0), digest_size=16).digest() for vector in vectors)  # -0 becomes 0
    origins = np.array([first.setdefault(digest, place) for place, digest in enumerate(digests)], np.int64)
    copies = np.flatnonzero(origins != np.arange(len(origins)))
    return copies, origins[copies]


class _Sorting:
    """Ranks by sorting the scores of each query."""

    def __init__(
        self, unit: Floats, searched: Floats, protocol: RetrievalProtocol, copies: Ints, originals: Ints
    ) -> None:
        self._unit, self._searched = unit, searched
        self._copies, self._originals = copies, originals
        self._classes = protocol.classes
        self._place = np.full(len(protocol.classes), -1)
        self._place[protocol.gallery] = np.arange(len(protocol.gallery))
        self._found = protocol.classes[protocol.gallery]
        ends = np.cumsum(np.bincount(self._found, minlength=protocol.classes.max() + 1))
        self._members = np.split(np.argsort(self._found, kind="stable"), ends[:-1])

    def ranks(self, queries: Ints) -> Ints:
        """Of some queries."""
        scores = self._unit[queries] @ self._searched.T
        scores[:, self._copies] = scores[:, self._originals]
        return np.concatenate([self._row_ranks(row, query) for row, query in zip(scores, queries, strict=True)])

    def _row_ranks(self, scores: Floats, query: np.int64) -> Ints:
        own, wanted = self._place[query], self._classes[query]
        members = self._members[wanted]
        if own >= 0:
            scores[own] = -np.inf
            members = members[members != own]
        hits = np.flatnonzero(scores >= scores[members].min())  # those below all right answers need no rank
        bits = (scores[hits] + np.float32(0)).view(np.uint32)  # -0 becomes 0
        falling = np.where(bits >> 31, bits, bits ^ np.uint32(2**31 - 1)).astype(np.uint64)
        # Score and position as one number: it sorts by falling score, then by position.
        keys = falling << np.uint64(32) | hits.astype(np.uint64)
        keys.sort()
        return np.flatnonzero(self._found[(keys & np.uint64(2**32 - 1)).astype(np.int64)] == wanted) + 1


class _Counting:
    """Ranks by counting, for a set against itself: in an order where the right answers lie on the diagonal."""

    def __init__(self, unit: Floats, protocol: RetrievalProtocol, copies: Ints, originals: Ints) -> None:
        sizes = np.bincount(protocol.classes)
        blocks = _filled_blocks(sizes)
        # In a block the largest classes come first: the n-th right answers are those of its first rows.
        self._position = np.lexsort((protocol.classes, -sizes[protocol.classes], blocks[protocol.classes]))
        self._classes = protocol.classes[self._position]
        self._unit = unit[self._position]
        self._relevant = sizes[self._classes] - 1
        ends = np.cumsum(np.bincount(blocks[protocol.classes]))
        self._blocks = [slice(int(begin), int(end)) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        # Every vector's scores with those that have copies, so that all copies are given the same.
        groups, group = np.unique(originals, return_inverse=True)
        of_vector = np.full(len(unit), -1)
        of_vector[groups], of_vector[copies] = np.arange(len(groups)), group
        self._group = of_vector[self._position]
        self._copied = self._unit @ unit[groups].T
        shape = (int(self._relevant.max()), len(unit))
        self._score = np.full(shape, np.inf, np.float32)
        self._place = np.zeros(shape, np.int64)
        self._better = np.zeros(shape, np.int64)

    def ranks(self, pool: ThreadPoolExecutor) -> Ints:
        """Of all queries, by position."""
        # The blocks on the diagonal come first: they tell the scores that all the others are held against.
        for block, better in zip(self._blocks, pool.map(self._count_on_diagonal, self._blocks), strict=True):
            self._better[:, block] += better
        pairs = list(combinations(self._blocks, 2))
        for (block, other), counts in zip(pairs, pool.map(self._count_pair, pairs), strict=True):
            self._better[:, block] += counts[0]
            self._better[:, other] += counts[1]
        return self._by_position()

    def _count_on_diagonal(self, block: slice) -> Ints:
        scores = self._unit[block] @ self._unit[block].T
        self._equalise(scores, block, block)
        np.fill_diagonal(scores, -np.inf)  # nobody finds itself
        self._find_right_scores(scores, block)
        return np.concatenate([self._count(piece, part, block) for part, piece in _parts(scores, block)], axis=1)

    def _count_pair(self, pair: tuple[slice, slice]) -> tuple[Ints, Ints]:
        """Of two blocks, each searching in the other."""
        block, other = pair
        scores = self._unit[block] @ self._unit[other].T
        of_rows, of_columns = [], np.zeros((len(self._better), scores.shape[1]), np.int64)
        for part, piece in _parts(scores, block):
            self._equalise(piece, part, other)
            of_rows.append(self._count(piece, part, other))
            self._equalise(piece.T, other, part)
            of_columns += self._count(piece.T, other, part)
        return np.concatenate(of_rows, axis=1), of_columns

    def _find_right_scores(self, scores: Floats, block: slice) -> None:
        """Score and position of every right answer of the block's queries, from its block on the diagonal."""
        classes, relevant = self._classes[block], self._relevant[block]
        _, first, run = np.unique(classes, return_index=True, return_inverse=True)
        for number in range(relevant.max()):
            row = np.flatnonzero(relevant > number)
            column = first[run[row]] + number
            column += column >= row  # not itself
            self._score[number, block.start + row] = scores[row, column]
            self._place[number, block.start + row] = self._position[block.start + column]

    def _equalise(self, scores: Floats, queries: slice, items: slice) -> None:
        """Gives equal scores to equal items."""
        group = self._group[items]
        copied = np.flatnonzero(group >= 0)
        if len(copied):
            scores[:, copied] = self._copied[queries, group[copied]]

    def _count(self, scores: Floats, queries: slice, items: slice) -> Ints:
        """How many of the items are better than each right answer of each query."""
        relevant, positions = self._relevant[queries], self._position[items]
        better = np.zeros((len(self._better), len(relevant)), np.int64)
        count = _Above(scores)
        for number in range(relevant.max()):
            some = slice(queries.start, queries.start + np.count_nonzero(relevant > number))
            score, place = self._score[number, some], self._place[number, some]
            below = np.nextafter(score, np.float32(-np.inf))
            # Of equal scores, those before the right answer are better.
            counts = count(np.where(place > positions.max(), below, score))
            mixed = (place > positions.min()) & (place <= positions.max())
            if mixed.any():
                tied = np.flatnonzero(mixed & (count(below) > counts))
                equal = scores[tied] == score[tied, None]
                counts[tied] += (equal & (positions < place[tied, None])).sum(axis=1)
            better[number, : len(counts)] = counts
        return better

    def _by_position(self) -> Ints:
        order = np.argsort(self._position)
        wanted = np.arange(len(self._better)) < self._relevant[order][:, None]
        better = np.where(wanted, self._better.T[order], len(order))
        better.sort(axis=1)
        ranks: Ints = better[wanted] + 1
        return ranks


class _Above:
    """Counts of scores above a bound for each of the first rows; of at most 255 rows, or of the columns of such."""

    def __init__(self, scores: Floats) -> None:
        self._scores = scores
        self._by_rows = scores.strides[1] == scores.itemsize
        height, width = scores.shape if self._by_rows else scores.shape[::-1]
        self._mask = np.zeros((height, -(-width // 8) * 8), bool)

    def __call__(self, bounds: Floats) -> Ints:
        rows, width = len(bounds), self._scores.shape[1]
        counts: Ints
        if self._by_rows:
            np.greater(self._scores[:rows], bounds[:, None], out=self._mask[:rows, :width])
            # Eight counts to a word: no byte of the sum overflows.
            lanes = self._mask[:rows].view(np.uint64).sum(axis=1)
            counts = lanes.view(np.uint8).reshape(rows, 8).sum(axis=1, dtype=np.int64)
        else:
            mask = self._mask[:, :rows]
            np.greater(self._scores.T[:, :rows], bounds, out=mask)
            counts = mask.view(np.uint8).sum(axis=0, dtype=np.uint8).astype(np.int64)
        return counts


def _filled_blocks(sizes: Ints) -> Ints:
    """For each class the block that it lies in; no block has more than `_SIDE` photos."""
    blocks, block, filled = [], 0, 0
    for size in sizes.tolist():
        if filled + size > _SIDE:
            block, filled = block + 1, 0
        filled += size
        blocks.append(block)
    return np.array(blocks)


def _parts(scores: Floats, block: slice) -> Iterator[tuple[slice, Floats]]:
    """A block's rows, and their scores, in parts that are counted at a time."""
    for begin in range(0, len(scores), _PART):
        piece = scores[begin : begin + _PART]
        yield slice(block.start + begin, block.start + begin + len(piece)), piece
