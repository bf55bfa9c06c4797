"""Searches every test photo: the worst queries, and the classes that are confused most often."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from training.data import Photo
from training.evaluation import photo_protocol

_BLOCK = 1024
Places = NDArray[np.int64]


class Neighbour(NamedTuple):
    """A photo in the results, by its place in the list, and its cosine to the query."""

    photo: int
    score: float


class WrongResult(NamedTuple):
    """A query whose nearest photo shows another class."""

    query: int
    neighbours: list[Neighbour]
    right: Neighbour
    """The nearest photo of the query's class."""
    rank: int
    """Of that photo, from 1."""

    @property
    def margin(self) -> float:
        """Returns how much nearer the wrong photo is than any right one."""
        return self.neighbours[0].score - self.right.score


class Confusion(NamedTuple):
    """Two classes, how many queries of either find the other first, and the mistake with the highest cosine."""

    classes: tuple[str, str]
    mistakes: int
    query: int
    found: Neighbour


class SearchResults:
    """The results of every query photo among the gallery photos, by the rules that Recall@K is measured with."""

    def __init__(self, vectors: NDArray[np.float32], photos: Sequence[Photo]) -> None:
        self._unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        self._labels = [photo.label for photo in photos]
        protocol = photo_protocol(photos)
        self._classes, self._gallery, self.queries = protocol.classes, protocol.gallery, protocol.queries
        parts = [self._search(self.queries[start : start + _BLOCK]) for start in range(0, len(self.queries), _BLOCK)]
        self._first, self._first_score, self._right_score = (
            np.concatenate(arrays) for arrays in zip(*parts, strict=True)
        )
        self.wrong: NDArray[np.bool_] = self._classes[self._first] != self._classes[self.queries]

    def _scores(self, queries: Places) -> NDArray[np.float32]:
        # The last digits depend on how many queries are multiplied at once, and would rank duplicates by chance.
        scores: NDArray[np.float32] = np.round(self._unit[queries] @ self._unit[self._gallery].T, 6)
        scores[queries[:, None] == self._gallery] = -np.inf
        return scores

    def _search(self, queries: Places) -> tuple[Places, NDArray[np.float32], NDArray[np.float32]]:
        """Returns the nearest photo of each query, its score, and the best score of a right one."""
        scores = self._scores(queries)
        first = scores.argmax(axis=1)
        right = np.where(self._classes[self._gallery] == self._classes[queries][:, None], scores, -np.inf)
        return self._gallery[first], scores.max(axis=1), right.max(axis=1)

    def worst(self, count: int, neighbours: int) -> list[WrongResult]:
        """Returns wrong results, first those that prefer a wrong photo to every right one by the widest margin."""
        margins = self._first_score - self._right_score
        order = np.argsort(-margins, kind="stable")
        chosen = self.queries[order[self.wrong[order]][:count]]
        return [self._wrong_result(int(query), neighbours) for query in chosen]

    def _wrong_result(self, query: int, count: int) -> WrongResult:
        scores = self._scores(np.array([query]))[0]
        ranked = [place for place in np.argsort(-scores, kind="stable") if self._gallery[place] != query]
        found = [Neighbour(int(self._gallery[place]), float(scores[place])) for place in ranked]
        rank = next(i for i, neighbour in enumerate(found) if self._labels[neighbour.photo] == self._labels[query])
        return WrongResult(query, found[:count], found[rank], rank + 1)

    def confusions(self, count: int) -> list[Confusion]:
        """Returns the pairs of classes that are confused most often."""
        mistakes: dict[tuple[str, str], list[tuple[float, int, int]]] = defaultdict(list)
        for place in np.flatnonzero(self.wrong):
            query, found = int(self.queries[place]), int(self._first[place])
            one, other = sorted((self._labels[query], self._labels[found]))
            mistakes[one, other].append((float(self._first_score[place]), query, found))
        ranked = sorted(mistakes.items(), key=lambda item: (-len(item[1]), -max(item[1])[0]))
        best = [(classes, len(found), max(found)) for classes, found in ranked[:count]]
        return [
            Confusion(classes, total, query, Neighbour(found, score)) for classes, total, (score, query, found) in best
        ]
