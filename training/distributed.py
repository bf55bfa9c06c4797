"""The processes that train together: one, or as many as `torchrun` started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.devices import choose_device, keep_freed_memory

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process among those of the run."""

    rank: int
    size: int
    device: torch.device
    local_size: int = 1
    """Processes of the run on this machine, which share its cores."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes files."""
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Returns the first process's value on all of them; the others wait for it."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes in the order of their ranks, on all of them."""
        if self.size == 1:
            return [value]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value)
        return parts


@contextmanager
def join_process_group(wanted_device: str) -> Iterator[ProcessGroup]:
    """Joins the process group that `torchrun` announces in the environment, if there is one.

    An existing group is reused: one that is left and joined again may get the addresses of the first.
    """
    device = choose_device(wanted_device)
    if device.type == "cpu":
        keep_freed_memory()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if size == 1:
        yield ProcessGroup(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield ProcessGroup(dist.get_rank(), size, device, local_size)
        return
    # The other processes wait while the first measures, which takes long on a large test set.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))
    try:
        yield ProcessGroup(dist.get_rank(), size, device, local_size)
    finally:
        dist.destroy_process_group()
