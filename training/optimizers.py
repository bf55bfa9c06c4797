"""Optimiser, learning-rate schedule and moving average of a run."""

import copy
import math
from collections.abc import Callable

import torch
from torch import nn

from training.backbones import EmbeddingModel
from training.config import OptimiserSettings, TrainingConfig

Factor = Callable[[int], float]
"""Factor of the learning rates at a step, counted in batches from 0."""


def make_optimiser(settings: OptimiserSettings, model: EmbeddingModel, loss: nn.Module) -> torch.optim.Optimizer:
    """Groups of the backbone (one per stage with `layer_decay`), of the head and of the loss's own parameters.

    Each group keeps its own rate as `base_lr`; `set_rates` multiplies it at every step.
    """
    rate = settings.learning_rate
    groups = [*_backbone_groups(settings, model), ("head", model.head.parameters(), rate)]
    groups.append(("proxies", loss.parameters(), rate * settings.proxy_factor))
    listed = [
        {"name": name, "params": learning, "lr": own, "base_lr": own}
        for name, parameters, own in groups
        if (learning := [parameter for parameter in parameters if parameter.requires_grad])
    ]
    decay = settings.weight_decay
    if settings.name == "rmsprop":
        # The momentum is that of the benchmark which uses this optimiser, MLRC.
        return torch.optim.RMSprop(listed, lr=rate, weight_decay=decay, eps=settings.eps, momentum=0.9)
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(listed, lr=rate, weight_decay=decay, eps=settings.eps)


def _backbone_groups(settings: OptimiserSettings, model: EmbeddingModel) -> list[tuple[str, list[nn.Parameter], float]]:
    rate, decay = settings.learning_rate, settings.layer_decay
    if decay == 1:
        return [("backbone", list(model.backbone.parameters()), rate)]
    stages = model.stage_parameters()
    # The head learns at the full rate, the last stage one step below it.
    return [
        (f"backbone.{number}", parameters, rate * decay ** (len(stages) - number))
        for number, parameters in enumerate(stages)
    ]


def rate_factor(config: TrainingConfig, steps_per_epoch: int) -> Factor:
    """Returns the schedule of the learning rate: a linear ramp, then constant, cosine or step."""
    schedule, steps = config.schedule, max(1, config.epochs * steps_per_epoch)
    drop = schedule.step_epochs * steps_per_epoch
    ramp = schedule.ramp_epochs * steps_per_epoch
    shapes: dict[str, Factor] = {
        "constant": lambda step: 1.0,
        "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))),
        "step": lambda step: schedule.step_factor ** (step // drop),
    }
    shape = shapes[schedule.kind]
    return lambda step: min(1.0, (step + 1) / ramp if ramp else 1.0) * shape(step)


def set_rates(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Sets the learning rate of every group for the next step."""
    for group in optimiser.param_groups:
        group["lr"] = group["base_lr"] * factor


class MovingAverage:
    """An exponential moving average of a model's weights, which is measured and exported instead of the model."""

    def __init__(self, model: EmbeddingModel, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._decay = decay
        self._updates = 0

    @torch.no_grad()
    def update(self, model: EmbeddingModel) -> None:
        """Moves the average towards the model; faster at first, so that a short run is not held back."""
        self._updates += 1
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        for mean, value in zip(self.model.state_dict().values(), model.state_dict().values(), strict=True):
            if mean.is_floating_point():
                mean.lerp_(value, 1 - decay)
            else:
                mean.copy_(value)

    def state_dict(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "updates": self._updates}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        self._updates = int(state["updates"])  # type: ignore[call-overload]
