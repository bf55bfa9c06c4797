"""The base of our proxy losses: the proxies, the checks of a batch, and the diagnostics of a step."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from training.errors import TrainingError
from training.losses.closed_form import Evaluation, Pairs, attach_gradient, compare
from training.losses.validation import check_batch

MAX_SAMPLED_PAIRS = 2**16
"""Negative pairs that the quantiles of a diagnosis are taken from, up to one more row of the batch's size."""


def draw_proxies(num_classes: int, embedding_size: int, per_class: int = 1) -> Tensor:
    """Draws the proxies of every class, those of a class next to each other: normal, variance 2 / num_classes.

    That is Kaiming's normal initialisation by fan out of [num_classes, embedding_size], which Proxy-Anchor uses. Every
    loss takes it, whatever its number of proxies per class, so that one learning rate suits all.
    """
    return torch.empty(num_classes * per_class, embedding_size).normal_(0, math.sqrt(2 / num_classes))


class ProxyLoss(nn.Module):
    """One proxy per class; a subclass turns the cosines of a batch into a value and its derivative by each cosine.

    Embeddings are [m, embedding_size], of any length (they are normalised here); labels are [m] in
    0..num_classes-1.
    """

    def __init__(self, num_classes: int, embedding_size: int) -> None:
        super().__init__()
        self.proxies = nn.Parameter(draw_proxies(num_classes, embedding_size))
        self._last: _LastBatch | None = None

    def evaluate(self, pairs: Pairs) -> Evaluation:
        """Returns the loss of a batch and its slopes, without autograd."""
        raise NotImplementedError

    def join_ranks(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the batch that the loss is computed of; a loss with a state joins those of all processes."""
        return embeddings, labels

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        labels = check_batch(embeddings, labels, *self.proxies.shape)
        if self.proxies.dtype not in (torch.float32, torch.float64):
            raise TrainingError(
                f"The loss holds its proxies in {self.proxies.dtype}, too coarse for its exponentials and sums.",
                "Keep the loss in float32; under autocast it accepts embeddings of any precision.",
            )
        embeddings, labels = self.join_ranks(embeddings.to(self.proxies.dtype), labels)
        with torch.autocast(embeddings.device.type, enabled=False):
            with torch.no_grad():
                pairs = compare(embeddings, self.proxies, labels)
                evaluation = self.evaluate(pairs)
            self._last = _LastBatch(labels, pairs.inputs, pairs.own, pairs.positives, evaluation.slopes)
            return attach_gradient(embeddings, self.proxies, pairs, evaluation)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """Describes the last batch by scalars on the device; call it before the optimiser changes the proxies.

        Computed only here, without synchronisation with the device. The gradients are norms over the batch of the
        derivative by the unit embeddings, through the positive and through the negative pairs.
        """
        if self._last is None:
            return {}
        last = self._last
        own_slopes = last.slopes.view(-1)[last.own]
        others = last.slopes.clone()
        others.view(-1).index_fill_(0, last.own, 0)
        figures = _quantiles("own_cosine", last.positives)
        if len(self.proxies) > 1:
            figures |= _quantiles("other_cosine", self._other_cosines(last))
        return figures | {
            "gradient_positive": torch.linalg.vector_norm(own_slopes[:, None] * self.proxies[last.labels]),
            "gradient_negative": torch.linalg.vector_norm(others.T @ self.proxies),
        }

    def _other_cosines(self, last: "_LastBatch") -> Tensor:
        """Returns cosines to proxies of other classes, of every k-th class where there are many; NaN at positives."""
        step = math.ceil(len(self.proxies) * len(last.labels) / MAX_SAMPLED_PAIRS)
        classes = torch.arange(0, len(self.proxies), step, device=last.labels.device)
        cosines = normalize(self.proxies[::step]) @ last.inputs.T
        return cosines.masked_fill_(classes[:, None] == last.labels, torch.nan)


class _LastBatch(NamedTuple):
    labels: Tensor
    inputs: Tensor
    own: Tensor
    positives: Tensor
    slopes: Tensor  # over the norms of the proxies


def _quantiles(name: str, values: Tensor) -> dict[str, Tensor]:
    """Returns the 10, 50 and 90 % quantiles of the values that are not NaN."""
    at = torch.linspace(0.1, 0.9, 3, dtype=values.dtype, device=values.device)
    low, middle, high = torch.nanquantile(values.flatten(), at).unbind()
    return {f"{name}_p10": low, f"{name}_p50": middle, f"{name}_p90": high}
