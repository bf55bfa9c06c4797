"""Which photos meet in a batch: lists of (epoch, index) keys that follow from the seed and the epoch alone.

Nothing is carried from batch to batch between processes or runs, so a run that was stopped goes on in the middle of an
epoch, and several processes share one global batch without talking to each other.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice

import numpy as np

from training.errors import TrainingError

Key = tuple[int, int]


class Batches(ABC):
    """The batches of an epoch, for a DataLoader's `batch_sampler`. Set `epoch`, and `start_step` to begin within it.

    With several processes, each gets its own equal part of every global batch: step by step, all of them together
    see exactly the photos that one process would see.
    """

    def __init__(self, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not below world_size {world_size}")
        self._seed = seed
        self._rank = rank
        self._part = batch_size // world_size
        self.epoch = 0
        self.start_step = 0

    @abstractmethod
    def __len__(self) -> int:
        """The steps of a whole epoch, wherever this one starts."""

    @abstractmethod
    def _global_batches(self, rng: np.random.Generator) -> Iterator[Sequence[int]]:
        """Photo numbers of all processes' batches, one sequence a step."""

    def __iter__(self) -> Iterator[list[Key]]:
        rng = np.random.default_rng((self._seed, self.epoch))
        own = slice(self._rank * self._part, (self._rank + 1) * self._part)
        for batch in islice(self._global_batches(rng), self.start_step, None):
            yield [(self.epoch, int(index)) for index in batch[own]]


class RandomBatches(Batches):
    """Every photo once an epoch, shuffled; the short rest is dropped, for a tiny batch would teach noise."""

    def __init__(self, count: int, batch_size: int, seed: int, *, rank: int = 0, world_size: int = 1) -> None:
        if count < world_size:
            raise TrainingError(f"{count} photos cannot be shared by {world_size} processes.", "Use fewer processes.")
        _check_shares(batch_size, world_size)
        self._count = count
        self._batch_size = min(batch_size, count // world_size * world_size)
        super().__init__(self._batch_size, seed, rank, world_size)

    def __len__(self) -> int:
        return self._count // self._batch_size

    def _global_batches(self, rng: np.random.Generator) -> Iterator[Sequence[int]]:
        order = rng.permutation(self._count).tolist()
        for start in range(0, len(self) * self._batch_size, self._batch_size):
            yield order[start : start + self._batch_size]


class BalancedBatches(Batches):
    """Some photos of each of some classes; over an epoch each class comes equally often, however many photos it has.

    An epoch is as many rounds through all classes as show about as many photos as there are. Classes fill the last
    batch beyond the last round where they do not go into it evenly. Photos of a class are shown in turn, and again
    within a batch only when the class has too few.
    """

    def __init__(
        self,
        labels: Sequence[Hashable],
        classes: int,
        photos_per_class: int,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_shares(classes * photos_per_class, world_size)
        members: dict[Hashable, list[int]] = {}
        for index, label in enumerate(labels):
            members.setdefault(label, []).append(index)
        self._members = list(members.values())
        # As many classes as there are, and so that the processes still share the batch evenly.
        even = world_size // math.gcd(world_size, photos_per_class)
        self._classes = min(classes, len(self._members)) // even * even
        if not self._classes:
            raise TrainingError(
                f"{photos_per_class} photos of {len(members)} classes cannot be shared by {world_size} processes.",
                "Use fewer processes.",
            )
        self._photos_per_class = photos_per_class
        rounds = max(1, round(len(labels) / (len(self._members) * photos_per_class)))
        self._steps = math.ceil(rounds * len(self._members) / self._classes)
        super().__init__(self._classes * photos_per_class, seed, rank, world_size)

    def __len__(self) -> int:
        return self._steps

    def _global_batches(self, rng: np.random.Generator) -> Iterator[Sequence[int]]:
        classes = _Deck(range(len(self._members)), rng)
        photos = [_Deck(members, rng) for members in self._members]
        for _ in range(self._steps):
            drawn = classes.draw(self._classes)
            yield [index for number in drawn for index in photos[number].draw(self._photos_per_class)]


class _Deck:
    """Cards drawn in shuffled rounds; one draw holds no card twice unless it is larger than the deck."""

    def __init__(self, cards: Sequence[int], rng: np.random.Generator) -> None:
        self._cards = cards
        self._rng = rng
        self._left: list[int] = []

    def draw(self, count: int) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < count:
            if not self._left:
                self._left = self._rng.permutation(self._cards).tolist()
                # Those just drawn go to the end of the new round.
                self._left.sort(key=set(drawn).__contains__)
            wanted = count - len(drawn)
            drawn += self._left[:wanted]
            self._left = self._left[wanted:]
        return drawn


def _check_shares(batch_size: int, world_size: int) -> None:
    if batch_size % world_size:
        raise TrainingError(
            f"A batch of {batch_size} cannot be shared evenly by {world_size} processes.",
            f"Choose a batch size that {world_size} divides.",
        )
