"""The adaptive weights on Proxy-NCA."""

import pytest
import torch
from pytorch_metric_learning.losses import ProxyNCALoss
from torch.nn.functional import cosine_similarity

from training.losses.proxy_nca_isa import ProxyNCAISALoss


def test_with_every_weight_one_it_is_proxy_nca() -> None:
    torch.manual_seed(0)
    loss = ProxyNCAISALoss(6, 5, queue_start=0, filter_start=0, positive_penalty="none", negative_penalty="none")
    theirs = ProxyNCALoss(6, 5, softmax_scale=9).double()
    loss.double()
    theirs.proxies.data.copy_(loss.proxies.data)
    x = torch.randn(9, 5, dtype=torch.double, requires_grad=True)
    labels = torch.randint(0, 6, (9,))
    ours, expected = loss(x, labels), theirs(x, labels)
    assert ours.item() == pytest.approx(expected.item())
    gradients = torch.autograd.grad(ours, [x, loss.proxies])
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, theirs.proxies]))


def test_weights_multiply_the_logits_of_their_pairs() -> None:
    torch.manual_seed(2)
    loss = ProxyNCAISALoss(4, 3, queue_start=0, filter_start=0, queue_size=50, volume=5.0).double()
    data = [(torch.randn(8, 3, dtype=torch.double), torch.randint(0, 4, (8,))) for _ in range(10)]
    for embeddings, labels in data:
        loss(embeddings, labels)
    loss.eval()
    embeddings, labels = data[0]
    at = loss.hardness.thresholds()
    numerator, weights_of_positives, damped = 0.0, 0.0, 0
    for x, label in zip(embeddings, labels.tolist(), strict=True):
        logits = []
        for c in range(4):
            s = cosine_similarity(x, loss.proxies[c], dim=0).detach()
            if c == label:
                weight = loss.hardness.positive_weights(s[None], torch.tensor([c]), at).item()
                weights_of_positives += weight
            else:
                below = bool(s < at.outlier[c])
                damped += below
                weight = 1 / max(1.0, at.effective[c].item()) if below else 1.0
            logits.append(18 * weight * s)
        numerator += (torch.logsumexp(torch.stack(logits), 0) - logits[label]).item()
    assert damped > 0
    assert loss(embeddings, labels).item() == pytest.approx(numerator / weights_of_positives)
    assert loss.diagnostics()["damped_negatives"].item() == pytest.approx(damped / 24)


def test_the_gradient_is_right_by_finite_differences() -> None:
    torch.manual_seed(2)
    loss = ProxyNCAISALoss(4, 3, queue_start=0, filter_start=0, queue_size=50, volume=5.0).double()
    labels = torch.randint(0, 4, (8,))
    for _ in range(10):
        loss(torch.randn(8, 3, dtype=torch.double), labels)
    loss.eval()
    x = torch.randn(8, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: 3 * loss(x, labels), (x, loss.proxies), atol=1e-7)
