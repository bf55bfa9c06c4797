"""How far each class has been learned: the memory queue, counters and thresholds of Proxy-ISA.

Equation numbers are those of "Informative Sample-Aware Proxy for Deep Metric Learning" (MMAsia 2022).
Two losses read this state: Proxy-ISA itself and the adaptive weights on Proxy-NCA.
"""

import math
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from training.losses.gather import copy_from_first_rank

DEFAULT_TAU = 1.5
MAX_QUEUE = 55_000
EPOCHS_IN_QUEUE = 9
HALF_DECAY_SHARE, MIN_VOLUME = 0.08, 10.0
"""Of the planned samples per class: where `volume_for` puts sigma's half-decay point; and the smallest V it returns."""
REBUILD_EVERY = 2_000
"""Steps between two rebuilds of the class sums: rounding errors of a running sum do not accumulate."""


class HardnessSettings(BaseModel):
    """When and how strongly the adaptive weights act; the defaults are the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    volume: float = Field(default=100.0, gt=1, description="V, upper bound of the effective number")
    hardness_scale: float = Field(default=0.15, gt=0, description="h, scales the class hardness")
    hardness_sensitivity: float = Field(default=0.9, gt=0, description="k, sensitivity to the class hardness")
    search_margin: float = Field(default=0.1, ge=0, le=1, description="lambda, margin of the search length")
    tau: float = Field(default=DEFAULT_TAU, gt=0, description="timing of the decay")
    positive_penalty: Literal["none", "inverse", "nu", "sigma"] = "sigma"
    negative_penalty: Literal["none", "inverse"] = "inverse"
    initial_similarity: float = Field(default=0.0, ge=-1, le=1, description="S_learned before the queue has the class")
    queue_size: int | None = Field(default=None, gt=0, description="T; else min(55000, 9 x train_size)")
    train_size: int | None = Field(default=None, gt=0, description="images to train on; only sizes the queue")
    queue_start: int | None = Field(default=None, ge=0, description="first step, from 0, that fills the queue")
    filter_start: int | None = Field(
        default=None, ge=0, description="first step, from 0, that weighs and filters positives"
    )
    queue_start_epoch: int = Field(default=2, ge=0, description="used with steps_per_epoch where queue_start is unset")
    filter_start_epoch: int = Field(
        default=3, ge=0, description="used with steps_per_epoch where filter_start is unset"
    )
    steps_per_epoch: int | None = Field(default=None, gt=0)
    gather: bool = Field(
        default=True, description="join the batches of all ranks of the process group, if there is one"
    )

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.steps_per_epoch is None and (self.queue_start is None or self.filter_start is None):
            raise ValueError("give steps_per_epoch, or queue_start and filter_start in steps")
        if self.first_filter_step < self.first_queue_step:
            raise ValueError(
                f"the filter starts at step {self.first_filter_step}, before the queue it relies on"
                f" at step {self.first_queue_step}"
            )
        if self.tau >= self.volume:
            raise ValueError(f"tau ({self.tau}) must be below volume ({self.volume}): sigma would start decayed")
        return self

    @property
    def first_queue_step(self) -> int:
        if self.queue_start is not None:
            return self.queue_start
        return self.queue_start_epoch * (self.steps_per_epoch or 0)

    @property
    def first_filter_step(self) -> int:
        if self.filter_start is not None:
            return self.filter_start
        return self.filter_start_epoch * (self.steps_per_epoch or 0)

    @property
    def queue_capacity(self) -> int:
        if self.queue_size is not None:
            return self.queue_size
        return min(MAX_QUEUE, EPOCHS_IN_QUEUE * (self.train_size or MAX_QUEUE))

    def half_decay_samples(self) -> float:
        """Returns the clean samples of a class at which the sigmoid in sigma is 1/2: E_n = V - tau in Eq. 17."""
        return _half_decay_samples(self.volume, self.tau)


def volume_for(planned_samples: float, tau: float = DEFAULT_TAU) -> float:
    """Returns V, to one decimal, whose half-decay point falls at 8 % of the samples that a run plans for each class.

    Not below 10 nor 2 tau: a smaller V bounds the effective number so tightly that no threshold moves. In a run that
    plans for fewer than about 225 samples per class (at tau 1.5) the decay therefore comes later than at 8 %.
    """
    aim = HALF_DECAY_SHARE * planned_samples
    low = max(MIN_VOLUME, 2 * tau)
    if _half_decay_samples(low, tau) >= aim:
        return low
    high = aim + low  # Always enough: the half-decay point is near V log(V / tau).
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if _half_decay_samples(middle, tau) < aim else (low, middle)
    return round(high, 1)


def _half_decay_samples(volume: float, tau: float) -> float:
    return math.log(tau / volume) / math.log1p(-1 / volume)


class Thresholds(NamedTuple):
    """One value for each class, constants to autograd."""

    learned: Tensor
    outlier: Tensor
    effective: Tensor
    nu: Tensor


class ClassHardness(nn.Module):
    """Counters and thresholds of every class, and the memory queue they are estimated from.

    The queue is a ring of T slots, but its mean similarity to a proxy is the proxy's dot product with the
    mean, so a running sum for each class replaces a scan. Rows that the filter rejects are sent to one
    extra slot and one extra class, which keeps every shape static: no step waits for the device.
    """

    seen: Tensor
    learned: Tensor
    queue: Tensor
    queue_labels: Tensor
    pointer: Tensor
    class_sums: Tensor
    class_counts: Tensor

    def __init__(self, num_classes: int, embedding_size: int, settings: HardnessSettings) -> None:
        super().__init__()
        self.settings, self.num_classes = settings, num_classes
        self.steps, self.joined = 0, False
        slots = settings.queue_capacity + 1
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.long))
        self.register_buffer("learned", torch.full((num_classes,), settings.initial_similarity))
        self.register_buffer("queue", torch.zeros(slots, embedding_size))
        self.register_buffer("queue_labels", torch.full((slots,), num_classes))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("class_sums", torch.zeros(num_classes + 1, embedding_size))
        self.register_buffer("class_counts", torch.zeros(num_classes + 1))

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "volume": self.settings.volume}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes over V as well: it may follow from the planned samples, and a resumed run may plan for others."""
        self.steps = state["steps"]
        self.settings = self.settings.model_copy(update={"volume": state["volume"]})

    @property
    def queue_is_on(self) -> bool:
        return self.steps >= self.settings.first_queue_step

    @property
    def filter_is_on(self) -> bool:
        return self.steps >= self.settings.first_filter_step

    def thresholds(self) -> Thresholds:
        """Returns S_learned (Eq. 10), S_outlier (Eq. 15), E_n (Eq. 8) and nu (Eq. 14) before the step."""
        s = self.settings
        # E_n = (1 - beta^n) / (1 - beta) with beta = (V-1)/V, without cancellation.
        effective = self.seen.to(self.learned.dtype).mul_(math.log1p(-1 / s.volume)).expm1_().mul_(-s.volume)
        nu = effective.log1p().add_(1).reciprocal_()
        hardness = (1 + s.hardness_sensitivity) - s.hardness_sensitivity * self.learned
        eta = torch.addcmul(torch.full_like(nu, s.search_margin), hardness, nu)
        return Thresholds(self.learned.clone(), self.learned - eta, effective, nu)

    def positive_weights(self, positives: Tensor, labels: Tensor, at: Thresholds) -> Tensor:
        """Returns omega+ of the batch's positive pairs (first line of Eq. 16); all 1 while the filter is off."""
        if not self.filter_is_on or self.settings.positive_penalty == "none":
            return torch.ones_like(positives)
        informative = (positives >= at.outlier[labels]) & (positives <= at.learned[labels])
        return self.penalty(at.effective[labels], at.nu[labels]) + informative

    def penalty(self, effective: Tensor, nu: Tensor) -> Tensor:
        """Returns sigma (Eq. 17), or what `positive_penalty` puts in its place."""
        s = self.settings
        if s.positive_penalty == "nu":
            return nu
        if s.positive_penalty == "inverse":
            return effective.clamp_min(1).reciprocal()
        # Eq. 17; 1 / (1 + exp(V - E_n - tau)) as a sigmoid, since exp(V) overflows float32.
        return 1 + (1 + math.exp(-s.tau)) * (nu - 1) * torch.sigmoid(effective + s.tau - s.volume)

    def negative_damping(self, at: Thresholds) -> Tensor:
        """Returns omega- of a negative below S_outlier, for each class (second line of Eq. 16)."""
        if self.settings.negative_penalty == "none":
            return torch.ones_like(at.effective)
        return at.effective.clamp_min(1).reciprocal_()

    @torch.no_grad()
    def update(
        self, embeddings: Tensor, labels: Tensor, positives: Tensor, own_proxies: Tensor, at: Thresholds
    ) -> None:
        """Updates the state after a step: filters, enqueues clean samples, dequeues the oldest, refreshes S_learned.

        `embeddings` and `own_proxies` (the proxy of each sample's class) have unit length; `positives` are
        their similarities and `at` the thresholds that the loss of this step has used.
        """
        # A comparison with NaN is false: a NaN embedding affects its own step, never the state.
        clean = positives >= (at.outlier[labels] if self.filter_is_on else -torch.inf)
        clean = self._from_first_rank(clean.long()).bool()
        self.seen.index_add_(0, labels, clean.long())
        if self.queue_is_on:
            self._enqueue(embeddings, labels, clean)
            # Eq. 10, refreshed for the classes of the batch; a class absent from the queue keeps its value.
            count = self.class_counts[labels]
            average = torch.linalg.vecdot(self.class_sums[labels], own_proxies) / count.clamp_min(1)
            refreshed = torch.where(count > 0, average * self.settings.hardness_scale, self.learned[labels])
            self.learned.index_copy_(0, labels, self._from_first_rank(refreshed))
        self.steps += 1
        if self.steps % REBUILD_EVERY == 0:
            self.rebuild_sums()

    def _from_first_rank(self, decided: Tensor) -> Tensor:
        """Returns rank 0's values: GPUs round sums differently, and the states of all ranks must stay equal."""
        if self.joined:
            copy_from_first_rank(decided)
        return decided

    def join_ranks(self, *parameters: Tensor) -> None:
        """Copies rank 0's state and parameters to every rank, once."""
        if self.joined:
            return
        steps = torch.tensor(self.steps, device=self.seen.device)
        copy_from_first_rank(steps, *(p.detach() for p in parameters), *self.buffers())
        self.steps, self.joined = int(steps), True

    def _enqueue(self, embeddings: Tensor, labels: Tensor, clean: Tensor) -> None:
        capacity, bin_class = self.settings.queue_capacity, self.num_classes
        order = clean.cumsum(0)
        kept = clean if len(labels) <= capacity else clean & (order > order[-1] - capacity)
        slots = torch.where(kept, (self.pointer + order - 1) % capacity, capacity)
        incoming = torch.where(kept, labels, bin_class)
        vectors = embeddings * kept[:, None]
        outgoing, ones = self.queue_labels[slots], torch.ones_like(vectors[:, 0])
        self.class_sums.index_add_(0, outgoing, self.queue[slots], alpha=-1)
        self.class_counts.index_add_(0, outgoing, ones, alpha=-1)
        self.queue.index_copy_(0, slots, vectors)
        self.queue_labels.index_copy_(0, slots, incoming)
        self.class_sums.index_add_(0, incoming, vectors)
        self.class_counts.index_add_(0, incoming, ones)
        self.pointer.add_(order[-1]).remainder_(capacity)

    def queue_similarity(self, unit_proxies: Tensor) -> Tensor:
        """Returns S_avg: the queue's mean similarity to the proxy of its class, averaged over the classes it holds."""
        counts = self.class_counts[:-1]
        means = torch.linalg.vecdot(self.class_sums[:-1], unit_proxies) / counts.clamp_min(1)
        average: Tensor = means.sum() / (counts > 0).sum().clamp_min(1)
        return average

    @torch.no_grad()
    def rebuild_sums(self) -> None:
        """Recomputes counts and sums from the queue."""
        self.class_sums.zero_().index_add_(0, self.queue_labels, self.queue)
        self.class_counts.zero_().index_add_(0, self.queue_labels, torch.ones_like(self.queue[:, 0]))
