"""Proxy-Anchor against pytorch-metric-learning's, and its controls against plain loops."""

import math

import pytest
import torch
from pytorch_metric_learning import losses
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from index.errors import LookalikeError
from training.losses.proxy_anchor import ProxyAnchorLoss

CLASSES, SIZE, BATCH = 6, 5, 10


def batch(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=random)
    return torch.randn(BATCH, SIZE, generator=random, dtype=torch.double), labels


def slow_proxy_anchor(
    proxies: Tensor, embeddings: Tensor, labels: list[int], alpha: float, positive_alpha: float, scale: float
) -> Tensor:
    """Computes the paper's Eq. 4 with margin 0.1 pair by pair, its positive term with its own alpha and factor."""
    cosine = [[x @ p / (x.norm() * p.norm()) for p in proxies] for x in embeddings]
    attraction = repulsion = torch.zeros((), dtype=torch.double)
    for c in range(len(proxies)):
        positives = negatives = torch.ones((), dtype=torch.double)
        for i, label in enumerate(labels):
            if label == c:
                positives = positives + torch.exp(-positive_alpha * (cosine[i][c] - 0.1))
            else:
                negatives = negatives + torch.exp(alpha * (cosine[i][c] + 0.1))
        attraction, repulsion = attraction + positives.log(), repulsion + negatives.log()
    return scale * attraction / len(set(labels)) + repulsion / len(proxies)


@pytest.mark.parametrize("only_class", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_its_defaults_it_is_the_librarys(dtype: torch.dtype, only_class: int | None) -> None:
    torch.manual_seed(0)
    loss, library = ProxyAnchorLoss(CLASSES, SIZE).to(dtype), losses.ProxyAnchorLoss(CLASSES, SIZE).to(dtype)
    library.proxies.data.copy_(loss.proxies.data)
    for seed in range(10):
        embeddings, labels = batch(seed)
        labels = labels if only_class is None else torch.full_like(labels, only_class)
        x = embeddings.to(dtype).requires_grad_()
        value, expected = loss(x, labels), library(x, labels)
        torch.testing.assert_close(value, expected)
        gradients = torch.autograd.grad(value, [x, loss.proxies])
        rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-9, 1e-12)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, library.proxies]), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("scale", "positive_alpha"), [(1.0, None), (6.0, None), (0.5, 8.0), (1.0, 64.0)])
def test_the_controls_change_the_positive_term_alone(scale: float, positive_alpha: float | None) -> None:
    torch.manual_seed(1)
    loss = ProxyAnchorLoss(CLASSES, SIZE, alpha=20, positive_scale=scale, positive_alpha=positive_alpha).double()
    for seed in range(5):
        embeddings, labels = batch(seed)
        x = embeddings.requires_grad_()
        value = loss(x, labels)
        expected = slow_proxy_anchor(loss.proxies, x, labels.tolist(), 20.0, positive_alpha or 20.0, scale)
        assert value.item() == pytest.approx(expected.item(), rel=1e-12)
        gradients = torch.autograd.grad(value, [x, loss.proxies])
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, loss.proxies]))


def test_proxies_start_as_in_the_paper() -> None:
    torch.manual_seed(0)
    assert ProxyAnchorLoss(400, 64).proxies.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)


def test_no_step_and_no_diagnosis_waits_for_the_gpu() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        loss = ProxyAnchorLoss(CLASSES, SIZE)
        loss(torch.randn(BATCH, SIZE), torch.zeros(BATCH, dtype=torch.long))
        assert all(figure.device.type == "cuda" for figure in loss.diagnostics().values())


def test_a_bad_setting_is_refused_with_its_value() -> None:
    with pytest.raises(
        LookalikeError, match=r"positive_scale must be .*\(got 0\).*Known settings: margin, alpha, positive_scale"
    ):
        ProxyAnchorLoss(CLASSES, SIZE, positive_scale=0)
