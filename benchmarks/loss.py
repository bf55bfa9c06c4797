"""Time of a step of Proxy-ISA and of our Proxy-Anchor against pytorch-metric-learning's, one CPU thread.

A step is forward, backward and the update of the loss's state, with queue and filter on and the queue full.
All contenders take turns in one process, and the medians are compared, so that a busy machine slows all alike.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _table import Row, make_row, print_table, write_json
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.nn.functional import normalize

from training.losses.proxy_anchor import ProxyAnchorLoss
from training.losses.proxy_isa import ProxyISALoss

BATCH, SIZE = 128, 512
SMALL_QUEUE, LARGE_QUEUE = 1_000, 55_000
TARGETS = {100: 1.1, 3_997: 0.5, 11_318: 0.5}
"""Classes of CUB, In-Shop and SOP, and the largest share of Proxy-Anchor's time."""
SAME_TIME = 1.1
"""The queue's size must not change the time, up to the noise of a shared machine."""
PEER, OURS = "Proxy-Anchor (pytorch-metric-learning)", "our Proxy-Anchor"

Batch = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: within a minute on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    seconds = 8 if arguments.quick else 60
    rows = [row for classes in TARGETS for row in compare(classes, seconds)]
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def compare(classes: int, seconds: float) -> list[Row]:
    """Returns the rows for one number of classes, from rounds that take about `seconds` together."""
    medians = measure(contenders(classes), classes, seconds)
    small, large = f"queue of {SMALL_QUEUE}", f"queue of {LARGE_QUEUE}"
    anchor, c = medians[PEER], f"{classes} classes"
    return [
        make_row(f"step, {c}, {small}", medians[small], PEER, anchor, "ms", at_most=TARGETS[classes]),
        make_row(f"step, {c}, {large}", medians[large], PEER, anchor, "ms", at_most=TARGETS[classes]),
        make_row(
            f"queue size, {c}, {large}", medians[large], f"ours, {small}", medians[small], "ms", at_most=SAME_TIME
        ),
        make_row(f"{OURS}, {c}", medians[OURS], PEER, anchor, "ms", at_most=TARGETS[classes]),
        make_row(f"bare similarity matmul, {c}", medians["matmul"], PEER, anchor, "ms"),
    ]


def contenders(classes: int) -> dict[str, Callable[[Batch], None]]:
    proxies = torch.randn(classes, SIZE)

    def matmul(batch: Batch) -> None:
        """Runs the lower bound: similarities forward, and their two products backward."""
        embeddings = batch[0].detach()
        similarity = embeddings @ proxies.T
        torch.mm(similarity, proxies)
        torch.mm(similarity.T, embeddings)

    return {
        PEER: make_step(losses.ProxyAnchorLoss(classes, SIZE)),
        OURS: make_step(ProxyAnchorLoss(classes, SIZE)),
        f"queue of {SMALL_QUEUE}": make_step(make_full_queue_loss(classes, SMALL_QUEUE)),
        f"queue of {LARGE_QUEUE}": make_step(make_full_queue_loss(classes, LARGE_QUEUE)),
        "matmul": matmul,
    }


def make_full_queue_loss(classes: int, queue_size: int) -> ProxyISALoss:
    loss = ProxyISALoss(classes, SIZE, queue_start=0, filter_start=0, queue_size=queue_size)
    state = loss.hardness
    state.queue[:queue_size] = normalize(torch.randn(queue_size, SIZE))
    state.queue_labels[:queue_size] = torch.randint(0, classes, (queue_size,))
    state.rebuild_sums()
    return loss


def make_step(loss: nn.Module) -> Callable[[Batch], None]:
    def step(batch: Batch) -> None:
        embeddings, labels = batch
        embeddings.grad = None
        loss.zero_grad(set_to_none=True)
        loss(embeddings, labels).backward()

    return step


def measure(steps: dict[str, Callable[[Batch], None]], classes: int, seconds: float) -> dict[str, float]:
    """Returns the median time of each contender in milliseconds."""
    batches = itertools.cycle(
        [(torch.randn(BATCH, SIZE, requires_grad=True), torch.randint(0, classes, (BATCH,))) for _ in range(8)]
    )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(next(batches))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[PEER]) < 5:
        batch = next(batches)
        # In random order, so that no contender always runs after the same one.
        for name, step in random.sample(list(steps.items()), len(steps)):
            begin = time.perf_counter()
            step(batch)
            times[name].append(1000 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
