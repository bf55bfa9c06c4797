"""Learning rates by group and over time, and the moving average of the weights."""

import pytest
import torch

from training.backbones import EmbeddingModel
from training.config import BackboneSettings, OptimiserSettings, TrainingConfig, load_config
from training.losses.registry import make_loss
from training.optimizers import MovingAverage, make_optimiser, rate_factor, set_rates


@pytest.fixture(scope="module")
def model() -> EmbeddingModel:
    settings = BackboneSettings(name="test_resnet", weights="none", embedding_size=8)
    return EmbeddingModel(settings, input_size=32, pretrained=False)


def groups(model: EmbeddingModel, **settings: object) -> dict[str, float]:
    """Returns the base rate of every group."""
    loss = make_loss("proxy_anchor", 4, 8, {})
    optimiser = make_optimiser(OptimiserSettings.model_validate(settings), model, loss)
    return {group["name"]: group["lr"] for group in optimiser.param_groups}


def factors(overrides: list[str], steps_per_epoch: int, steps: int) -> list[float]:
    config: TrainingConfig = load_config(None, overrides)
    factor = rate_factor(config, steps_per_epoch)
    return [factor(step) for step in range(steps)]


def test_proxies_learn_a_hundred_times_faster_by_default(model: EmbeddingModel) -> None:
    rates = groups(model, learning_rate=0.001)
    assert rates == {"backbone": 0.001, "head": 0.001, "proxies": pytest.approx(0.1)}


def test_every_parameter_is_in_one_group_also_with_rates_per_stage(model: EmbeddingModel) -> None:
    loss = make_loss("proxy_anchor", 4, 8, {})
    for decay in (1.0, 0.5):
        optimiser = make_optimiser(OptimiserSettings(layer_decay=decay), model, loss)
        grouped = [id(parameter) for group in optimiser.param_groups for parameter in group["params"]]
        assert sorted(grouped) == sorted(id(p) for part in (model, loss) for p in part.parameters())


def test_each_stage_learns_at_a_share_of_the_next_ones_rate(model: EmbeddingModel) -> None:
    rates = groups(model, learning_rate=1.0, layer_decay=0.5)
    count = len(model.stage_names())
    stages = [rates[f"backbone.{number}"] for number in range(count)]
    assert stages == [pytest.approx(0.5 ** (count - number)) for number in range(count)]
    assert rates["head"] == 1


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop)]
)
def test_the_optimiser_has_the_settings_epsilon(
    model: EmbeddingModel, name: str, kind: type[torch.optim.Optimizer]
) -> None:
    settings = OptimiserSettings.model_validate({"name": name, "eps": 0.01})
    optimiser = make_optimiser(settings, model, make_loss("proxy_anchor", 4, 8, {}))
    assert type(optimiser) is kind
    assert {group["eps"] for group in optimiser.param_groups} == {0.01}


def test_steps_drop_the_rate_after_their_epochs() -> None:
    seen = factors(["schedule={kind: step, step_epochs: 2, step_factor: 0.5}", "epochs=6"], 4, 24)
    assert seen == [1.0] * 8 + [0.5] * 8 + [0.25] * 8


def test_the_cosine_ends_at_zero() -> None:
    seen = factors(["epochs=5"], 4, 20)
    assert seen[0] == 1 and seen[10] == pytest.approx(0.5) and seen[-1] < 0.01
    assert seen == sorted(seen, reverse=True)


def test_the_ramp_rises_linearly_to_the_full_rate() -> None:
    seen = factors(["schedule={kind: constant, ramp_epochs: 0.5}", "epochs=2"], 8, 16)
    assert seen == [0.25, 0.5, 0.75, 1.0] + [1.0] * 12


def test_a_factor_multiplies_the_rate_of_every_group(model: EmbeddingModel) -> None:
    optimiser = make_optimiser(OptimiserSettings(learning_rate=1.0), model, make_loss("proxy_anchor", 4, 8, {}))
    for _ in range(2):  # a second call starts from the same base
        set_rates(optimiser, 0.5)
        assert [group["lr"] for group in optimiser.param_groups] == [0.5, 0.5, 50.0]


def test_the_moving_average_follows_the_weights_and_survives_a_checkpoint(model: EmbeddingModel) -> None:
    average = MovingAverage(model, 0.9)
    start, expected = model.head.weight.detach().clone(), model.head.weight.detach().clone()
    other = EmbeddingModel(BackboneSettings(name="test_resnet", weights="none", embedding_size=8), input_size=32)
    for update in range(1, 8):
        with torch.no_grad():
            other.head.weight.copy_(start + update)
        average.update(other)
        decay = min(0.9, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * (start + update)
        if update == 4:  # as a killed run does
            state = average.state_dict()
            average = MovingAverage(model, 0.9)
            average.load_state_dict(state)
    torch.testing.assert_close(average.model.head.weight, expected)
    assert not average.model.training and not any(p.requires_grad for p in average.model.parameters())
