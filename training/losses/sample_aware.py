"""What Proxy-ISA and its weights on Proxy-NCA share: proxies, class state, the order of a step, the report."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from training.errors import TrainingError
from training.losses.distributed import gather_batch, ranks
from training.losses.hardness import ClassHardness, HardnessSettings, Thresholds
from training.losses.inputs import check_batch, parse_settings


class Outcome(NamedTuple):
    """The loss of a batch, and what the class state needs to know about it."""

    loss: Tensor
    inputs: Tensor  # unit-length embeddings [m, d]
    inverse_norms: Tensor  # of the proxies [C, 1]
    positives: Tensor  # similarity of each embedding to its own proxy [m]
    damped: Tensor  # 1 where a negative lies below S_outlier [C, m]


class SampleAwareProxyLoss(nn.Module):
    """One proxy a class and weights that follow the class hardness; a subclass turns them into a loss.

    Embeddings are [m, embedding_size], of any length (they are normalised here); labels are [m] in
    0..num_classes-1. A call in training mode is a step: it moves the class state on.
    """

    name: ClassVar[str]
    settings_model: ClassVar[type[HardnessSettings]]

    def __init__(
        self, num_classes: int, embedding_size: int, settings: HardnessSettings | None = None, **changes: Any
    ) -> None:
        super().__init__()
        parsed = parse_settings(self.settings_model, self.name, settings, changes)
        self.proxies = nn.Parameter(torch.empty(num_classes, embedding_size))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")
        self.hardness = ClassHardness(num_classes, embedding_size, parsed)
        self._last: _PairStates | None = None

    def weigh(self, embeddings: Tensor, labels: Tensor, at: Thresholds) -> Outcome:
        """The weighted loss of a batch under the thresholds `at`; changes no state."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        labels = check_batch(embeddings, labels, *self.proxies.shape)
        if self.proxies.dtype not in (torch.float32, torch.float64):
            raise TrainingError(
                f"The loss holds its proxies in {self.proxies.dtype}, too coarse for its exponentials and sums.",
                "Keep the loss in float32; under autocast it accepts embeddings of any precision.",
            )
        embeddings = embeddings.to(self.proxies.dtype)
        if self.training and self.hardness.settings.gather and ranks() > 1:
            self.hardness.join_ranks(self.proxies)
            embeddings, labels = gather_batch(embeddings, labels)
        with torch.autocast(embeddings.device.type, enabled=False):
            at = self.hardness.thresholds()
            outcome = self.weigh(embeddings, labels, at)
            if self.training:
                own_proxies = self.proxies.detach()[labels] * outcome.inverse_norms[labels]
                self.hardness.update(outcome.inputs, labels, outcome.positives, own_proxies, at)
        self._last = _PairStates(outcome.positives, at.learned[labels], at.outlier[labels], outcome.damped)
        return outcome.loss

    @property
    def last_report(self) -> dict[str, float]:
        """Shares of the last batch's pairs: positives that are outliers, informative or easy, and negatives
        below S_outlier. Worked out when read, which waits for the device once."""
        return self._last.shares() if self._last is not None else {}


class _PairStates(NamedTuple):
    positives: Tensor
    learned: Tensor
    outlier: Tensor
    damped: Tensor

    def shares(self) -> dict[str, float]:
        outliers = (self.positives < self.outlier).float().mean()
        easy = (self.positives > self.learned).float().mean()
        classes, batch = self.damped.shape
        damped = self.damped.sum().to(outliers.dtype) / max(1, (classes - 1) * batch)
        values = torch.stack([outliers, 1 - outliers - easy, easy, damped]).tolist()
        return dict(zip(("outlier", "informative", "easy", "damped_negatives"), values, strict=True))
