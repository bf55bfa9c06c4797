"""Every loss of the registry can be made, learns, keeps its weights' precision and refuses nonsense."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from index.errors import LookalikeError
from training.losses.registry import learns_from_pairs, loss_names, make_loss, setting_names

CLASSES, PER_CLASS, INPUT, SIZE = 8, 6, 20, 12
SPECIAL: dict[str, dict[str, Any]] = {
    "proxy_isa": {"queue_start": 20, "filter_start": 30, "train_size": CLASSES * PER_CLASS},
    "proxy_isa_gradient": {"queue_start": 20, "filter_start": 30, "train_size": CLASSES * PER_CLASS},
    "proxy_nca_isa": {"queue_start": 20, "filter_start": 30, "train_size": CLASSES * PER_CLASS},
    "proxy_gml": {"subgraph_share": 0.4},
    "soft_triple": {"centers_per_class": 2},
    # The tuned alpha of 0.01 adds a constant of 100 log(1 + positives) to the value.
    "multi_similarity": {"alpha": 2.0},
}
WITHOUT_PARAMETERS = {"multi_similarity", "multi_similarity_miner", "triplet", "contrastive", "n_pair"}


def separable() -> tuple[Tensor, Tensor]:
    """Clusters in half of the dimensions, noise in the other half: a linear map can part them."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    centres = torch.randn(CLASSES, INPUT // 2, generator=random)
    signal = centres[labels] + 0.3 * torch.randn(len(labels), INPUT // 2, generator=random)
    return torch.cat([signal, 1.5 * torch.randn(len(labels), INPUT // 2, generator=random)], 1), labels


def recall_at_one(embeddings: Tensor, labels: Tensor) -> float:
    similarity = normalize(embeddings) @ normalize(embeddings).T
    similarity.fill_diagonal_(-torch.inf)
    return (labels[similarity.argmax(1)] == labels).float().mean().item()


def test_the_registry_holds_proxy_isa_and_its_peers() -> None:
    assert set(loss_names()) == {
        *(
            "proxy_isa",
            "proxy_isa_gradient",
            "proxy_anchor",
            "proxy_nca",
            "proxy_nca_isa",
            "soft_triple",
            "proxy_gml",
            "cosface",
            "arcface",
        ),
        *("normalised_softmax", "margin", "multi_similarity", "multi_similarity_miner", "triplet", "contrastive"),
        "n_pair",
    }


@pytest.mark.parametrize("name", loss_names())
def test_a_loss_learns_a_separable_problem(name: str) -> None:
    torch.manual_seed(0)
    inputs, labels = separable()
    backbone, loss = nn.Linear(INPUT, SIZE), make_loss(name, CLASSES, SIZE, SPECIAL.get(name, {}))
    optimiser = torch.optim.Adam(
        [{"params": backbone.parameters(), "lr": 1e-2}, {"params": loss.parameters(), "lr": 3e-2}]
    )
    before = recall_at_one(backbone(inputs).detach(), labels)
    values = []
    for _ in range(200):
        order = torch.randperm(len(labels))
        optimiser.zero_grad()
        embeddings = backbone(inputs[order])
        embeddings.retain_grad()
        value = loss(embeddings, labels[order])
        assert value.shape == () and value.isfinite()
        value.backward()
        assert embeddings.grad is not None and embeddings.grad.isfinite().all()
        values.append(value.item())
        optimiser.step()
    assert sum(values[-10:]) < 0.8 * sum(values[:10])
    recall = recall_at_one(backbone(inputs).detach(), labels)
    assert before < 0.9 < recall


@pytest.mark.parametrize("name", loss_names())
def test_learnable_parts_are_parameters_and_get_gradients(name: str) -> None:
    torch.manual_seed(0)
    loss = make_loss(name, CLASSES, SIZE, SPECIAL.get(name, {}))
    labels = torch.arange(CLASSES).repeat_interleave(3)
    loss(torch.randn(len(labels), SIZE, requires_grad=True), labels).backward()
    parameters = list(loss.parameters())
    assert (parameters == []) == (name in WITHOUT_PARAMETERS)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)


@pytest.mark.parametrize("name", loss_names())
def test_half_precision_embeddings_leave_the_weights_in_float32(name: str) -> None:
    torch.manual_seed(0)
    loss = make_loss(name, CLASSES, SIZE, SPECIAL.get(name, {}))
    labels = torch.arange(CLASSES).repeat_interleave(3)
    half = torch.randn(len(labels), SIZE).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(half, labels)
    assert value.dtype == torch.float32
    value.backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in loss.parameters())


@pytest.mark.parametrize("name", loss_names())
def test_a_batch_of_one_class_gives_a_finite_loss(name: str) -> None:
    torch.manual_seed(0)
    loss = make_loss(name, CLASSES, SIZE, SPECIAL.get(name, {}))
    x = torch.randn(6, SIZE, requires_grad=True)
    value = loss(x, torch.zeros(6, dtype=torch.long))
    value.backward()
    assert value.isfinite() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("name", loss_names())
def test_labels_out_of_range_are_refused(name: str) -> None:
    loss = make_loss(name, CLASSES, SIZE, SPECIAL.get(name, {}))
    with pytest.raises(LookalikeError, match=f"Label {CLASSES} is outside"):
        loss(torch.randn(2, SIZE), torch.tensor([0, CLASSES]))


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LookalikeError, match=r"'proxy_anker'.*proxy_isa, .*n_pair"):
        make_loss("proxy_anker", CLASSES, SIZE, {})


@pytest.mark.parametrize("name", loss_names())
def test_an_unknown_setting_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(LookalikeError) as caught:
        make_loss(name, CLASSES, SIZE, {**SPECIAL.get(name, {}), "temprature": 1})
    assert "temprature is unknown" in caught.value.problem
    assert all(setting in caught.value.remedy for setting in setting_names(name))


def test_a_setting_reaches_the_loss() -> None:
    loose, tight = (make_loss("cosface", CLASSES, SIZE, {"margin": margin}) for margin in (0.0, 0.9))
    tight.load_state_dict(loose.state_dict())
    x, labels = torch.randn(8, SIZE), torch.arange(8)
    assert tight(x, labels) > loose(x, labels) + 1
    assert [len(list(make_loss("margin", 5, 3, {"learn_beta": on}).parameters())) for on in (True, False)] == [1, 0]
    per_class = make_loss("margin", 5, 3, {"beta_per_class": True})
    assert [p.shape for p in per_class.parameters()] == [(5,)]


PLUGIN = """
from __future__ import annotations
import torch
from torch import Tensor, nn


class CentreLoss(nn.Module):
    learns_from_pairs = True

    def __init__(self, num_classes: int, embedding_size: int, *, margin: float = 0.5, train_size: int = 0) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(num_classes, embedding_size))
        self.margin, self.train_size = margin, train_size

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(embeddings @ self.centres.T, labels) + self.margin


def unsized(margin: float) -> nn.Module:
    return nn.Identity()
"""


@pytest.fixture
def own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_losses.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_losses", None)


def test_a_loss_of_another_module_has_its_parameters_as_settings(own_losses: None) -> None:
    name = "own_losses:CentreLoss"
    assert setting_names(name) == ["margin", "train_size"] and learns_from_pairs(name)
    loss = make_loss(name, CLASSES, SIZE, {"margin": 0.25})
    embeddings = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.cross_entropy(embeddings @ loss.get_parameter("centres").T, torch.arange(4)) + 0.25
    assert torch.equal(loss(embeddings, torch.arange(4)), expected)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("own_losses:CentreLoss", {"margn": 1}, "margn is unknown"),
        ("own_losses:CentreLoss", {"margin": "wide"}, r"margin must be a number \(got 'wide'\)"),
        ("own_losses:unsized", {}, "cannot be called with num_classes and embedding_size"),
        ("own_losses:Absent", {}, "cannot be loaded"),
    ],
)
def test_a_loss_of_another_module_that_does_not_fit_is_refused(
    own_losses: None, name: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(LookalikeError, match=problem):
        make_loss(name, CLASSES, SIZE, settings)
