"""Proxy-ISA: Proxy-Anchor whose pairs are weighted by how informative they are to their class.

Equation numbers are those of "Informative Sample-Aware Proxy for Deep Metric Learning" (MMAsia 2022);
docs/loss.md holds the formula, the decisions where the paper is silent, and the cost.
"""

from typing import Any, ClassVar, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.losses.hardness import HardnessSettings, Thresholds
from training.losses.sample_aware import Outcome, SampleAwareProxyLoss

SMALLEST_NORM = 1e-12


class ProxyISASettings(HardnessSettings):
    """Every hyper-parameter of Proxy-ISA."""

    alpha: float = Field(default=32.0, gt=0, description="scale of Proxy-Anchor")
    delta: float = Field(default=0.1, ge=0, description="margin of Proxy-Anchor")


class ProxyISALoss(SampleAwareProxyLoss):
    """`ProxyISALoss(num_classes, embedding_size, settings)`, or `ProxyISASettings` as keyword arguments.

    `loss(embeddings, labels)` is Eq. 13. Its gradient is computed in closed form beside the loss.
    """

    name: ClassVar[str] = "proxy_isa"
    settings_model: ClassVar[type[HardnessSettings]] = ProxyISASettings

    def weigh(self, embeddings: Tensor, labels: Tensor, at: Thresholds) -> Outcome:
        terms = self._terms(embeddings, labels, at)
        loss = _ClosedForm.apply(embeddings, self.proxies, terms)
        return Outcome(loss, terms.inputs, terms.inverse_norms, terms.positives, terms.damped)

    @torch.no_grad()
    def _terms(self, embeddings: Tensor, labels: Tensor, at: Thresholds) -> "_Terms":
        settings = cast(ProxyISASettings, self.hardness.settings)
        norms = torch.linalg.vector_norm(embeddings, dim=1, keepdim=True).clamp_min_(SMALLEST_NORM)
        inputs = embeddings / norms
        lengths = torch.linalg.vector_norm(self.proxies, dim=1, keepdim=True).clamp_min_(SMALLEST_NORM)
        inverse_norms = lengths.reciprocal_()
        # [C, m]: a class is a contiguous row, and scaling it costs less than a copy of normalised proxies.
        similarity = (self.proxies @ inputs.T).mul_(inverse_norms)
        pairs = torch.arange(len(labels), device=labels.device).add_(labels, alpha=len(labels))
        positives = similarity.view(-1)[pairs]
        counts = torch.zeros_like(at.nu).index_add_(0, labels, torch.ones_like(positives))

        weights = self.hardness.positive_weights(positives, labels, at)
        attraction, pull = _positive_term(positives, labels, counts, weights, settings)
        damping = self.hardness.negative_damping(at)
        repulsion, gradient, damped = _negative_term(similarity, pairs, counts, at.outlier, damping, settings)
        gradient.view(-1).index_copy_(0, pairs, pull)
        gradient.mul_(inverse_norms)
        # What the gradient of a proxy has along the proxy itself, which normalising removes.
        radial = similarity.mul_(gradient).sum(1, keepdim=True).mul_(inverse_norms)
        return _Terms(attraction + repulsion, inputs, norms, gradient, radial, inverse_norms, positives, damped)


class _Terms(NamedTuple):
    loss: Tensor
    inputs: Tensor  # unit-length embeddings [m, d]
    norms: Tensor  # of the embeddings [m, 1]
    gradient: Tensor  # dL/dS of each pair over its proxy's norm [C, m]
    radial: Tensor  # [C, 1]
    inverse_norms: Tensor  # of the proxies [C, 1]
    positives: Tensor  # [m]
    damped: Tensor  # [C, m]


def _positive_term(
    positives: Tensor, labels: Tensor, counts: Tensor, weights: Tensor, settings: ProxyISASettings
) -> tuple[Tensor, Tensor]:
    """First term of Eq. 13 and its gradient for each positive pair. Classes without positives add log 1."""
    logits = weights * (settings.delta - positives) * settings.alpha
    shift = torch.zeros_like(counts).scatter_reduce_(0, labels, logits, "amax")
    exponentials = torch.exp(logits - shift[labels])
    totals = torch.exp(-shift).index_add_(0, labels, exponentials)
    divisor = (weights / counts[labels]).sum()
    gradient = exponentials * weights * (-settings.alpha / (totals[labels] * divisor))
    return (totals.log() + shift).sum() / divisor, gradient


def _negative_term(
    similarity: Tensor,
    pairs: Tensor,
    counts: Tensor,
    outlier: Tensor,
    damping: Tensor,
    settings: ProxyISASettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Second term of Eq. 13, its gradient for each pair (0 at positives), and 1 where a negative is damped.

    `pairs` are the flat places of the positives. A class that owns the whole batch has no negatives: it adds
    nothing to the sum, and its mean weight counts as 1, which is how Proxy-Anchor's 1/C treats it.
    """
    negatives = (similarity.shape[1] - counts).clamp_min_(1)
    # The comparison as 0.0 and 1.0, then multiply and add: several times faster than torch.where.
    damped = torch.lt(similarity, outlier[:, None], out=torch.empty_like(similarity))
    damped.view(-1).index_fill_(0, pairs, 0)
    divisor = torch.addcmul(torch.ones_like(damping), damping - 1, damped.sum(1) / negatives).sum()
    scale = (damped * ((damping - 1) * settings.alpha)[:, None]).add_(settings.alpha)
    logits = (similarity + settings.delta).mul_(scale)
    logits.view(-1).index_fill_(0, pairs, -torch.inf)
    shift = logits.amax(1, keepdim=True).clamp_min_(0)
    exponentials = logits.sub_(shift).exp_()
    totals = exponentials.sum(1, keepdim=True).add_(torch.exp(-shift))
    gradient = exponentials.mul_(scale).mul_(1 / (totals * divisor))
    return (totals.log() + shift).sum() / divisor, gradient, damped


class _ClosedForm(torch.autograd.Function):
    """Hands the loss to autograd together with the gradient that was computed beside it."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, proxies: Tensor, terms: _Terms) -> Tensor:
        ctx.save_for_backward(proxies, terms.inputs, terms.norms, terms.gradient, terms.radial)
        return terms.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        proxies, inputs, norms, gradient, radial = ctx.saved_tensors
        to_embeddings = to_proxies = None
        if ctx.needs_input_grad[0]:
            to_inputs = gradient.T @ proxies
            to_inputs -= inputs * torch.linalg.vecdot(inputs, to_inputs)[:, None]
            to_embeddings = to_inputs.mul_(upstream / norms)
        if ctx.needs_input_grad[1]:
            to_proxies = gradient @ (inputs * upstream)
            to_proxies.addcmul_(proxies, radial * upstream, value=-1)
        return to_embeddings, to_proxies, None
