"""The estimate of memory and time before a run, and the batch size that fits."""

import pytest
import torch
from torch import nn

from training.step_cost import RunPlan, StepCost, measure_step

GB = 10**9


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.Sigmoid(), nn.Dropout(), nn.Linear(width, 4))


def blank(count: int) -> torch.Tensor:
    return torch.zeros(count, 3, 2, 2)


def plan(**changes: object) -> RunPlan:
    values: dict[str, object] = {
        "photos": 3000,
        "classes": 46,
        "epochs": 10,
        "batch_size": 128,
        "accumulation": 1,
        "steps": 23,
    }
    values |= {"learns": "All weights learn", "memory": 4 * GB, "available": 16 * GB, "epoch_seconds": 120.0}
    return RunPlan(**values | {"fitting_batch": 128, "chosen": False} | changes)  # type: ignore[arg-type]


def test_memory_grows_with_what_a_step_keeps() -> None:
    narrow, wide = (measure_step(network(width), blank).photo_bytes for width in (1_000, 100_000))
    assert 1_000 * 4 <= narrow < 3 * 1_000 * 4
    assert wide == pytest.approx(100 * narrow, rel=0.1)


def test_a_measured_step_leaves_weights_mode_and_random_state() -> None:
    model = network(50).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    cost = measure_step(model, blank)
    assert model.training and cost.photo_seconds >= cost.forward_seconds > 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("gigabytes", "divisor", "batch"), [(64, 1, 128), (16, 1, 64), (8, 1, 32), (4, 1, 8), (1, 1, 8), (16, 3, 63)]
)
def test_the_batch_is_halved_until_it_fits(gigabytes: int, divisor: int, batch: int) -> None:
    cost = StepCost(fixed_bytes=2 * GB, photo_bytes=GB // 10, photo_seconds=0, forward_seconds=0)
    largest = 128 if divisor == 1 else 129
    assert cost.fitting_batch(gigabytes * GB, divisor, largest=largest) == batch


def test_a_plan_names_batch_memory_and_time() -> None:
    first, second, third = plan(accumulation=4, chosen=True).lines()
    assert first == (
        "3,000 photos of 46 classes to learn, batches of 128, 4 to an update (chosen for this machine), "
        "23 steps per epoch."
    )
    assert second == "All weights learn."
    assert third == "Estimate: 4.0 GB of memory (16.0 GB available), about 2 min per epoch, about 20 min in all."


def test_a_run_that_does_not_fit_is_warned_about_with_the_settings_to_use() -> None:
    assert plan(memory=17 * GB, fitting_batch=32, accumulation=2).lines()[-1] == (
        "Warning: the run needs more memory than there is and may be killed. "
        "Set sampling.batch_size=32 and optimiser.accumulation=8."
    )
    assert "preprocessing.input_size" in plan(memory=17 * GB, fitting_batch=128).lines()[-1]
