"""Batches: the same for the same seed and epoch, shared evenly by processes, and continued in mid-epoch."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import SamplingSettings
from training.data.samplers import (
    BalancedBatches,
    Batches,
    PowerBatches,
    RandomBatches,
    expected_positives,
    make_batches,
)
from training.errors import TrainingError

LABELS = ["a"] * 11 + ["b"] * 2 + ["c"] * 5 + ["d"] * 7 + ["e"] * 5
Make = Callable[..., Batches]


def random_batches(**options: int) -> Batches:
    return RandomBatches(len(LABELS), 8, 3, **options)


def balanced_batches(**options: int) -> Batches:
    return BalancedBatches(LABELS, 4, 2, 3, **options)


def power_batches(**options: int) -> Batches:
    return PowerBatches(LABELS, 8, 3, power=0.5, max_per_class=6, **options)


every_kind = pytest.mark.parametrize("make", [random_batches, balanced_batches, power_batches])


def epoch_of(batches: Batches, epoch: int, start_step: int = 0) -> list[list[int]]:
    batches.epoch, batches.start_step = epoch, start_step
    return [[index for _, index in batch] for batch in batches]


def keys_of(batches: Batches, epoch: int, start_step: int = 0) -> list[list[tuple[int, int]]]:
    batches.epoch, batches.start_step = epoch, start_step
    return list(batches)


@every_kind
def test_an_epoch_follows_from_the_seed_and_its_number_alone(make: Make) -> None:
    first, second = make(), make()
    assert epoch_of(first, 0) != epoch_of(first, 1)
    assert epoch_of(second, 1) == epoch_of(first, 1)
    assert len(epoch_of(first, 2)) == len(first)


@every_kind
@pytest.mark.parametrize("steps", [{}, {"steps_per_epoch": 2}, {"steps_per_epoch": 9}])
def test_an_epoch_can_be_continued_at_any_step(make: Make, steps: dict[str, int]) -> None:
    epoch = keys_of(make(**steps), 4)
    assert len(make(**steps)) == len(epoch) == steps.get("steps_per_epoch", len(epoch))
    for step in range(len(epoch) + 1):
        assert keys_of(make(**steps), 4, start_step=step) == epoch[step:]


@every_kind
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("steps", [{}, {"steps_per_epoch": 9}])
def test_processes_together_see_the_photos_of_one_process_step_by_step(
    make: Make, steps: dict[str, int], world_size: int
) -> None:
    parts = [keys_of(make(rank=rank, world_size=world_size, **steps), 1) for rank in range(world_size)]
    joined = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
    assert joined == keys_of(make(**steps), 1)
    assert {len(batch) for part in parts for batch in part} == {8 // world_size}


@every_kind
def test_a_batch_that_cannot_be_shared_evenly_is_refused(make: Make) -> None:
    with pytest.raises(TrainingError, match="A batch of 8 cannot be shared evenly by 3 processes"):
        make(rank=0, world_size=3)


@every_kind
def test_epochs_of_any_length_walk_through_the_same_batches(make: Make) -> None:
    rounds = [batch for epoch in range(6) for batch in epoch_of(make(), epoch)]
    for length in (1, 2, 7):
        walked = [
            batch for epoch in range(len(rounds) // length) for batch in epoch_of(make(steps_per_epoch=length), epoch)
        ]
        assert walked == rounds[: len(walked)]


@every_kind
def test_a_photo_that_is_shown_again_in_an_epoch_is_another_view(make: Make) -> None:
    keys = list(chain(*keys_of(make(steps_per_epoch=20), 2)))
    assert len(set(keys)) == len(keys) > len(LABELS)
    first = {index: view for view, index in reversed(keys)}
    assert set(first.values()) == {2}, "the first view of an epoch is named by the epoch"


def test_every_photo_comes_once_per_epoch() -> None:
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


sizes_of_classes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(sizes=sizes_of_classes, power=st.floats(0, 1), most=st.none() | st.integers(1, 20), batch=st.integers(2, 16))
def test_classes_come_in_proportion_to_a_power_of_their_size(
    sizes: list[int], power: float, most: int | None, batch: int
) -> None:
    labels = [number for number, size in enumerate(sizes) for _ in range(size)]
    batches = PowerBatches(labels, batch, seed=1, power=power, max_per_class=most)
    shares = [size**power / sum(size**power for size in sizes) for size in sizes]
    wanted = [min(share * len(labels), most or len(labels)) for share in shares]
    for epoch in range(3):
        steps = epoch_of(batches, epoch)
        total = sum(map(len, steps))
        assert len({len(step) for step in steps}) == 1 and total <= sum(wanted) + 1e-6
        assert total > sum(wanted) - len(steps[0]) - 1, "the photos fill whole batches, as far as they go"
        shown = Counter(labels[index] for index in chain(*steps))
        for number, quota in enumerate(wanted):
            assert abs(shown[number] - quota * total / sum(wanted)) < 1 + 1e-6
            assert most is None or shown[number] <= most


@given(sizes=sizes_of_classes, power=st.floats(0, 1), most=st.none() | st.integers(1, 20), epochs=st.integers(1, 8))
def test_no_photo_is_shown_again_before_all_of_its_class_were(
    sizes: list[int], power: float, most: int | None, epochs: int
) -> None:
    labels = [number for number, size in enumerate(sizes) for _ in range(size)]
    batches = PowerBatches(labels, 8, seed=1, power=power, max_per_class=most)
    views = Counter(index for epoch in range(epochs) for index in chain(*epoch_of(batches, epoch)))
    for number in range(len(sizes)):
        own = [views[index] for index, label in enumerate(labels) if label == number]
        assert max(own) - min(own) <= 1


def test_a_cap_keeps_large_classes_from_filling_an_epoch() -> None:
    labels = ["bulk"] * 1000 + [f"rare {number // 4}" for number in range(40)]
    batches = PowerBatches(labels, 10, seed=0, power=1, max_per_class=60)
    shown = Counter(labels[index] for index in chain(*epoch_of(batches, 0)))
    assert shown.pop("bulk") == 60 and len(batches) == 10
    assert set(shown.values()) == {4}


def test_settings_name_the_kind_of_batches() -> None:
    labels = [str(label) for label in LABELS]

    def made(**settings: Any) -> Batches:
        return make_batches(SamplingSettings(batch_size=8, photos_per_class=2, **settings), labels, seed=3)

    assert epoch_of(made(kind="random"), 1) == epoch_of(random_batches(), 1)
    assert epoch_of(made(kind="balanced"), 1) == epoch_of(balanced_batches(), 1)
    assert epoch_of(made(kind="power", power=0.5, max_per_class=6), 1) == epoch_of(power_batches(), 1)
    assert len(made(kind="random", steps_per_epoch=17)) == 17
    with pytest.raises(ValueError, match="random, balanced or power"):
        made(kind="auto")


@pytest.mark.parametrize(("classes", "size", "share"), [(100, 59, 0.72), (11_318, 5, 0.009)])
def test_a_random_batch_holds_few_pairs_where_classes_are_many(classes: int, size: int, share: float) -> None:
    """The training halves of CUB and SOP: 1 - (1 - size / photos) ^ 127, about."""
    labels = [str(index % classes) for index in range(classes * size)]
    random, balanced = (SamplingSettings(kind=kind, batch_size=128) for kind in ("random", "balanced"))
    assert expected_positives(random, labels) == pytest.approx(share, abs=0.015)
    assert expected_positives(balanced, labels) == 1


def test_a_small_set_is_one_batch_of_classes_by_their_power_too() -> None:
    assert [len(batch) for batch in PowerBatches(["a", "b", "b"], 4, seed=0, power=0.5)] == [3]
    assert [len(batch) for batch in PowerBatches(["a", "b", "b"], 4, 0, power=0.5, rank=1, world_size=2)] == [1]
    with pytest.raises(TrainingError, match="1 photos cannot be shared by 2 processes"):
        PowerBatches(["a", "a"], 4, 0, power=1, max_per_class=1, rank=1, world_size=2)
