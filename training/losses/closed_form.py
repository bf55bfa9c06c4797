"""Cosines of a batch to all proxies, the two terms of Proxy-Anchor, and their gradient in closed form.

A loss computes its value and dL/dS, the derivative by each pair's cosine S, without autograd; `attach_gradient` hands
both to autograd. That saves most passes over the [C, m] matrix and most of its copies.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MIN_NORM = 1e-12


class Pairs(NamedTuple):
    """A batch of m embeddings against the C proxies."""

    labels: Tensor  # [m]
    inputs: Tensor  # unit-length embeddings [m, d]
    norms: Tensor  # of the embeddings [m, 1]
    inverse_norms: Tensor  # of the proxies [C, 1]
    similarity: Tensor  # cosines [C, m]
    own: Tensor  # flat places of the positive pairs in [C, m]
    positives: Tensor  # cosines of the positive pairs [m]
    counts: Tensor  # positives of each class [C]


class Evaluation(NamedTuple):
    """A value and its derivative by the cosine of each pair: [C, m], or [m] for positives alone."""

    value: Tensor
    slopes: Tensor


class Damping(NamedTuple):
    """Weights of negative pairs: the factor of the class where `where` is 1, and 1 elsewhere."""

    factor: Tensor  # [C]
    where: Tensor  # 0.0 or 1.0 [C, m]


@torch.no_grad()
def compare(embeddings: Tensor, proxies: Tensor, labels: Tensor) -> Pairs:
    """Returns the cosines of the embeddings to all proxies, and what the terms need to know about them."""
    norms = torch.linalg.vector_norm(embeddings, dim=1, keepdim=True).clamp_min_(MIN_NORM)
    inputs = embeddings / norms
    lengths = torch.linalg.vector_norm(proxies, dim=1, keepdim=True).clamp_min_(MIN_NORM)
    inverse_norms = lengths.reciprocal_()
    # [C, m]: a class is a contiguous row, and scaling it costs less than a copy of normalised proxies.
    similarity = (proxies @ inputs.T).mul_(inverse_norms)
    own = torch.arange(len(labels), device=labels.device).add_(labels, alpha=len(labels))
    positives = similarity.view(-1)[own]
    counts = torch.zeros_like(inverse_norms[:, 0]).index_add_(0, labels, torch.ones_like(positives))
    return Pairs(labels, inputs, norms, inverse_norms, similarity, own, positives, counts)


def attract(pairs: Pairs, alpha: float, delta: float, weights: Tensor, *, in_exponent: bool = True) -> Evaluation:
    """Computes the positive term: the mean over the batch's classes of log(1 + sum of exp(alpha (delta - S))).

    A pair's weight multiplies its exponent, or else its slope; the divisor is the sum of the classes' mean weights.
    """
    labels, counts = pairs.labels, pairs.counts
    logits = (delta - pairs.positives) * alpha
    if in_exponent:
        logits = logits * weights
    shift = torch.zeros_like(counts).scatter_reduce_(0, labels, logits, "amax")
    exponentials = torch.exp(logits - shift[labels])
    totals = torch.exp(-shift).index_add_(0, labels, exponentials)
    shares = weights / counts[labels]
    divisor = shares.sum()
    # A class without positives adds log 1.
    values = totals.log() + shift
    if not in_exponent:
        values = values * torch.zeros_like(counts).index_add_(0, labels, shares)
    return Evaluation(values.sum() / divisor, exponentials * weights * (-alpha / (totals[labels] * divisor)))


def repel(
    pairs: Pairs, alpha: float, delta: float, damping: Damping | None = None, *, in_exponent: bool = True
) -> Evaluation:
    """Computes the negative term: the mean over all classes of log(1 + sum of exp(alpha (delta + S))).

    Weights act as in `attract`. The slopes of positive pairs are 0. A class that has the whole batch has no
    negatives: it adds nothing to the sum, and its mean weight counts as 1, which is how Proxy-Anchor's 1/C treats it.
    """
    means, scale = torch.ones_like(pairs.counts), None
    if damping is not None:
        negatives = (len(pairs.labels) - pairs.counts).clamp_min_(1)
        means.addcmul_(damping.factor - 1, damping.where.sum(1) / negatives)
        # Multiply and add: several times faster than torch.where.
        scale = (damping.where * ((damping.factor - 1) * alpha)[:, None]).add_(alpha)
    logits = (pairs.similarity + delta).mul_(alpha if scale is None or not in_exponent else scale)
    logits.view(-1).index_fill_(0, pairs.own, -torch.inf)
    shift = logits.amax(1, keepdim=True).clamp_min_(0)
    exponentials = logits.sub_(shift).exp_()
    totals = exponentials.sum(1, keepdim=True).add_(torch.exp(-shift))
    divisor = means.sum()
    slopes = exponentials.mul_(alpha / (totals * divisor) if scale is None else 1 / (totals * divisor))
    if scale is not None:
        slopes.mul_(scale)
    values = (totals.log() + shift).squeeze(1)
    if not in_exponent:
        values = values * means
    return Evaluation(values.sum() / divisor, slopes)


def add_terms(pairs: Pairs, attraction: Evaluation, repulsion: Evaluation) -> Evaluation:
    """Adds the two terms; the slopes of the repulsion become those of all pairs."""
    repulsion.slopes.view(-1).index_copy_(0, pairs.own, attraction.slopes)
    return Evaluation(attraction.value + repulsion.value, repulsion.slopes)


def attach_gradient(embeddings: Tensor, proxies: Tensor, pairs: Pairs, evaluation: Evaluation) -> Tensor:
    """Returns the value as a tensor whose gradient is that of the slopes.

    Overwrites `pairs.similarity`, and divides the slopes by the norms of their proxies: the product of the slopes
    and the raw proxies is then the derivative by the unit embeddings.
    """
    loss: Tensor = _ClosedForm.apply(embeddings, proxies, pairs, evaluation)
    return loss


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, proxies: Tensor, pairs: Pairs, evaluation: Evaluation) -> Tensor:
        slopes = evaluation.slopes.mul_(pairs.inverse_norms)
        # What the gradient of a proxy has along the proxy itself, which normalising removes.
        radial = pairs.similarity.mul_(slopes).sum(1, keepdim=True).mul_(pairs.inverse_norms)
        ctx.save_for_backward(proxies, pairs.inputs, pairs.norms, slopes, radial)
        return evaluation.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        proxies, inputs, norms, slopes, radial = ctx.saved_tensors
        to_embeddings = to_proxies = None
        if ctx.needs_input_grad[0]:
            to_inputs = slopes.T @ proxies
            to_inputs -= inputs * torch.linalg.vecdot(inputs, to_inputs)[:, None]
            to_embeddings = to_inputs.mul_(upstream / norms)
        if ctx.needs_input_grad[1]:
            to_proxies = slopes @ (inputs * upstream)
            to_proxies.addcmul_(proxies, radial * upstream, value=-1)
        return to_embeddings, to_proxies, None, None
