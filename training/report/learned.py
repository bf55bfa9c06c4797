"""Reads the loss's state from a checkpoint: its proxies, and how far Proxy-ISA has learned each class."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from training.config import TrainingConfig
from training.losses.class_state import ClassHardness, HardnessSettings

_ROWS, _COLUMNS = ("proxies", "loss.proxies"), ("loss.W", "loss.fc")
"""Where losses keep the vectors of the classes: one per row, or one per column."""
_SEVERAL = ("soft_triple", "proxy_gml")
"""Losses with several proxies per class, those of a class next to each other."""

Floats = NDArray[np.float32]


def read_proxies(loss_state: dict[str, Any]) -> Floats | None:
    """Returns the loss's proxies as unit vectors, grouped by class; None for a loss on pairs."""
    for name, value in loss_state.items():
        if name in _ROWS or name in _COLUMNS:
            rows = value if name in _ROWS else value.T
            proxies: Floats = normalize(rows.float()).numpy()
            return proxies
    return None


def proxy_owners(config: TrainingConfig, proxies: int, classes: int) -> list[int] | None:
    """Returns the class number of each proxy; None when the run cannot have learned that many classes."""
    each, rest = divmod(proxies, classes)
    if rest or each < 1 or (each > 1 and config.loss.name not in _SEVERAL):
        return None
    return [proxy // each for proxy in range(proxies)]


class Decay(NamedTuple):
    """The paper's decay functions over n, the clean samples of a class."""

    samples: list[float]
    nu: list[float]
    sigma: list[float]
    inverse: list[float]


class LearnedClasses(NamedTuple):
    """The state of Proxy-ISA's classes at the newest checkpoint, one value for each class."""

    settings: HardnessSettings
    seen: Floats
    learned: Floats
    outlier: Floats
    effective: Floats
    decay: Decay


def learned_classes(config: TrainingConfig, loss_state: dict[str, Any]) -> LearnedClasses | None:
    """Returns the state of the classes; None for a loss that does not weigh its pairs by what was learned."""
    if "hardness.seen" not in loss_state:
        return None
    # Counters and thresholds depend neither on the schedule nor on the queue: neither is rebuilt here.
    known = {name: value for name, value in config.loss.settings.items() if name in HardnessSettings.model_fields}
    # V as the run used it: without a setting it follows from the planned samples.
    state = loss_state.get("hardness._extra_state", {})
    used = {"volume": state["volume"]} if "volume" in state else {}
    settings = HardnessSettings(**known | used | {"queue_size": 1, "queue_start": 0, "filter_start": 0})
    seen: Tensor = loss_state["hardness.seen"]
    hardness = ClassHardness(len(seen), 1, settings)
    hardness.seen.copy_(seen)
    hardness.learned.copy_(loss_state["hardness.learned"])
    at = hardness.thresholds()
    until = max(1.25 * settings.half_decay_samples(), 1.1 * float(seen.max()), 2.0)
    return LearnedClasses(
        settings=settings,
        seen=seen.float().numpy(),
        learned=at.learned.numpy(),
        outlier=at.outlier.numpy(),
        effective=at.effective.numpy(),
        decay=_decay(settings, until),
    )


def _decay(settings: HardnessSettings, until: float) -> Decay:
    """Evaluates the functions with the loss's own code, one class per value of n."""
    samples = torch.from_numpy(np.unique(np.linspace(0, until, 161).round().astype(np.int64)))
    paper = settings.model_copy(update={"positive_penalty": "sigma", "negative_penalty": "inverse"})
    hardness = ClassHardness(len(samples), 1, paper)
    hardness.seen.copy_(samples)
    at = hardness.thresholds()
    # A similarity above every S_learned: its weight is the penalty alone.
    easy = torch.full_like(at.nu, 2.0)
    sigma = hardness.positive_weights(easy, torch.arange(len(samples)), at)
    return Decay(samples.tolist(), at.nu.tolist(), sigma.tolist(), hardness.negative_damping(at).tolist())
