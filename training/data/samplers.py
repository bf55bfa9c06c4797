"""Samplers: batches as lists of (view, index) keys that follow from the seed, the epoch and the step alone.

The view is the epoch, and another number for a photo that is shown again in the same epoch, so that its augmentation
differs.

No state is carried between batches, processes or runs, so a stopped run continues in the middle of an epoch,
and several processes share one global batch without communication.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from training.config import SamplingSettings
from training.errors import TrainingError

Key = tuple[int, int]
_REPEAT = 1_000_003
"""Offset between the views of a photo in one epoch: larger than any epoch, and a prime, since caches take views modulo
their number."""
_MEASURED_BATCHES = 50


class Share(TypedDict, total=False):
    """The steps of an epoch, by default one round, and the part of each batch that a process gets, by default all."""

    steps_per_epoch: int | None
    rank: int
    world_size: int


class Batches(ABC):
    """The batches of an epoch, for a DataLoader's `batch_sampler`. Set `epoch`, and `start_step` to begin within it.

    Batches come in shuffled rounds through the data. An epoch is one round, or `steps_per_epoch` batches: each epoch
    then continues where the one before it ended.

    With several processes, each gets its own equal part of every global batch: step by step, all of them together
    see exactly the photos that one process would see.
    """

    def __init__(self, batch_size: int, round_steps: int, seed: int, **share: Unpack[Share]) -> None:
        rank, world_size = share.get("rank", 0), share.get("world_size", 1)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not below world_size {world_size}")
        self._seed = seed
        self.batch_size = batch_size
        """Photos of a step over all processes."""
        self._round_steps = round_steps
        self._steps = share.get("steps_per_epoch") or round_steps
        part = batch_size // world_size
        self._own = slice(rank * part, (rank + 1) * part)
        self.epoch = 0
        self.start_step = 0

    def __len__(self) -> int:
        """Returns the steps of a full epoch, wherever this one starts."""
        return self._steps

    @abstractmethod
    def _round(self, number: int) -> Iterator[Sequence[int]]:
        """Yields the photos of a round, one global batch per step."""

    def __iter__(self) -> Iterator[list[Key]]:
        shown: Counter[int] = Counter()
        for step, batch in enumerate(self._epoch()):
            keys = []
            for index in batch:
                keys.append((self.epoch + _REPEAT * shown[index], index))
                shown[index] += 1
            if step >= self.start_step:
                yield keys[self._own]

    def _epoch(self) -> Iterator[Sequence[int]]:
        """Yields the global batches of the full epoch, from one round or several."""
        step, end = self.epoch * self._steps, (self.epoch + 1) * self._steps
        while step < end:
            number, first = divmod(step, self._round_steps)
            last = min(self._round_steps, first + end - step)
            yield from islice(self._round(number), first, last)
            step += last - first

    def _cut(self, photos: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, self._round_steps * self.batch_size, self.batch_size):
            yield photos[start : start + self.batch_size]


class RandomBatches(Batches):
    """Every photo once per round, shuffled; the incomplete last batch is dropped."""

    def __init__(self, count: int, batch_size: int, seed: int, **share: Unpack[Share]) -> None:
        batch_size = _shared_batch(batch_size, count, share.get("world_size", 1))
        self._count = count
        super().__init__(batch_size, count // batch_size, seed, **share)

    def _round(self, number: int) -> Iterator[Sequence[int]]:
        yield from self._cut(np.random.default_rng((self._seed, number)).permutation(self._count).tolist())


class BalancedBatches(Batches):
    """Some photos of each of some classes; over a round each class comes equally often, however many photos it has.

    A round shows about as many photos as there are; where the classes do not fill the last batch evenly, some are
    repeated. Photos of a class are shown in turn, and again
    within a batch only when the class has too few.
    """

    def __init__(
        self, labels: Sequence[Hashable], classes: int, photos_per_class: int, seed: int, **share: Unpack[Share]
    ) -> None:
        world_size = share.get("world_size", 1)
        _check_shares(classes * photos_per_class, world_size)
        self._members = _members(labels)
        # As many classes as there are, and so that the processes still share the batch evenly.
        even = world_size // math.gcd(world_size, photos_per_class)
        self._classes = min(classes, len(self._members)) // even * even
        if not self._classes:
            photos = f"{photos_per_class} photos of {len(self._members)} classes"
            raise TrainingError(f"{photos} cannot be shared by {world_size} processes.", "Use fewer processes.")
        self._photos_per_class = photos_per_class
        times = max(1, round(len(labels) / (len(self._members) * photos_per_class)))
        steps = math.ceil(times * len(self._members) / self._classes)
        super().__init__(self._classes * photos_per_class, steps, seed, **share)

    def _round(self, number: int) -> Iterator[Sequence[int]]:
        rng = np.random.default_rng((self._seed, number))
        classes = _Deck(range(len(self._members)), rng)
        photos = [_Deck(members, rng) for members in self._members]
        for _ in range(self._round_steps):
            drawn = classes.draw(self._classes)
            yield [index for number in drawn for index in photos[number].draw(self._photos_per_class)]


class PowerBatches(Batches):
    """Classes in proportion to their size to a power: 1 shows every photo equally often, 0 every class.

    A round shows about as many photos as there are, less what `max_per_class` withholds of large classes. The photos
    of a class are shown in turn, and again only when all were shown, over the rounds too.
    """

    def __init__(
        self,
        labels: Sequence[Hashable],
        batch_size: int,
        seed: int,
        *,
        power: float,
        max_per_class: int | None = None,
        **share: Unpack[Share],
    ) -> None:
        self._members = _members(labels)
        weights = np.array([len(members) for members in self._members], float) ** power
        quotas = np.minimum(weights * (len(labels) / weights.sum()), max_per_class or math.inf)
        shown = int(quotas.sum() + 1e-6)
        batch_size = _shared_batch(batch_size, shown, share.get("world_size", 1))
        steps = shown // batch_size
        # Where the interval of each class ends on a line with one place per photo of a round.
        self._ends = np.cumsum(quotas * min(1, steps * batch_size / quotas.sum()))
        self._ends[-1] = steps * batch_size
        super().__init__(batch_size, steps, seed, **share)

    def _round(self, number: int) -> Iterator[Sequence[int]]:
        earlier = sum((self._counts(before) for before in range(number)), np.zeros(len(self._members), np.int64))
        chosen = [
            photo
            for place, (start, count) in enumerate(zip(earlier.tolist(), self._counts(number).tolist(), strict=True))
            for photo in self._interval(place, start, start + count)
        ]
        np.random.default_rng((self._seed, number)).shuffle(chosen)
        yield from self._cut(chosen)

    def _counts(self, number: int) -> NDArray[np.int64]:
        """Returns the photos that a round shows of each class: quotas rounded at random, with a fixed total."""
        offset = np.random.default_rng((self._seed, number, 1)).random()
        ends = np.floor(self._ends + offset).astype(np.int64)
        return np.concatenate((ends[:1], ends[1:] - ends[:-1]))

    def _interval(self, place: int, start: int, stop: int) -> Iterator[int]:
        """Yields photos of a class by their places in its endless sequence of shuffled passes."""
        members = self._members[place]
        for shuffle in range(start // len(members), math.ceil(stop / len(members))):
            # The last number keeps the generator apart from those above: trailing zeros would not count.
            order = np.random.default_rng((self._seed, place, shuffle, 2)).permutation(members).tolist()
            first = shuffle * len(members)
            yield from order[max(0, start - first) : stop - first]


def make_batches(
    settings: SamplingSettings, labels: Sequence[str], seed: int, *, rank: int = 0, world_size: int = 1
) -> Batches:
    """Returns the sampler that the settings describe, for photos of these classes; the caller resolves `auto`."""
    size, photos = settings.batch_size, settings.photos_per_class
    if size == "auto":
        raise ValueError("the batch size must be decided: a number")
    share = Share(steps_per_epoch=settings.steps_per_epoch, rank=rank, world_size=world_size)
    match settings.kind:
        case "random":
            return RandomBatches(len(labels), size, seed, **share)
        case "balanced":
            return BalancedBatches(labels, size // photos, photos, seed, **share)
        case "power":
            limit = settings.max_per_class
            return PowerBatches(labels, size, seed, power=settings.power, max_per_class=limit, **share)
        case "auto":
            raise ValueError("the kind of sampling must be decided: random, balanced or power")


def expected_positives(settings: SamplingSettings, labels: Sequence[str]) -> float:
    """Returns the share of photos with another photo of their class in the batch, estimated on the first batches.

    Losses on pairs learn nothing from the others.
    """
    paired = total = 0
    for batch in islice(make_batches(settings, labels, seed=0), _MEASURED_BATCHES):
        counts = Counter(labels[index] for _, index in batch)
        paired += sum(count for count in counts.values() if count > 1)
        total += len(batch)
    return paired / total


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
                # Cards that were just drawn go to the end of the new round.
                self._left.sort(key=set(drawn).__contains__)
            wanted = count - len(drawn)
            drawn += self._left[:wanted]
            self._left = self._left[wanted:]
        return drawn


def _members(labels: Sequence[Hashable]) -> list[list[int]]:
    """Returns the photos of each class, in the order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    return list(members.values())


def _shared_batch(batch_size: int, count: int, world_size: int) -> int:
    """Returns the size of a batch of at most `count` photos that the processes share evenly."""
    if count < world_size:
        raise TrainingError(f"{count} photos cannot be shared by {world_size} processes.", "Use fewer processes.")
    _check_shares(batch_size, world_size)
    return min(batch_size, count // world_size * world_size)


def _check_shares(batch_size: int, world_size: int) -> None:
    if batch_size % world_size:
        raise TrainingError(
            f"A batch of {batch_size} cannot be shared evenly by {world_size} processes.",
            f"Choose a batch size that {world_size} divides.",
        )
