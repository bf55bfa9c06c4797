"""ProxyGML against its paper in plain loops."""

import math

import pytest
import torch
from torch import Tensor

from index.errors import LookalikeError
from training.losses.proxy_gml import ProxyGMLLoss, ProxyGMLSettings

CLASSES, SIZE = 5, 4


def slow_proxy_gml(loss: ProxyGMLLoss, embeddings: Tensor, labels: list[int]) -> Tensor:
    settings, each = loss.settings, loss.settings.proxies_per_class
    proxies = [p / p.norm() for p in loss.proxies]
    owner = [index // each for index in range(len(proxies))]
    size = math.ceil(settings.subgraph_share * CLASSES * each)
    total = torch.zeros((), dtype=torch.double)
    for x, label in zip(embeddings, labels, strict=True):
        similarity = [x @ p / x.norm() for p in proxies]
        others = sorted((j for j in range(len(proxies)) if owner[j] != label), key=lambda j: -similarity[j].item())
        chosen = [j for j in range(len(proxies)) if owner[j] == label] + others[: size - each]
        scores = {c: sum(similarity[j] for j in chosen if owner[j] == c) for c in {owner[j] for j in chosen}}
        total = total - torch.as_tensor(scores[label]) + torch.logsumexp(torch.stack(list(scores.values())), 0)
    regularisation = torch.zeros((), dtype=torch.double)
    for j, p in enumerate(proxies):
        scores_of_proxy = [
            torch.stack([p @ q for k, q in enumerate(proxies) if owner[k] == c]).sum() for c in range(CLASSES)
        ]
        regularisation = regularisation - scores_of_proxy[owner[j]] + torch.logsumexp(torch.stack(scores_of_proxy), 0)
    return total / len(labels) + settings.proxy_regularisation * regularisation / len(proxies)


@pytest.mark.parametrize(("each", "share", "weight"), [(3, 0.5, 0.3), (1, 0.4, 0.0), (2, 1.0, 0.7), (4, 0.33, 0.3)])
def test_it_equals_the_paper_in_plain_loops(each: int, share: float, weight: float) -> None:
    torch.manual_seed(each)
    settings = ProxyGMLSettings(proxies_per_class=each, subgraph_share=share, proxy_regularisation=weight)
    loss = ProxyGMLLoss(CLASSES, SIZE, settings).double()
    x = torch.randn(7, SIZE, dtype=torch.double, requires_grad=True)
    labels = torch.randint(0, CLASSES, (7,))
    value, expected = loss(x, labels), slow_proxy_gml(loss, x, labels.tolist())
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    ours = torch.autograd.grad(value, [x, loss.proxies])
    torch.testing.assert_close(ours, torch.autograd.grad(expected, [x, loss.proxies]))


def test_a_subgraph_without_other_classes_is_refused() -> None:
    with pytest.raises(LookalikeError, match=r"holds no proxy of another class.*above 0.05"):
        ProxyGMLLoss(20, SIZE, ProxyGMLSettings())
