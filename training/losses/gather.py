"""One batch out of the batches of all ranks, so that a stateful loss is the same on every rank.

Every rank computes the loss of the joint batch X = [x_1 ... x_N] with the same proxies P, so dL/dP is already
complete on each of them and averaging it (DistributedDataParallel does) changes nothing. A backbone however only
sees its own rows: averaging gives (1/N) sum_r (dL/dx_r)(dx_r/dtheta), a factor of N too small. The gather therefore
multiplies the gradient of its own rows by N, and the average is the gradient of one process on the joint
batch. No communication is needed in backward.

On GPUs, where atomic additions round in any order, wrap the loss in DistributedDataParallel too (with
broadcast_buffers=False): the average then keeps the proxies of all ranks bitwise equal.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def ranks() -> int:
    """Returns how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(rows: Tensor, sizes: list[int]) -> Tensor:
    """Returns the rows of all ranks in rank order; `sizes` are their numbers."""
    padded = pad(rows, [0, 0] * (rows.dim() - 1) + [0, max(sizes) - len(rows)]).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int]) -> Tensor:
        start = sum(sizes[: dist.get_rank()])
        ctx.own, ctx.ranks = slice(start, start + len(rows)), len(sizes)
        return gather_rows(rows, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.own] * ctx.ranks, None


def gather_batch(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the joint batch of all ranks, whose local batches may differ in size."""
    size = torch.tensor([len(labels)], device=labels.device)
    per_rank = [torch.empty_like(size) for _ in range(ranks())]
    dist.all_gather(per_rank, size)
    sizes = torch.cat(per_rank).tolist()
    joint: Tensor = _GatherWithGradient.apply(embeddings, sizes)
    return joint, gather_rows(labels, sizes)


def copy_from_first_rank(*tensors: Tensor) -> None:
    """Overwrites tensors with rank 0's: atomic additions on a GPU round differently from rank to rank."""
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
