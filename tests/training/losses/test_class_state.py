"""The schedule of Proxy-ISA's settings, and the V that suits a run's length."""

import math
from typing import Any

import pytest
import torch

from index.errors import LookalikeError
from training.config import TrainingConfig
from training.losses.class_state import MIN_VOLUME, ClassHardness, HardnessSettings, volume_for
from training.losses.proxy_isa import ProxyISALoss, ProxyISASettings
from training.report.learned import learned_classes


def test_queue_and_filter_start_at_epochs_two_and_three_counted_from_zero() -> None:
    settings = HardnessSettings(steps_per_epoch=46)
    assert (settings.first_queue_step, settings.first_filter_step) == (92, 138)


def test_starts_in_steps_win_over_epochs() -> None:
    settings = HardnessSettings(steps_per_epoch=1000, queue_start=7, filter_start_epoch=1)
    assert (settings.first_queue_step, settings.first_filter_step) == (7, 1000)


def test_queue_and_filter_switch_on_at_their_first_step() -> None:
    state = ClassHardness(2, 3, HardnessSettings(queue_start=1, filter_start=2, queue_size=8))
    switched = []
    for _ in range(4):
        switched.append((state.queue_is_on, state.filter_is_on))
        x = torch.nn.functional.normalize(torch.ones(2, 3))
        state.update(x, torch.tensor([0, 1]), torch.ones(2), x, state.thresholds())
    assert switched == [(False, False), (True, False), (True, True), (True, True)]
    assert state.seen.tolist() == [4, 4]
    assert state.class_counts[:2].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("changes", "capacity"),
    [({"train_size": 5_864}, 52_776), ({"train_size": 59_551}, 55_000), ({}, 55_000), ({"queue_size": 12}, 12)],
)
def test_the_queue_holds_nine_epochs_up_to_the_authors_size(changes: dict[str, Any], capacity: int) -> None:
    assert HardnessSettings(steps_per_epoch=1, **changes).queue_capacity == capacity


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "give steps_per_epoch, or queue_start and filter_start"),
        ({"queue_start": 5}, "give steps_per_epoch"),
        ({"queue_start": 5, "filter_start": 4}, "the filter starts at step 4, before the queue"),
        ({"steps_per_epoch": 0}, r"steps_per_epoch must be greater than 0 \(got 0\)"),
        ({"steps_per_epoch": 9, "positive_penalty": "some"}, r"positive_penalty must be .* \(got 'some'\)"),
        ({"steps_per_epoch": 9, "tau": 100}, r"tau \(100.0\) must be below volume"),
        ({"steps_per_epoch": 9, "lambda": 0.1}, "lambda is unknown.*search_margin"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(LookalikeError, match=problem):
        ProxyISALoss(10, 4, **changes)


def test_keyword_arguments_change_a_settings_object() -> None:
    base = ProxyISASettings(steps_per_epoch=10, alpha=16, queue_size=5)
    assert ProxyISALoss(10, 4, base, alpha=8).hardness.settings == base.model_copy(update={"alpha": 8.0})


def test_the_sigmoid_inside_sigma_is_one_half_at_the_half_decay_point() -> None:
    settings = HardnessSettings(queue_start=0, filter_start=0, queue_size=1)
    assert settings.half_decay_samples() == pytest.approx(418, abs=0.5)
    state = ClassHardness(2, 3, settings).double()
    state.seen.fill_(418)
    at = state.thresholds()
    sigma = state.positive_weights(torch.ones(2), torch.arange(2), at)[0].item()
    assert (sigma - 1) / (1 + math.exp(-1.5)) / (at.nu[0].item() - 1) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("tau", [0.5, 1.5, 8.0])
@pytest.mark.parametrize("planned", [300, 530, 1_000, 5_864, 60_000, 1e6, 1e8])
def test_the_volume_puts_the_half_decay_between_7_and_10_percent_of_the_planned_samples(
    planned: float, tau: float
) -> None:
    settings = HardnessSettings(steps_per_epoch=1, volume=volume_for(planned, tau), tau=tau)
    share = settings.half_decay_samples() / planned
    assert 0.07 < share < 0.1 or (settings.volume == max(MIN_VOLUME, 2 * tau) and share > 0.08)


def test_100_epochs_of_cub_take_about_the_papers_volume() -> None:
    assert 100 < volume_for(5_864) < 120


@pytest.mark.parametrize("planned", [0, 1, 200])
def test_a_very_short_run_takes_the_smallest_volume(planned: float) -> None:
    assert volume_for(planned) == MIN_VOLUME
    assert volume_for(planned, tau=30.0) == 60.0


def test_a_loaded_state_keeps_the_volume_it_was_trained_with() -> None:
    trained = ProxyISALoss(4, 3, steps_per_epoch=1, queue_size=8, volume=38.5)
    resumed = ProxyISALoss(4, 3, steps_per_epoch=1, queue_size=8, volume=77.0)
    resumed.load_state_dict(trained.state_dict())
    assert resumed.hardness.settings == trained.hardness.settings
    reported = learned_classes(TrainingConfig(), trained.state_dict())
    assert reported is not None and reported.settings.volume == 38.5
    resumed.hardness.seen.fill_(10**6)
    torch.testing.assert_close(resumed.hardness.thresholds().effective, torch.full((4,), 38.5))
