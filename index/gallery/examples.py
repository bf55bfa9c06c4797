"""Combines the examples of a search, photos and items that are wanted or not, into query vectors."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.gallery.errors import SearchError
from index.gallery.ranking.rules import Negatives
from index.items import MAX_IMAGES_PER_ITEM
from index.rankings import MAX_EXAMPLES, Combination

_MIN_LENGTH = 1e-4
"""Length of a sum of unit vectors below which its direction is only rounding."""

_MIN_RATIO = 1e-6
"""A positive weight counts at least as much, compared with a negative one: scores must stay finite."""


class Example(NamedTuple):
    """A photo, by its vector, or an item of the gallery; the weight is negative for what items should not be like."""

    vector: NDArray[np.float32] | None = None
    item_id: str | None = None
    weight: float = 1.0


class WeightedVectors(NamedTuple):
    """The vectors of an example, one per row, each of length one, and its weight."""

    rows: NDArray[np.float32]
    weight: float


class CombinedQuery(NamedTuple):
    """Query vectors, of which an image counts by the nearest, and negative examples that act on a window."""

    group: NDArray[np.float32]
    negatives: Negatives | None = None


def check_examples(examples: Sequence[Example]) -> None:
    """Refuses examples that make no query."""
    if not 1 <= len(examples) <= MAX_EXAMPLES:
        raise SearchError(f"The search has {len(examples)} examples.", f"Give 1 to {MAX_EXAMPLES}.")
    for example in examples:
        if (example.vector is None) == (example.item_id is None):
            raise SearchError("An example has not exactly one of a vector and an item id.", "Give one of them.")
        if not 0 < abs(example.weight) <= 1:
            raise SearchError(f"The weight of an example is {example.weight}.", "Use -1 to 1, but not 0.")
    if all(example.weight < 0 for example in examples):
        raise SearchError("All examples are negative.", "Add one with a positive weight.")


def combine(examples: Sequence[WeightedVectors], how: Combination) -> CombinedQuery:
    """Returns the query of some examples; of weights only the ratios count."""
    largest = max(abs(example.weight) for example in examples)
    examples = [example._replace(weight=example.weight / largest) for example in examples]
    return _mean(examples) if how == "mean" else _best(examples)


def _mean(examples: Sequence[WeightedVectors]) -> CombinedQuery:
    """Returns the direction of the weighted sum, where an item counts by the mean of its images."""
    total = sum(example.weight * _unit(example.rows.sum(axis=0, dtype=np.float64)) for example in examples)
    return CombinedQuery(_unit(np.asarray(total)).astype(np.float32)[np.newaxis])


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    length = float(np.linalg.norm(vector))
    if length < _MIN_LENGTH:
        raise SearchError("The examples cancel each other out.", "Change their weights, or leave some out.")
    return vector / length


def _best(examples: Sequence[WeightedVectors]) -> CombinedQuery:
    """Returns all vectors: an image counts by the largest product of a weight and a similarity.

    The largest weight becomes 1. Negative examples lower the scores of a window.
    """
    count = sum(len(example.rows) for example in examples)
    if count > MAX_IMAGES_PER_ITEM:
        raise SearchError(
            f"The examples have {count} images; `best` compares up to {MAX_IMAGES_PER_ITEM}.",
            "Use fewer items, or combine their mean.",
        )
    largest = max(example.weight for example in examples)
    wanted = [example for example in examples if example.weight > 0]
    unwanted = [example for example in examples if example.weight < 0]
    group = np.concatenate([example.rows * np.float32(example.weight / largest) for example in wanted])
    if not unwanted:
        return CombinedQuery(group)
    weights = [
        np.full(len(example.rows), -example.weight / max(largest, _MIN_RATIO), np.float32) for example in unwanted
    ]
    return CombinedQuery(group, Negatives(np.concatenate([one.rows for one in unwanted]), np.concatenate(weights)))
