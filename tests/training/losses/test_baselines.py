"""Fair terms for the losses that Proxy-ISA is compared with."""

import math
from typing import Any

import pytest
import torch
from pytorch_metric_learning.regularizers import SparseCentersRegularizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from index.errors import LookalikeError
from training.losses.registry import learns_from_pairs, loss_names, make_loss

SPECIAL: dict[str, dict[str, Any]] = {
    name: {"steps_per_epoch": 1, "queue_size": 10} for name in ("proxy_isa", "proxy_isa_gradient", "proxy_nca_isa")
}
WITH_PROXIES = [name for name in loss_names() if not learns_from_pairs(name)]
ONE_PER_CLASS = [name for name in WITH_PROXIES if name not in ("soft_triple", "proxy_gml")]


def make(name: str, classes: int, size: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make_loss(name, classes, size, SPECIAL.get(name, {}))


def proxies_of(loss: nn.Module, size: int) -> Tensor:
    """Returns one proxy per row, wherever the loss keeps them."""
    (weights,) = loss.parameters()
    return weights.detach() if weights.shape[1] == size else weights.detach().T


def test_losses_on_pairs_are_those_without_proxies() -> None:
    on_pairs = {"margin", "multi_similarity", "multi_similarity_miner", "triplet", "contrastive", "n_pair"}
    assert {name for name in loss_names() if learns_from_pairs(name)} == on_pairs
    with pytest.raises(LookalikeError, match="'tripplet'"):
        learns_from_pairs("tripplet")


@pytest.mark.parametrize("name", WITH_PROXIES)
def test_all_proxies_start_with_the_same_spread(name: str) -> None:
    proxies = proxies_of(make(name, 100, 512), 512)
    assert proxies.std().item() == pytest.approx(math.sqrt(2 / 100), rel=0.01)
    assert abs(proxies.mean().item()) < 3e-3


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_equal_seeds_draw_equal_proxies_for_every_loss(name: str) -> None:
    assert torch.equal(proxies_of(make(name, 40, 30), 30), proxies_of(make("proxy_isa", 40, 30), 30))


def test_one_learning_rate_turns_the_proxies_of_every_loss_by_about_the_same_angle() -> None:
    labels = torch.arange(100).repeat_interleave(2)[:128]
    torch.manual_seed(1)
    embeddings = torch.randn(len(labels), 512)
    turns = {}
    for name in WITH_PROXIES:
        loss = make(name, 100, 512)
        before = proxies_of(loss, 512).clone()
        optimiser = torch.optim.Adam(loss.parameters(), lr=1e-2)
        loss(embeddings, labels).backward()
        optimiser.step()
        cosine = (normalize(before.double()) * normalize(proxies_of(loss, 512).double())).sum(1)
        turns[name] = math.degrees(math.acos(cosine.min().item()))
    assert len(turns) == 10
    assert min(turns.values()) > 3.8 and max(turns.values()) < 4.6, turns


@pytest.mark.parametrize("name", [name for name in loss_names() if name != "n_pair"])
def test_the_length_of_an_embedding_does_not_matter(name: str) -> None:
    torch.manual_seed(3)
    embeddings, labels = torch.randn(24, 16).double(), torch.arange(30).repeat_interleave(2)[:24]
    lengths = torch.linspace(0.1, 40, 24, dtype=torch.double)[:, None]
    values, directions = [], []
    for inputs in (normalize(embeddings), normalize(embeddings) * lengths):
        loss, x = make(name, 30, 16).double(), inputs.requires_grad_()
        torch.manual_seed(5)  # The distance-weighted miner draws.
        value = loss(x, labels)
        value.backward()
        values.append(value.item())
        assert x.grad is not None
        directions.append(x.grad * x.detach().norm(dim=1, keepdim=True))
    assert values[0] > 0 and values[0] == pytest.approx(values[1], rel=1e-6)
    torch.testing.assert_close(directions[0], directions[1], rtol=1e-5, atol=1e-7)


def test_n_pair_is_the_softmax_of_the_dot_products_of_vectors_as_they_come() -> None:
    loss = make("n_pair", 4, 8)
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    x = 3 * torch.cat([first, second])
    products = x @ x.T
    penalty = 0.001 * x.square().sum(1).mean()
    pairs = [cross_entropy(products[:4, 4:], torch.arange(4)), cross_entropy(products[4:, :4], torch.arange(4))]
    value = loss(x, torch.arange(4).repeat(2))
    assert min(abs(value - penalty - pair) for pair in pairs) < 1e-4
    assert abs(value - loss(x / 3, torch.arange(4).repeat(2))) > 0.1


def slow_soft_triple(centres: Tensor, embeddings: Tensor, labels: list[int], each: int, tau: float) -> Tensor:
    """Returns the paper's Eq. 8 to 10 and its regulariser in plain loops, with the authors' settings."""
    unit = [w / w.norm() for w in centres]
    classes = len(unit) // each
    total = torch.zeros((), dtype=torch.double)
    for x, label in zip(embeddings, labels, strict=True):
        logits = []
        for c in range(classes):
            cosine = torch.stack([x @ w / x.norm() for w in unit[c * each : (c + 1) * each]])
            relaxed = (torch.softmax(cosine / 0.1, 0) * cosine).sum()
            logits.append(20 * (relaxed - 0.01 * (c == label)))
        total = total - logits[label] + torch.logsumexp(torch.stack(logits), 0)
    distances = torch.zeros((), dtype=torch.double)
    for c in range(classes):
        for s in range(each):
            for t in range(s + 1, each):
                distances = distances + (2 + 1e-5 - 2 * unit[c * each + s] @ unit[c * each + t]).sqrt()
    return total / len(labels) + tau * distances / (classes * each * (each - 1))


@pytest.mark.parametrize("tau", [0.2, 0.0])
def test_soft_triple_and_its_regulariser_equal_the_paper_in_plain_loops(tau: float) -> None:
    torch.manual_seed(0)
    loss = make_loss("soft_triple", 5, 4, {"centers_per_class": 3, "tau": tau}).double()
    (weights,) = loss.parameters()
    x, labels = torch.randn(7, 4, dtype=torch.double, requires_grad=True), torch.randint(0, 5, (7,))
    value, expected = loss(x, labels), slow_soft_triple(weights.T, x, labels.tolist(), 3, tau)
    assert value.item() == pytest.approx(expected.item())
    gradients = torch.autograd.grad(value, [x, weights])
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, weights]))


def test_soft_triples_regulariser_is_the_librarys() -> None:
    settings = {"centers_per_class": 4, "tau": 1.0}
    with_it, without = (make_loss("soft_triple", 5, 6, settings | {"tau": tau}) for tau in (1.0, 0.0))
    without.load_state_dict(with_it.state_dict())
    x, labels = torch.randn(7, 6), torch.randint(0, 5, (7,))
    (weights,) = with_it.parameters()
    expected = SparseCentersRegularizer(5, 4)(weights.T)
    assert (with_it(x, labels) - without(x, labels)).item() == pytest.approx(expected.item(), rel=1e-4)


def test_one_centre_per_class_has_nothing_to_merge() -> None:
    assert make_loss("soft_triple", 5, 6, {"centers_per_class": 1})(torch.randn(7, 6), torch.arange(7) % 5).isfinite()
