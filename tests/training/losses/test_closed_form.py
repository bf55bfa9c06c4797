"""The closed form against autograd on the formula of Proxy-Anchor."""

import pytest
import torch
from torch.nn.functional import normalize

from training.losses.closed_form import Damping, add_terms, attach_gradient, attract, compare, repel

CLASSES, SIZE, BATCH = 5, 4, 7
ALPHA, DELTA = 8.0, 0.1


@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_equal_autograd(weighted: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    embeddings = torch.randn(BATCH, SIZE, dtype=torch.double, generator=generator, requires_grad=True)
    proxies = torch.randn(CLASSES, SIZE, dtype=torch.double, generator=generator, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 4])
    positive = torch.linspace(0.5, 2, BATCH, dtype=torch.double) if weighted else torch.ones(BATCH, dtype=torch.double)
    factor = torch.full((CLASSES,), 0.3 if weighted else 1.0, dtype=torch.double)
    damped = (torch.rand(CLASSES, BATCH, dtype=torch.double, generator=generator) < 0.5).double()
    own = torch.nn.functional.one_hot(labels, CLASSES).T.bool()
    damped[own] = 0

    with torch.no_grad():
        pairs = compare(embeddings, proxies, labels)
        attraction = attract(pairs, ALPHA, DELTA, positive)
        evaluation = add_terms(pairs, attraction, repel(pairs, ALPHA, DELTA, Damping(factor, damped)))
    value = attach_gradient(embeddings, proxies, pairs, evaluation)
    found = torch.autograd.grad(value, [embeddings, proxies])

    cosine = normalize(proxies) @ normalize(embeddings).T
    weights = torch.where(own, positive, 1 + (factor[:, None] - 1) * damped)
    pull = torch.where(own, weights * ALPHA * (DELTA - cosine), -torch.inf)
    push = torch.where(own, -torch.inf, weights * ALPHA * (DELTA + cosine))
    zero = torch.zeros(CLASSES, 1, dtype=torch.double)
    terms = [torch.logsumexp(torch.cat([zero, logits], 1), 1) for logits in (pull, push)]
    present = own.any(1)
    divisors = [
        torch.stack([weights[c, own[c]].mean() for c in range(CLASSES) if present[c]]).sum(),
        torch.stack([weights[c, ~own[c]].mean() for c in range(CLASSES)]).sum(),
    ]
    expected = terms[0].sum() / divisors[0] + terms[1].sum() / divisors[1]
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    for gradient, right in zip(found, torch.autograd.grad(expected, [embeddings, proxies]), strict=True):
        torch.testing.assert_close(gradient, right)
