"""The memory and the time of a training step, measured on a few blank photos before a run starts."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from index._util.system import memory_limit
from training.config import DEFAULT_BATCH_SIZE
from training.data.dataset import count_noun

_PHOTOS = 8
"""Blank photos in the step whose memory is measured."""
_TRIES = 2
"""Timed steps after that one, of which the faster counts."""
_QUICK_SECONDS, _QUICK_PHOTOS = 0.2, 128
"""A quicker step is timed with more photos: with few, the time is that of the calls."""
_MAX_SHARE = 0.7
"""Share of the memory that a batch chosen automatically may fill: photos, decoding and other programs need some too."""
_MIN_BATCH = 8
_TRANSIENT = 1.25
"""Memory of a backward pass, as a multiple of what the forward pass keeps for it."""


@dataclass(frozen=True)
class StepCost:
    """What a step takes, as a linear function of its photos."""

    fixed_bytes: int
    """The process, weights, gradients and the optimiser's state."""
    photo_bytes: int
    photo_seconds: float
    """Of forward and backward pass on this machine as busy as it is now."""
    forward_seconds: float

    def memory(self, photos: int) -> int:
        """Returns the estimated peak memory of a step in bytes."""
        return self.fixed_bytes + photos * self.photo_bytes

    def fitting_batch(self, available: int, divisor: int = 1, *, largest: int = DEFAULT_BATCH_SIZE) -> int:
        """Returns the largest halved batch that leaves some of the available memory and that `divisor` divides."""
        batch = largest
        while self.memory(batch) > _MAX_SHARE * available:
            half = batch // 2 // divisor * divisor
            if half < max(_MIN_BATCH, divisor):
                break
            batch = half
        return batch


@dataclass(frozen=True)
class RunPlan:
    """What a run is going to do and to need, for the user to see before the first step."""

    photos: int
    classes: int
    epochs: int
    batch_size: int
    accumulation: int
    steps: int
    """Of an epoch."""
    learns: str
    """What learns, with its learning rate."""
    memory: int
    """Estimated peak of the process, in bytes."""
    available: int
    epoch_seconds: float
    """Estimate, with the measurements after the epoch."""
    fitting_batch: int
    """The largest batch that fits, if this one does not."""
    chosen: bool
    """Whether the batch size was chosen automatically."""

    def lines(self) -> list[str]:
        """Returns sentences about the run, the last of them a warning if it may not fit."""
        update = f"batches of {self.batch_size}"
        if self.accumulation > 1:
            update += f", {self.accumulation} to an update"
        if self.chosen:
            update += " (chosen for this machine)"
        one, all_ = (_format_minutes(epochs * self.epoch_seconds) for epochs in (1, self.epochs))
        steps = count_noun(self.steps, "step", "steps")
        lines = [
            f"{self.photos:,} photos of {self.classes:,} classes to learn, {update}, {steps} per epoch.",
            f"{self.learns}.",
            f"Estimate: {format_bytes(self.memory)} of memory ({format_bytes(self.available)} available), "
            f"{one} per epoch, {all_} in all.",
        ]
        if self.memory > self.available:
            lines.append(self._warning())
        return lines

    def _warning(self) -> str:
        if self.fitting_batch < self.batch_size:
            together = self.batch_size // self.fitting_batch * self.accumulation
            remedy = f"sampling.batch_size={self.fitting_batch} and optimiser.accumulation={together}"
        else:
            remedy = "a smaller preprocessing.input_size, or cached_views=4"
        return f"Warning: the run needs more memory than there is and may be killed. Set {remedy}."


def format_bytes(count: float) -> str:
    """Formats a number of bytes with three digits, in MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _format_minutes(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def measure_step(network: nn.Module, inputs: Callable[[int], Tensor], extra_parameters: int = 0) -> StepCost:
    """Runs forward and backward on blank photos; weights, statistics and random states stay as they are.

    `extra_parameters` are those of the loss, which is not run: it needs little next to a backbone.
    """
    blank = inputs(_PHOTOS)
    mode = network.training
    network.eval()
    kept, _, seconds = _run(network, blank)
    timed = inputs(_QUICK_PHOTOS) if seconds < _QUICK_SECONDS else blank
    _, forward, both = min((_run(network, timed) for _ in range(_TRIES)), key=lambda run: run[2])
    network.zero_grad(set_to_none=True)
    network.train(mode)
    learning = sum(p.numel() for p in network.parameters() if p.requires_grad)
    # A gradient and the two moments of Adam; the weights themselves are already in memory. A loss has all four.
    fixed = _used_memory(blank.device) + 4 * (3 * learning + 4 * extra_parameters)
    photo_bytes = int(_TRANSIENT * kept) // _PHOTOS + blank.nbytes // _PHOTOS
    return StepCost(fixed, photo_bytes, both / len(timed), forward / len(timed))


def available_memory(device: torch.device, local_processes: int = 1) -> int:
    """Returns the bytes that one of the processes on this machine may use for training."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_limit() // local_processes


def _run(network: nn.Module, inputs: Tensor) -> tuple[int, float, float]:
    """Returns the bytes kept for the backward pass, and the seconds until the forward and the backward pass ended."""
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}

    def count(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    started = time.perf_counter()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
        total = network(inputs).sum()
        total.item()  # waits for a GPU
        forward = time.perf_counter() - started
        if total.requires_grad:
            torch.autograd.backward(total)
    if inputs.device.type == "cuda":
        torch.cuda.synchronize(inputs.device)
    return sum(kept.values()), forward, time.perf_counter() - started


def _used_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
