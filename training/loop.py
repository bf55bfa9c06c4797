"""The training loop, top to bottom."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.callbacks import Callback
from training.checkpoints import RunFolder, without_head
from training.config import TrainingConfig
from training.data import DataSet, check_photos
from training.data.dataset import list_names
from training.distributed import ProcessGroup, join_process_group
from training.errors import TrainingError
from training.losses.base import ProxyLoss
from training.metric_names import retrieval_figures
from training.optimizers import set_rates
from training.outcome import best_trained, describe_outcome
from training.run_logger import RunLogger
from training.setup import TrainingSetup, describe_volume, plan_run, prepare_training
from training.trackers import ExperimentTracker

_SEEDS = 1 << 30
"""Steps between the random states of two seeds."""

Drop = Callable[[list[dict[str, Any]]], str | None]
"""Called after an epoch with the history; returns the reason to end the run, or None."""


@dataclass
class RunProgress:
    """The position and history of a run; part of every checkpoint, also within an epoch."""

    epoch: int = 0
    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Sums over the epoch's steps so far, for its means."""
    counts: dict[str, int] = field(default_factory=dict)
    photos: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    best_score: float = -1.0
    """Of the best epoch on the validation classes."""
    initial: dict[str, str] = field(default_factory=dict)
    """Digests of the initial weights, of the batches and of the photos."""
    class_sizes: dict[str, int] = field(default_factory=dict)
    """Photos of each class, to name what changed before a run is resumed."""
    dropped: str | None = None
    """Why the run ended before its last epoch, if a rule ended it."""

    def add(self, figures: dict[str, float]) -> None:
        """Counts the figures of a step."""
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def finish_epoch(self) -> dict[str, Any]:
        """Returns the epoch's record and starts the next one."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        self.epoch += 1
        record = {"epoch": self.epoch, **means, "photos_per_second": self.photos / self.seconds}
        self.step, self.sums, self.counts, self.photos, self.seconds = 0, {}, {}, 0, 0.0
        return record


def train(
    config: TrainingConfig,
    data: DataSet,
    out: Path,
    spec: str,
    callback: Callback,
    *,
    resume: bool = False,
    drop: Drop | None = None,
) -> dict[str, Any]:
    """Trains into the run folder `out`, or continues the run there, and returns the chosen model's figures."""
    with join_process_group(config.device) as world:
        folder = RunFolder(out)
        chosen = config.sampling.batch_size == "auto"
        config = world.broadcast(folder.settle(config) if world.is_main else None)
        with folder.begin(config, spec, resume=resume) if world.is_main else nullcontext():
            if world.is_main:
                data = check_photos(data, reports=out, on_progress=partial(callback.on_progress, "Checking the photos"))
            data = world.broadcast(data)
            for remark in data.remarks:
                callback.on_message(remark)
            checkpoint = folder.load_checkpoint()
            if checkpoint is None and world.broadcast(folder.is_finished):
                finished: dict[str, Any] = world.broadcast(folder.result() if world.is_main else None)
                return finished  # a study deletes the checkpoint of a finished run
            work = prepare_training(config, data, out, world, callback, pretrained=checkpoint is None)
            config = work.config
            if world.is_main:
                folder.write_config(config, spec)
            reports = config.tracker is not None and world.is_main
            tracker = ExperimentTracker(config, out, callback.on_message) if reports else None
        progress = RunProgress(initial=work.initial)
        if checkpoint:
            progress = RunProgress(**checkpoint["progress"])
            if progress.initial["photos"] != work.initial["photos"]:
                raise TrainingError(
                    f"The photos of {spec} have changed since the run {out} was started"
                    f"{_describe_change(progress.class_sizes, work.class_sizes())}.",
                    f"Restore the photos, or train a new run: --out FOLDER --start-from {out}.",
                )
            work.load_state_dict(checkpoint["work"])
        if world.is_main:
            folder.write_classes(work.photos)
        progress.class_sizes = work.class_sizes()
        first_step = progress.epoch * len(work.batches) + progress.step
        with RunLogger(out, first_step=first_step, active=world.is_main, tracker=tracker) as logger:
            return _Training(config, folder, world, work, progress, logger, callback, drop, chosen).run()


@dataclass
class _Training:
    """One call of `train` with its state."""

    config: TrainingConfig
    folder: RunFolder
    world: ProcessGroup
    work: TrainingSetup
    progress: RunProgress
    logger: RunLogger
    callback: Callback
    drop: Drop | None
    chosen_batch: bool
    """Whether the batch size was chosen automatically."""
    pending: list[dict[str, Tensor | float]] = field(default_factory=list)
    """Figures of the latest steps that are still on the device: reading them waits for it."""

    def run(self) -> dict[str, Any]:
        progress = self.progress
        if self.has_epochs_left():
            self.callback.on_plan(plan_run(self.work, chosen=self.chosen_batch))
            if volume := describe_volume(self.work):
                self.callback.on_message(volume)
        elif progress.history and progress.epoch < self.config.last_epoch:
            self.callback.on_message(f"Nothing is left to train: {progress.dropped or self.describe_patience()}.")
        if not progress.history:
            self.measure({"epoch": 0})
            self.select()
            self.save()
        while self.has_epochs_left():
            self.train_epoch()
            self.measure(progress.finish_epoch())
            self.select()
            progress.dropped = self.world.broadcast(self.drop(progress.history) if self.drop else None)
            self.save()
        return self.finish()

    def train_epoch(self) -> None:
        """Trains the current epoch, from the step where a killed run stopped."""
        work, progress, config = self.work, self.progress, self.config
        device, steps = self.world.device, len(work.batches)
        work.begin_epoch(progress.epoch, progress.step)
        saved = counted = time.monotonic()
        for inputs, labels in work.loader:
            self.step(inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True))
            progress.photos += len(labels) * self.world.size
            if progress.step % config.log_every == 0 or progress.step == steps:
                self.read_figures()
            now = time.monotonic()
            progress.seconds += now - counted
            counted = now
            self.callback.on_step(progress.epoch, progress.step, steps)
            # Gradients are not part of a checkpoint, so it is written between two updates.
            if now - saved > 60 * config.checkpoint_minutes and progress.step % config.optimiser.accumulation == 0:
                self.save()
                saved = now
        if not all(torch.isfinite(value).all() for value in work.model.state_dict().values()):
            raise self.divergence_error(f"a weight is not finite after epoch {progress.epoch + 1}")

    def divergence_error(self, what: str) -> TrainingError:
        rate = self.config.optimiser.learning_rate
        return TrainingError(
            f"Training diverged: {what}.",
            f"Lower optimiser.learning_rate ({rate:g}) or set optimiser.clip_norm=1, and train into a new folder.",
        )

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        """Runs forward and backward on one batch; every `accumulation` batches, and at the epoch's end, updates."""
        work, progress, settings = self.work, self.progress, self.config.optimiser
        steps, place = len(work.batches), progress.step % settings.accumulation
        # Random numbers of a step (dropout, miners) depend only on its number, so that a resumed run draws the same.
        torch.manual_seed(self.config.seed * _SEEDS + progress.epoch * steps + progress.step)
        together = min(settings.accumulation, steps - progress.step + place)
        loss = work.criterion(work.network(inputs), labels)
        work.scaler.scale(loss / together).backward()
        factor = work.rate(progress.epoch * steps + progress.step)
        figures: dict[str, Tensor | float] = {"loss": loss.detach(), "learning_rate": settings.learning_rate * factor}
        if progress.step % self.config.log_every == 0 and isinstance(work.loss, ProxyLoss):
            figures |= work.loss.diagnostics()
        self.pending.append(figures)
        progress.step += 1
        if place + 1 == together:
            set_rates(work.optimiser, factor)
            self.update()

    def update(self) -> None:
        """Updates the weights with the accumulated gradient."""
        work, settings = self.work, self.config.optimiser
        if settings.clip_value or settings.clip_norm:
            work.scaler.unscale_(work.optimiser)
            parameters = [parameter for group in work.optimiser.param_groups for parameter in group["params"]]
            if settings.clip_value:
                nn.utils.clip_grad_value_(parameters, settings.clip_value)
            if settings.clip_norm:
                nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        work.scaler.step(work.optimiser)
        work.scaler.update()
        work.optimiser.zero_grad(set_to_none=True)
        if work.average:
            work.average.update(work.model)

    def read_figures(self) -> None:
        """Reads the figures of the latest steps from the device, and ends a run that diverged."""
        progress, first = self.progress, self.progress.step - len(self.pending) + 1
        on_device = [
            value.float() for figures in self.pending for value in figures.values() if isinstance(value, Tensor)
        ]
        values = iter(torch.stack(on_device).tolist())  # waits for the device once
        epoch = progress.epoch + 1
        for step, pending in enumerate(self.pending, first):
            figures = {name: next(values) if isinstance(value, Tensor) else value for name, value in pending.items()}
            if not math.isfinite(figures["loss"]):
                raise self.divergence_error(f"the loss became {figures['loss']} at step {step} of epoch {epoch}")
            progress.add(figures)
            self.logger.step(progress.epoch * len(self.work.batches) + step, figures)
        self.pending.clear()

    def measure(self, record: dict[str, Any]) -> None:
        """Completes an epoch's record; only the validation classes select the epoch."""
        config, work, epoch = self.config, self.work, record["epoch"]
        untrained, model = epoch == 0, work.model if epoch == 0 else work.measured
        if work.validation:
            measured = work.validation.measure(model, untrained=untrained)
            record |= {f"validation.{name}": value for name, value in measured.items()}
        if work.test and (untrained or (config.test_every and epoch % config.test_every == 0)):
            record |= work.test.measure(model, untrained=untrained)
        record = self.world.broadcast(record)
        self.progress.history.append(record)
        self.logger.epoch(self.progress.history, epoch * len(work.batches))
        self.callback.on_epoch(record)

    def select(self) -> None:
        """Keeps the model with the best validation score so far; epoch 0 is the backbone without a head."""
        progress = self.progress
        score = progress.history[-1].get(self.selection_metric)
        if score is not None and score > progress.best_score:
            progress.best_score, progress.best_epoch = score, progress.epoch
            if self.world.is_main:
                weights = self.work.measured.state_dict()
                self.folder.save_best(weights if progress.epoch else without_head(weights), progress.epoch)

    @property
    def selection_metric(self) -> str:
        return f"validation.{self.config.selection.metric}"

    def has_epochs_left(self) -> bool:
        progress = self.progress
        return progress.epoch < self.config.last_epoch and not self.out_of_patience() and not progress.dropped

    def out_of_patience(self) -> bool:
        patience = self.config.selection.patience
        # Epoch 0 does not count: a random head may need more epochs than that to reach the untrained backbone.
        best = best_trained(self.progress.history, self.selection_metric)
        if patience is None or self.work.validation is None or best is None:
            return False
        return self.progress.epoch - int(best["epoch"]) >= patience

    def describe_patience(self) -> str:
        epoch, patience = self.progress.best_epoch, self.config.selection.patience
        return f"no epoch was better than epoch {epoch} for {patience} epochs (selection.patience)"

    def save(self) -> None:
        if self.pending:
            self.read_figures()
        if self.world.is_main:
            self.folder.save_checkpoint({"work": self.work.state_dict(), "progress": asdict(self.progress)})

    def finish(self) -> dict[str, Any]:
        """Writes the figures of the chosen model on the test classes, measured now if that epoch was not."""
        progress, work = self.progress, self.work
        chosen = progress.best_epoch if work.validation else progress.epoch
        result = dict(next(record for record in progress.history if record["epoch"] == chosen))
        if work.test and "recall@1" not in result:
            kept = self.world.broadcast(self.folder.model().state_dict() if self.world.is_main else None)
            work.measured.load_state_dict(kept)
            result |= work.test.measure(work.measured)
        result |= {
            "untrained": retrieval_figures(progress.history[0]),
            "epochs": progress.epoch,
            "initial": progress.initial,
        }
        result |= _best_on_test(progress.history, self.config.selection.metric)
        if remark := describe_outcome(progress.history, result, self.config.selection.metric):
            result["remark"] = remark
            self.callback.on_message(remark)
        if progress.dropped:
            result["dropped"] = progress.dropped
        if self.config.start_from:
            result["start_from"] = self.config.start_from
        shared: dict[str, Any] = self.world.broadcast(result)
        if self.world.is_main:
            self.folder.write_result(shared)
            self.logger.finish(shared)
        self.callback.on_result(shared)
        return shared


def _describe_change(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """Returns how the photos of the classes differ, to be appended to a sentence."""
    groups = {
        "new classes": [label for label in new if label not in old],
        "missing classes": [label for label in old if label not in new],
        "classes with another number of photos": [label for label in old if new.get(label, old[label]) != old[label]],
    }
    named = [f"{name}: {list_names(labels)}" for name, labels in groups.items() if labels and old]
    return f" ({'; '.join(named)})" if named else ""


def _best_on_test(history: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Returns the epoch that papers report: chosen on the test classes, so too optimistic; only recorded."""
    best = best_trained(history, metric)
    return {"best_on_test": {"epoch": best["epoch"], **retrieval_figures(best)}} if best else {}
