"""Diagnostics of the proxy losses against plain computations."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from training.losses.base import MAX_SAMPLED_PAIRS, ProxyLoss
from training.losses.proxy_anchor import ProxyAnchorLoss
from training.losses.proxy_isa import ProxyISAGradientLoss, ProxyISALoss
from training.losses.proxy_nca_isa import ProxyNCAISALoss
from training.losses.sample_aware import SampleAwareProxyLoss

CLASSES, SIZE, BATCH = 6, 5, 12
NARROW: dict[str, Any] = {"hardness_scale": 0.9, "hardness_sensitivity": 0.1, "search_margin": 0.0, "volume": 12.0}
"""A search range in which outliers and damped negatives soon turn up."""
COSINES = {f"{whose}_cosine_p{share}" for whose in ("own", "other") for share in (10, 50, 90)}
GRADIENTS = {"gradient_positive", "gradient_negative"}
STATE = {"s_avg", "s_learned", "s_outlier", "sigma", "weight_positive", "weight_negative"}
SHARES = {"outlier", "informative", "easy", "damped_negatives"}


def trained(kind: type[SampleAwareProxyLoss], **changes: Any) -> tuple[SampleAwareProxyLoss, Tensor, Tensor]:
    """Returns a loss after some steps, and its next batch."""
    torch.manual_seed(4)
    schedule: dict[str, Any] = {"queue_start": 0, "filter_start": 0, "queue_size": 50}
    loss = kind(CLASSES, SIZE, **schedule | NARROW | changes).double()
    centres = torch.randn(CLASSES, SIZE, dtype=torch.double)

    def draw() -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, CLASSES, (BATCH,))
        return centres[labels] + torch.randn(BATCH, SIZE, dtype=torch.double), labels

    for _ in range(25):
        loss(*draw())
    return loss, *draw()


def cosines(loss: ProxyLoss, embeddings: Tensor) -> Tensor:
    return normalize(embeddings) @ normalize(loss.proxies.detach()).T


def weights_of(loss: SampleAwareProxyLoss, cosine: Tensor, labels: Tensor) -> Tensor:
    """Returns the weight of each pair [m, C] before the step."""
    at = loss.hardness.thresholds()
    weights = torch.ones_like(cosine)
    for i, label in enumerate(labels.tolist()):
        for c in range(CLASSES):
            if c == label:
                own = loss.hardness.positive_weights(cosine[i, c][None], labels[i][None], at)
                weights[i, c] = own.item()
            elif cosine[i, c] < at.outlier[c]:
                weights[i, c] = 1 / max(1.0, at.effective[c].item())
    return weights


def slopes_of(loss: ProxyLoss, cosine: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """dL/dS of each pair [m, C], from the loss's formula by autograd."""
    s = cosine.clone().requires_grad_()
    own = torch.nn.functional.one_hot(labels, CLASSES).bool()
    inside = torch.ones_like(weights) if isinstance(loss, ProxyISAGradientLoss) else weights
    mean_positive = [weights[own[:, c], c].mean() for c in range(CLASSES) if own[:, c].any()]
    mean_negative = [weights[~own[:, c], c].mean() for c in range(CLASSES)]
    if isinstance(loss, ProxyNCAISALoss):
        logits = 18 * weights * s
        value = (torch.logsumexp(logits, 1) - logits[own]).sum() / weights[own].sum()
    else:
        terms = torch.zeros((), dtype=torch.double)
        for c in range(CLASSES):
            attraction = torch.exp(inside * 32 * (0.1 - s))[own[:, c], c].sum()
            repulsion = torch.exp(inside * 32 * (0.1 + s))[~own[:, c], c].sum()
            terms = terms + torch.log(1 + attraction) / sum(mean_positive)
            terms = terms + torch.log(1 + repulsion) / sum(mean_negative)
        value = terms
    (slopes,) = torch.autograd.grad(value, s)
    return slopes * weights if isinstance(loss, ProxyISAGradientLoss) else slopes


def expected_cosines_and_gradients(
    cosine: Tensor, labels: Tensor, slopes: Tensor, unit_proxies: Tensor
) -> dict[str, float]:
    own = torch.nn.functional.one_hot(labels, CLASSES).bool()
    figures = {}
    for name, values in (("own", cosine[own]), ("other", cosine[~own])):
        for share in (10, 50, 90):
            figures[f"{name}_cosine_p{share}"] = float(np.quantile(values.numpy(), share / 100))
    figures["gradient_positive"] = ((slopes * own) @ unit_proxies).norm().item()
    figures["gradient_negative"] = ((slopes * ~own) @ unit_proxies).norm().item()
    return figures


@pytest.mark.parametrize("kind", [ProxyISALoss, ProxyISAGradientLoss, ProxyNCAISALoss])
def test_a_weighting_loss_reports_its_state_weights_and_gradients(kind: type[SampleAwareProxyLoss]) -> None:
    loss, embeddings, labels = trained(kind)
    cosine, unit_proxies = cosines(loss, embeddings), normalize(loss.proxies.detach())
    at, weights = loss.hardness.thresholds(), weights_of(loss, cosine, labels)
    own = torch.nn.functional.one_hot(labels, CLASSES).bool()
    sigma = [loss.hardness.penalty(at.effective[c], at.nu[c]).item() for c in range(CLASSES)]
    expected = expected_cosines_and_gradients(cosine, labels, slopes_of(loss, cosine, labels, weights), unit_proxies)
    loss(embeddings, labels).backward()
    figures = loss.diagnostics()

    assert set(figures) == COSINES | GRADIENTS | STATE | SHARES
    assert all(figure.shape == () and not figure.requires_grad for figure in figures.values())
    queued = [
        (loss.hardness.queue[loss.hardness.queue_labels == c] @ unit_proxies[c]).mean().item() for c in range(CLASSES)
    ]
    expected |= {
        "s_avg": float(np.mean(queued)),
        "s_learned": at.learned.mean().item(),
        "s_outlier": at.outlier.mean().item(),
        "sigma": float(np.mean(sigma)),
        "weight_positive": weights[own].mean().item(),
        "weight_negative": weights[~own].mean().item(),
        "outlier": (cosine[own] < at.outlier[labels]).double().mean().item(),
        "easy": (cosine[own] > at.learned[labels]).double().mean().item(),
        "damped_negatives": (cosine < at.outlier)[~own].double().mean().item(),
    }
    expected["informative"] = 1 - expected["outlier"] - expected["easy"]
    assert {name: figure.item() for name, figure in figures.items()} == pytest.approx(expected)
    assert 0 < expected["outlier"] < 1 and 0 < expected["damped_negatives"] < 1, "the data must bring about both"


def test_proxy_anchor_reports_cosines_and_gradients() -> None:
    torch.manual_seed(0)
    loss = ProxyAnchorLoss(CLASSES, SIZE).double()
    assert loss.diagnostics() == {}
    embeddings, labels = torch.randn(BATCH, SIZE, dtype=torch.double), torch.randint(0, CLASSES, (BATCH,))
    loss(embeddings, labels)
    cosine = cosines(loss, embeddings)
    slopes = slopes_of(loss, cosine, labels, torch.ones_like(cosine))
    expected = expected_cosines_and_gradients(cosine, labels, slopes, normalize(loss.proxies.detach()))
    assert {name: figure.item() for name, figure in loss.diagnostics().items()} == pytest.approx(expected)


def test_figures_that_do_not_apply_are_absent() -> None:
    early, embeddings, labels = trained(ProxyISALoss, queue_start=1000, filter_start=1000, positive_penalty="none")
    early(embeddings, labels)
    assert set(early.diagnostics()) == (COSINES | GRADIENTS | STATE | SHARES) - {"s_avg", "sigma"}
    alone = ProxyAnchorLoss(1, SIZE)
    alone(torch.randn(4, SIZE), torch.zeros(4, dtype=torch.long))
    assert not any(name.startswith("other") for name in alone.diagnostics())


def test_many_classes_are_sampled_evenly_and_without_touching_the_random_numbers() -> None:
    torch.manual_seed(0)
    classes, batch = 3000, 64
    loss = ProxyAnchorLoss(classes, SIZE)
    embeddings, labels = torch.randn(batch, SIZE), torch.randint(0, classes, (batch,))
    loss(embeddings, labels)
    state = torch.get_rng_state()
    figures = loss.diagnostics()
    assert torch.equal(torch.get_rng_state(), state)
    assert classes * batch > 2 * MAX_SAMPLED_PAIRS
    sampled = cosines(loss, embeddings)[:, ::3]
    others = sampled[torch.arange(0, classes, 3) != labels[:, None]]
    for share in (10, 50, 90):
        assert figures[f"other_cosine_p{share}"].item() == pytest.approx(np.quantile(others, share / 100), abs=1e-6)
