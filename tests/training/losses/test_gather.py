"""Two gloo processes train like one process on their joint batch."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from training.losses.base import ProxyLoss
from training.losses.gather import gather_batch
from training.losses.proxy_anchor import ProxyAnchorLoss
from training.losses.proxy_isa import ProxyISAGradientLoss, ProxyISALoss
from training.losses.proxy_nca_isa import ProxyNCAISALoss
from training.losses.sample_aware import SampleAwareProxyLoss

CLASSES, INPUT, SIZE, STEPS = 5, 7, 4, 14
SHARES = (6, 3)
"""Rows of a step that each rank gets: unequal, as in a last batch."""

VARIANTS: dict[str, tuple[type[ProxyLoss], bool]] = {
    "proxy_isa": (ProxyISALoss, False),
    "proxy_isa wrapped": (ProxyISALoss, True),
    "proxy_isa_gradient": (ProxyISAGradientLoss, False),
    "proxy_nca_isa": (ProxyNCAISALoss, False),
    "proxy_anchor wrapped": (ProxyAnchorLoss, True),
}


class JointBatch(nn.Module):
    """A loss without a state on the batches of all ranks."""

    def __init__(self, loss: ProxyLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        return self.loss(*gather_batch(embeddings, labels))


def make(kind: type[ProxyLoss], seed: int) -> tuple[nn.Linear, ProxyLoss]:
    torch.manual_seed(seed)
    if not issubclass(kind, SampleAwareProxyLoss):
        return nn.Linear(INPUT, SIZE).double(), kind(CLASSES, SIZE).double()
    # A narrow search range, so that the filter soon has something to reject.
    narrow: dict[str, Any] = {"hardness_scale": 0.9, "hardness_sensitivity": 0.1, "search_margin": 0.0, "volume": 50.0}
    loss = kind(CLASSES, SIZE, queue_start=2, filter_start=4, queue_size=20, **narrow).double()
    return nn.Linear(INPUT, SIZE).double(), loss


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (sum(SHARES),), generator=random)
    noise = torch.randn(sum(SHARES), INPUT, generator=random, dtype=torch.double)
    return torch.eye(INPUT, dtype=torch.double)[labels] + noise, labels


def train(backbone: nn.Module, loss: nn.Module, rows: slice) -> dict[str, Any]:
    optimiser = torch.optim.SGD([*backbone.parameters(), *loss.parameters()], lr=0.05)
    values, gradients = [], []
    for step in range(STEPS):
        inputs, labels = batch(step)
        optimiser.zero_grad()
        value = loss(backbone(inputs[rows]), labels[rows])
        value.backward()
        gradients.append([p.grad.clone() for p in (*backbone.parameters(), *loss.parameters()) if p.grad is not None])
        optimiser.step()
        values.append(value.item())
    inner = loss.module if isinstance(loss, DistributedDataParallel) else loss
    inner = inner.loss if isinstance(inner, JointBatch) else inner
    assert isinstance(inner, ProxyLoss)
    return {
        "values": values,
        "gradients": gradients,
        "state": inner.state_dict(),
        "report": {name: value.item() for name, value in inner.diagnostics().items()},
    }


def run_rank(rank: int, port: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(SHARES))
    try:
        start = sum(SHARES[:rank])
        results = {}
        for name, (kind, wrapped) in VARIANTS.items():
            # Other seeds on the other ranks: rank 0's proxies must win.
            backbone, loss = make(kind, seed=10 * rank)
            joint = loss if isinstance(loss, SampleAwareProxyLoss) else JointBatch(loss)
            results[name] = train(
                DistributedDataParallel(backbone),
                DistributedDataParallel(joint, broadcast_buffers=False) if wrapped else joint,
                slice(start, start + SHARES[rank]),
            )
        torch.save(results, Path(directory) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(run_rank, (port, str(directory)), nprocs=len(SHARES))  # type: ignore[no-untyped-call]
    return [torch.load(directory / f"{rank}.pt") for rank in range(len(SHARES))]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_equal_one_on_the_joint_batch(ranks: list[dict[str, Any]], variant: str) -> None:
    alone = train(*make(VARIANTS[variant][0], seed=0), slice(None))
    if "hardness.seen" in alone["state"]:
        assert alone["state"]["hardness.seen"].sum() < STEPS * sum(SHARES), "the filter must have acted"
    for rank in ranks:
        assert rank[variant]["values"] == pytest.approx(alone["values"], rel=1e-12)
        assert rank[variant]["report"] == pytest.approx(alone["report"])
        for got, wanted in zip(rank[variant]["gradients"], alone["gradients"], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_state_never_differs_between_ranks(ranks: list[dict[str, Any]], variant: str) -> None:
    first, second = (rank[variant]["state"] for rank in ranks)
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, Tensor) else value == second[name]
        assert same, name
