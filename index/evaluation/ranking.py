"""Exact ranks of relevant results: all that retrieval metrics need, without sorting a gallery for each query.

The rank of a result is one more than the number of better ones. When each photo of a set searches among all the
others, these are counted in square blocks of scores, each computed once and used for its rows and for its columns:
half of a matrix product, and a few comparisons while the block is in the cache. Otherwise the scores of each query are
sorted down to its lowest relevant result.
"""

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits

from index.errors import LookalikeError

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class RankingSettings:
    """How the ranks are computed; the ranks themselves do not depend on it."""

    max_scores: int = 2**26
    """Maximum number of scores in memory at a time: 256 MiB."""
    strip_rows: int = 255
    """Rows counted at a time; 255 is the largest count of a byte."""
    block_rows: int = 4 * 255
    max_counted: int = 32
    """Number of relevant results per query up to which counting is faster than sorting."""


DEFAULT_RANKING = RankingSettings()


@dataclass(frozen=True)
class RetrievalProtocol:
    """Queries and gallery by position; relevant to a query are the other photos of its class in the gallery."""

    classes: Ints
    """Class numbers, from 0 in order of appearance."""
    gallery: Ints
    queries: Ints
    """Queries with at least one relevant result."""
    relevant: Ints
    """Number of relevant results of each query."""
    unanswerable: int
    """Number of queries left out because the gallery has no other photo of their class."""

    @classmethod
    def from_labels(
        cls, labels: Iterable[Hashable], is_query: ArrayLike | None = None, is_gallery: ArrayLike | None = None
    ) -> "RetrievalProtocol":
        """Creates a protocol; by default each photo searches among all the others."""
        numbers: dict[Hashable, int] = {}
        classes = np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)
        in_queries, in_gallery = (
            np.ones(len(classes), bool) if role is None else np.asarray(role, bool) for role in (is_query, is_gallery)
        )
        if not len(classes) == len(in_queries) == len(in_gallery):
            raise ValueError(f"{len(classes)} labels, but roles of {len(in_queries)} and {len(in_gallery)} photos")
        gallery = np.flatnonzero(in_gallery)
        others = np.bincount(classes[gallery], minlength=len(numbers))[classes] - in_gallery
        queries = np.flatnonzero(in_queries & (others > 0))
        if not len(queries):
            raise LookalikeError("No query has a relevant photo to find.", "Add at least two photos of a class.")
        return cls(classes, gallery, queries, others[queries], int(in_queries.sum()) - len(queries))

    @property
    def is_self_retrieval(self) -> bool:
        """Whether every photo of the gallery is also a query."""
        return len(self.gallery) == len(self.queries) + self.unanswerable == len(self.classes)


Ranker = Callable[[Floats, RetrievalProtocol], Ints]
"""Returns what `relevant_ranks` returns."""


def relevant_ranks(unit: Floats, protocol: RetrievalProtocol, settings: RankingSettings = DEFAULT_RANKING) -> Ints:
    """Returns the ranks of each query's relevant results by inner product, ascending, query after query.

    A query never finds itself: it is left out by its position. Equal scores rank by position, and equal vectors have
    equal scores: BLAS rounds by the position in the matrix, so duplicates get the score of the first of them.
    """
    searched = unit if len(protocol.gallery) == len(unit) else unit[protocol.gallery]
    duplicates = Duplicates.find(searched)
    workers = os.cpu_count() or 1
    # Each thread multiplies on its own: threads of BLAS would compete with these.
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        few_duplicates = len(np.unique(duplicates.originals)) * len(unit) <= settings.max_scores
        if protocol.is_self_retrieval and protocol.relevant.max() <= settings.max_counted and few_duplicates:
            return _CountingRanker(unit, protocol, duplicates, settings).ranks(pool)
        height = max(1, min(settings.block_rows, settings.max_scores // (workers * len(searched))))
        blocks = [protocol.queries[start : start + height] for start in range(0, len(protocol.queries), height)]
        return np.concatenate(list(pool.map(_SortingRanker(unit, searched, protocol, duplicates).ranks, blocks)))


class Duplicates(NamedTuple):
    """Positions of vectors that equal an earlier one, and the positions of the first of each."""

    copies: Ints
    originals: Ints

    @classmethod
    def find(cls, vectors: Floats) -> "Duplicates":
        first: dict[bytes, int] = {}
        digests = (hashlib.blake2b(vector + np.float32(0), digest_size=16).digest() for vector in vectors)  # -0 -> 0
        origins = np.array([first.setdefault(digest, position) for position, digest in enumerate(digests)], np.int64)
        copies = np.flatnonzero(origins != np.arange(len(origins)))
        return cls(copies, origins[copies])


class _SortingRanker:
    """Computes ranks by sorting the scores of each query."""

    def __init__(self, unit: Floats, searched: Floats, protocol: RetrievalProtocol, duplicates: Duplicates) -> None:
        self._unit, self._searched = unit, searched
        self._duplicates = duplicates
        self._classes = protocol.classes
        self._gallery_position = np.full(len(protocol.classes), -1)
        self._gallery_position[protocol.gallery] = np.arange(len(protocol.gallery))
        self._gallery_classes = protocol.classes[protocol.gallery]
        ends = np.cumsum(np.bincount(self._gallery_classes, minlength=protocol.classes.max() + 1))
        self._members = np.split(np.argsort(self._gallery_classes, kind="stable"), ends[:-1])

    def ranks(self, queries: Ints) -> Ints:
        """Returns the ranks of the relevant results of a block of queries."""
        scores = self._unit[queries] @ self._searched.T
        scores[:, self._duplicates.copies] = scores[:, self._duplicates.originals]
        return np.concatenate([self._row_ranks(row, query) for row, query in zip(scores, queries, strict=True)])

    def _row_ranks(self, scores: Floats, query: np.int64) -> Ints:
        own, wanted = self._gallery_position[query], self._classes[query]
        members = self._members[wanted]
        if own >= 0:
            scores[own] = -np.inf
            members = members[members != own]
        hits = np.flatnonzero(scores >= scores[members].min())  # those below all relevant results need no rank
        bits = (scores[hits] + np.float32(0)).view(np.uint32)  # -0 becomes 0
        descending = np.where(bits >> 31, bits, bits ^ np.uint32(2**31 - 1)).astype(np.uint64)
        # Score and position as one number: it sorts by descending score, then by position.
        keys = descending << np.uint64(32) | hits.astype(np.uint64)
        keys.sort()
        return np.flatnonzero(self._gallery_classes[(keys & np.uint64(2**32 - 1)).astype(np.int64)] == wanted) + 1


class _CountingRanker:
    """Computes ranks by counting, for a set against itself, ordered so that relevant results are near the diagonal."""

    def __init__(
        self, unit: Floats, protocol: RetrievalProtocol, duplicates: Duplicates, settings: RankingSettings
    ) -> None:
        self._strip_rows = settings.strip_rows
        sizes = np.bincount(protocol.classes)
        blocks = _assign_blocks(sizes, settings.block_rows)
        # In a block the largest classes come first: only its first rows have an n-th relevant result.
        self._position = np.lexsort((protocol.classes, -sizes[protocol.classes], blocks[protocol.classes]))
        self._classes = protocol.classes[self._position]
        self._unit = unit[self._position]
        self._relevant = sizes[self._classes] - 1
        ends = np.cumsum(np.bincount(blocks[protocol.classes]))
        self._blocks = [slice(int(begin), int(end)) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        # The scores of every vector with those that have duplicates, so that all duplicates get the same score.
        groups, group = np.unique(duplicates.originals, return_inverse=True)
        group_of_vector = np.full(len(unit), -1)
        group_of_vector[groups], group_of_vector[duplicates.copies] = np.arange(len(groups)), group
        self._group = group_of_vector[self._position]
        self._group_scores = self._unit @ unit[groups].T
        shape = (int(self._relevant.max()), len(unit))
        self._score = np.full(shape, np.inf, np.float32)
        self._result_position = np.zeros(shape, np.int64)
        self._better = np.zeros(shape, np.int64)

    def ranks(self, pool: ThreadPoolExecutor) -> Ints:
        """Returns the ranks of the relevant results of all queries, by position."""
        # The blocks on the diagonal come first: they hold the scores that all others are compared with.
        for block, better in zip(self._blocks, pool.map(self._count_on_diagonal, self._blocks), strict=True):
            self._better[:, block] += better
        pairs = list(combinations(self._blocks, 2))
        for (block, other), counts in zip(pairs, pool.map(self._count_pair, pairs), strict=True):
            self._better[:, block] += counts[0]
            self._better[:, other] += counts[1]
        return self._by_position()

    def _count_on_diagonal(self, block: slice) -> Ints:
        scores = self._unit[block] @ self._unit[block].T
        self._equalise_duplicates(scores, block, block)
        np.fill_diagonal(scores, -np.inf)  # a query never finds itself
        self._find_relevant_scores(scores, block)
        return np.concatenate([self._count(strip, rows, block) for rows, strip in self._strips(scores, block)], axis=1)

    def _count_pair(self, pair: tuple[slice, slice]) -> tuple[Ints, Ints]:
        """Counts for two blocks, each searching in the other."""
        block, other = pair
        scores = self._unit[block] @ self._unit[other].T
        row_counts, column_counts = [], np.zeros((len(self._better), scores.shape[1]), np.int64)
        for rows, strip in self._strips(scores, block):
            self._equalise_duplicates(strip, rows, other)
            row_counts.append(self._count(strip, rows, other))
            self._equalise_duplicates(strip.T, other, rows)
            column_counts += self._count(strip.T, other, rows)
        return np.concatenate(row_counts, axis=1), column_counts

    def _strips(self, scores: Floats, block: slice) -> Iterator[tuple[slice, Floats]]:
        """Yields the rows of a block, and their scores, in strips that are counted at a time."""
        for begin in range(0, len(scores), self._strip_rows):
            strip = scores[begin : begin + self._strip_rows]
            yield slice(block.start + begin, block.start + begin + len(strip)), strip

    def _find_relevant_scores(self, scores: Floats, block: slice) -> None:
        """Stores score and position of every relevant result of the block's queries, from its block on the diagonal."""
        classes, relevant = self._classes[block], self._relevant[block]
        _, first, run = np.unique(classes, return_index=True, return_inverse=True)
        for number in range(relevant.max()):
            row = np.flatnonzero(relevant > number)
            column = first[run[row]] + number
            column += column >= row  # not itself
            self._score[number, block.start + row] = scores[row, column]
            self._result_position[number, block.start + row] = self._position[block.start + column]

    def _equalise_duplicates(self, scores: Floats, queries: slice, items: slice) -> None:
        """Gives duplicates among the items equal scores."""
        group = self._group[items]
        duplicated = np.flatnonzero(group >= 0)
        if len(duplicated):
            scores[:, duplicated] = self._group_scores[queries, group[duplicated]]

    def _count(self, scores: Floats, queries: slice, items: slice) -> Ints:
        """Returns how many of the items are better than each relevant result of each query."""
        relevant, positions = self._relevant[queries], self._position[items]
        better = np.zeros((len(self._better), len(relevant)), np.int64)
        count = _ScoreCounter(scores)
        for number in range(relevant.max()):
            some = slice(queries.start, queries.start + np.count_nonzero(relevant > number))
            score, position = self._score[number, some], self._result_position[number, some]
            below = np.nextafter(score, np.float32(-np.inf))
            # Among equal scores, those before the relevant result are better.
            counts = count(np.where(position > positions.max(), below, score))
            mixed = (position > positions.min()) & (position <= positions.max())
            if mixed.any():
                tied = np.flatnonzero(mixed & (count(below) > counts))
                equal = scores[tied] == score[tied, None]
                counts[tied] += (equal & (positions < position[tied, None])).sum(axis=1)
            better[number, : len(counts)] = counts
        return better

    def _by_position(self) -> Ints:
        order = np.argsort(self._position)
        wanted = np.arange(len(self._better)) < self._relevant[order][:, None]
        better = np.where(wanted, self._better.T[order], len(order))
        better.sort(axis=1)
        ranks: Ints = better[wanted] + 1
        return ranks


class _ScoreCounter:
    """Counts the scores above a bound for each of the first rows of a strip, or of its transpose."""

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
            # Eight counts per word: no byte of the sum overflows.
            words = self._mask[:rows].view(np.uint64).sum(axis=1)
            counts = words.view(np.uint8).reshape(rows, 8).sum(axis=1, dtype=np.int64)
        else:
            mask = self._mask[:, :rows]
            np.greater(self._scores.T[:, :rows], bounds, out=mask)
            counts = mask.view(np.uint8).sum(axis=0, dtype=np.uint8).astype(np.int64)
        return counts


def _assign_blocks(sizes: Ints, block_rows: int) -> Ints:
    """Returns the block of each class; classes are not split, and no block has more than `block_rows` photos."""
    blocks, block, filled = [], 0, 0
    for size in sizes.tolist():
        if filled + size > block_rows:
            block, filled = block + 1, 0
        filled += size
        blocks.append(block)
    return np.array(blocks)
