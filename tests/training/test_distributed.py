"""The process group of a run: one process, or several that share values in the order of their ranks."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from training.distributed import ProcessGroup, join_process_group


def test_one_process_is_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_process_group("cpu") as world:
        assert world == ProcessGroup(0, 1, torch.device("cpu")) and world.is_main
        assert world.broadcast("value") == "value" and world.gather("value") == ["value"]
    assert not dist.is_initialized()


def _join(rank: int, port: int, out: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}.items():
            environment.setenv(name, str(value))
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        with join_process_group("cpu") as world, join_process_group("cpu") as inner:
            assert inner == world, "an existing group is reused"
            found = (world.rank, world.is_main, world.local_size, world.broadcast(f"from {rank}"), world.gather(rank))
            torch.save(found, out / f"{rank}.pt")
        assert not dist.is_initialized()


@pytest.mark.slow
def test_two_processes_broadcast_from_the_first_and_gather_in_order(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_join, (port, tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert found == [(0, True, 2, "from 0", [0, 1]), (1, False, 2, "from 0", [0, 1])]
