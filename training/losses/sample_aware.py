"""The base of Proxy-ISA and of its weights on Proxy-NCA: the class state, the order of a step, the diagnostics."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from training.losses.base import ProxyLoss
from training.losses.class_state import ClassHardness, HardnessSettings, Thresholds
from training.losses.closed_form import Damping, Evaluation, Pairs
from training.losses.gather import gather_batch, ranks
from training.losses.validation import parse_settings


class SampleAwareProxyLoss(ProxyLoss):
    """A proxy loss with weights that follow the class hardness; a call in training mode updates the class state."""

    name: ClassVar[str]
    settings_model: ClassVar[type[HardnessSettings]]

    def __init__(
        self, num_classes: int, embedding_size: int, settings: HardnessSettings | None = None, **changes: Any
    ) -> None:
        parsed = parse_settings(self.settings_model, self.name, settings, changes)
        super().__init__(num_classes, embedding_size)
        self.hardness = ClassHardness(num_classes, embedding_size, parsed)
        self._weights: _Weights | None = None

    def weigh(self, pairs: Pairs, positive_weights: Tensor, damping: Damping) -> Evaluation:
        """Returns the weighted loss of a batch and its slopes; changes no state."""
        raise NotImplementedError

    def join_ranks(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not (self.training and self.hardness.settings.gather and ranks() > 1):
            return embeddings, labels
        self.hardness.join_ranks(self.proxies)
        return gather_batch(embeddings, labels)

    def evaluate(self, pairs: Pairs) -> Evaluation:
        labels, at = pairs.labels, self.hardness.thresholds()
        weights = self.hardness.positive_weights(pairs.positives, labels, at)
        # The comparison as 0.0 and 1.0, which the terms multiply with.
        below = torch.lt(pairs.similarity, at.outlier[:, None], out=torch.empty_like(pairs.similarity))
        below.view(-1).index_fill_(0, pairs.own, 0)
        damping = Damping(self.hardness.negative_damping(at), below)
        evaluation = self.weigh(pairs, weights, damping)
        if self.training:
            own_proxies = self.proxies[labels] * pairs.inverse_norms[labels]
            self.hardness.update(pairs.inputs, labels, pairs.positives, own_proxies, at)
        self._weights = _Weights(at, weights, damping)
        return evaluation

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """Adds thresholds, weights, and shares of the batch's pairs: positives that are outliers, informative or
        easy, and negatives below S_outlier. Thresholds are those of the step, S_avg is of the queue after it."""
        figures = super().diagnostics()
        if self._last is None or self._weights is None:
            return figures
        at, weights, damping = self._weights
        labels, positives = self._last.labels, self._last.positives
        outliers = (positives < at.outlier[labels]).to(positives.dtype).mean()
        easy = (positives > at.learned[labels]).to(positives.dtype).mean()
        negatives = max(1, (len(self.proxies) - 1) * len(labels))
        below = damping.where.sum(1)
        if self.hardness.steps > self.hardness.settings.first_queue_step:
            figures["s_avg"] = self.hardness.queue_similarity(normalize(self.proxies))
        if self.hardness.settings.positive_penalty != "none":
            figures["sigma"] = self.hardness.penalty(at.effective, at.nu).mean()
        return figures | {
            "s_learned": at.learned.mean(),
            "s_outlier": at.outlier.mean(),
            "weight_positive": weights.mean(),
            "weight_negative": 1 + torch.dot(below, damping.factor - 1) / negatives,
            "outlier": outliers,
            "informative": 1 - outliers - easy,
            "easy": easy,
            "damped_negatives": below.sum() / negatives,
        }


class _Weights(NamedTuple):
    at: Thresholds
    positive: Tensor
    damping: Damping
