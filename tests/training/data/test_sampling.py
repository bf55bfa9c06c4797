"""Batches: the same for the same seed and epoch, shared evenly by processes, and gone on with in mid-epoch."""

from collections import Counter
from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.sampling import BalancedBatches, Batches, RandomBatches
from training.errors import TrainingError

LABELS = ["a"] * 11 + ["b"] * 2 + ["c"] * 5 + ["d"] * 7 + ["e"] * 5
Make = Callable[..., Batches]


def random_batches(**sharing: int) -> Batches:
    return RandomBatches(len(LABELS), 8, 3, **sharing)


def balanced_batches(**sharing: int) -> Batches:
    return BalancedBatches(LABELS, 4, 2, 3, **sharing)


both = pytest.mark.parametrize("make", [random_batches, balanced_batches])


def epoch_of(batches: Batches, epoch: int, start_step: int = 0) -> list[list[int]]:
    batches.epoch, batches.start_step = epoch, start_step
    keys = list(batches)
    assert all(at == epoch for batch in keys for at, _ in batch)
    return [[index for _, index in batch] for batch in keys]


@both
def test_an_epoch_follows_from_the_seed_and_its_number_alone(make: Make) -> None:
    first, second = make(), make()
    assert epoch_of(first, 0) != epoch_of(first, 1)
    assert epoch_of(second, 1) == epoch_of(first, 1)
    assert len(epoch_of(first, 2)) == len(first)


@both
def test_an_epoch_can_be_gone_on_with_at_any_step(make: Make) -> None:
    whole = epoch_of(make(), 4)
    for step in range(len(whole) + 1):
        assert epoch_of(make(), 4, start_step=step) == whole[step:]
        assert len(make()) == len(whole), "the length of an epoch does not depend on where it starts"


@both
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_processes_together_see_the_photos_of_one_process_step_by_step(make: Make, world_size: int) -> None:
    parts = [epoch_of(make(rank=rank, world_size=world_size), 1) for rank in range(world_size)]
    joined = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
    assert joined == epoch_of(make(), 1)
    assert {len(batch) for part in parts for batch in part} == {8 // world_size}


@both
def test_a_batch_that_cannot_be_shared_evenly_is_refused(make: Make) -> None:
    with pytest.raises(TrainingError, match="A batch of 8 cannot be shared evenly by 3 processes"):
        make(rank=0, world_size=3)


def test_every_photo_comes_once_an_epoch() -> None:
    assert sorted(chain(*epoch_of(RandomBatches(20, 5, 3), 0))) == list(range(20))


def test_the_short_rest_is_dropped_but_a_small_set_is_one_batch() -> None:
    assert [len(batch) for batch in RandomBatches(11, 4, seed=0)] == [4, 4]
    assert [len(batch) for batch in RandomBatches(3, 4, seed=0)] == [3]
    assert [len(batch) for batch in RandomBatches(3, 4, seed=0, rank=1, world_size=2)] == [1]
    with pytest.raises(TrainingError, match="1 photos cannot be shared by 2 processes"):
        RandomBatches(1, 4, seed=0, rank=1, world_size=2)


def test_a_balanced_batch_holds_some_photos_of_each_of_some_classes() -> None:
    for batch in epoch_of(balanced_batches(), 0):
        assert sorted(Counter(LABELS[index] for index in batch).values()) == [2, 2, 2, 2]
        assert len(set(batch)) == 8


def test_classes_with_too_few_photos_repeat_them() -> None:
    for batch in epoch_of(BalancedBatches(["a", "b", "b", "c", "c", "c", "c"], 3, 4, seed=0), 0):
        assert sorted(Counter(batch).values()) == [1, 1, 1, 1, 2, 2, 4]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    classes=st.integers(1, 6),
    photos_per_class=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_classes_come_equally_often_and_their_photos_in_turn(
    sizes: list[int], classes: int, photos_per_class: int, epoch: int
) -> None:
    labels = [number for number, size in enumerate(sizes) for _ in range(size)]
    steps = epoch_of(BalancedBatches(labels, classes, photos_per_class, seed=1), epoch)
    together = min(classes, len(sizes))
    shown = Counter(labels[index] for batch in steps for index in batch)
    rounds = [shown[number] // photos_per_class for number in range(len(sizes))]
    extra = sum(rounds) - min(rounds) * len(sizes)
    assert min(rounds) >= 1 and max(rounds) - min(rounds) <= 1
    assert extra < together, "only the last batch goes beyond the last round"
    for batch in steps:
        assert set(Counter(labels[index] for index in batch).values()) == {photos_per_class}
        assert len(batch) == together * photos_per_class
    for number, size in enumerate(sizes):
        views = Counter(index for batch in steps for index in batch if labels[index] == number)
        assert max(views.values()) - (min(views.values()) if len(views) == size else 0) <= 1


def test_balanced_batches_take_the_classes_that_there_are() -> None:
    assert [len(batch) for batch in BalancedBatches(["a", "b", "c"] * 4, 8, 2, seed=0)] == [6, 6]
    assert {len(batch) for batch in BalancedBatches(["a", "b", "c"] * 4, 8, 1, 0, rank=1, world_size=2)} == {1}
    with pytest.raises(TrainingError, match="1 photos of 3 classes cannot be shared by 4 processes"):
        BalancedBatches(["a", "b", "c"] * 4, 8, 1, 0, rank=1, world_size=4)
