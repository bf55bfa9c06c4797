"""The training loop, top to bottom."""

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data.checking import check_photos
from training.data.records import DataSet
from training.preparation import Workshop, prepare
from training.recording import Recorder, Watcher
from training.world import World, joined_world


@dataclass
class Progress:
    """How far a run has come; a checkpoint holds it, also in the middle of an epoch."""

    epoch: int = 0
    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Of the epoch's steps so far, for its means."""
    photos: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    best_score: float = -1.0
    """Of the best epoch on the validation classes."""

    def add(self, figures: dict[str, float], *, photos: int, seconds: float) -> None:
        """Counts a step."""
        self.step += 1
        self.photos += photos
        self.seconds += seconds
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def finish_epoch(self) -> dict[str, Any]:
        """The epoch's record, and a clean slate for the next."""
        means = {name: total / self.step for name, total in self.sums.items()}
        self.epoch += 1
        record = {"epoch": self.epoch, **means, "photos_per_second": self.photos / self.seconds}
        self.step, self.sums, self.photos, self.seconds = 0, {}, 0, 0.0
        return record


def train(
    config: TrainingConfig, data: DataSet, out: Path, spec: str, watcher: Watcher, *, resume: bool = False
) -> dict[str, Any]:
    """Trains into the run folder `out`, or goes on with the run there, and answers the chosen model's figures."""
    with joined_world(config.device) as world:
        folder = RunFolder(out)
        with folder.begun(config, spec, resume=resume) if world.is_first else nullcontext():
            if world.is_first:
                data = check_photos(data, on_progress=partial(watcher.busy, "Checking the photos"))
            data = world.share(data)
            for remark in data.remarks:
                watcher.say(remark)
            checkpoint = folder.load()
            work = prepare(config, data, out, world, watcher, pretrained=checkpoint is None)
        progress = Progress()
        if checkpoint:
            work.load_state_dict(checkpoint["work"])
            progress = Progress(**checkpoint["progress"])
        with Recorder(
            out, first_step=progress.epoch * len(work.batches) + progress.step, active=world.is_first
        ) as recorder:
            return _Training(config, folder, world, work, progress, recorder, watcher).run()


@dataclass
class _Training:
    """One call of `train`, with all that it works on."""

    config: TrainingConfig
    folder: RunFolder
    world: World
    work: Workshop
    progress: Progress
    recorder: Recorder
    watcher: Watcher

    def run(self) -> dict[str, Any]:
        if not self.progress.history:
            self.measure({"epoch": 0})
        while self.progress.epoch < self.config.epochs and not self.out_of_patience():
            self.train_epoch()
            self.measure(self.progress.finish_epoch())
            self.select()
            self.save()
        return self.finish()

    def train_epoch(self) -> None:
        """The rest of the current epoch: all of it, or what a killed run left."""
        work, progress = self.work, self.progress
        work.batches.epoch, work.batches.start_step = progress.epoch, progress.step
        work.model.train()
        saved = counted = time.monotonic()
        for inputs, labels in work.loader:
            figures = self.step(inputs.to(self.world.device), labels.to(self.world.device))
            now = time.monotonic()
            progress.add(figures, photos=len(labels) * self.world.size, seconds=now - counted)
            counted = now
            self.recorder.step(progress.epoch * len(work.batches) + progress.step, figures)
            self.watcher.step(progress.epoch, progress.step, len(work.batches))
            if now - saved > 60 * self.config.checkpoint_minutes:
                self.save()
                saved = now

    def step(self, inputs: Tensor, labels: Tensor) -> dict[str, float]:
        """Forward, backward and update on one batch."""
        work = self.work
        with torch.autocast(inputs.device.type, work.half, enabled=work.half is not None):
            embeddings = work.network(inputs)
        loss = work.criterion(embeddings.float(), labels)
        work.optimiser.zero_grad(set_to_none=True)
        work.scaler.scale(loss).backward()
        if self.config.optimiser.clip_value:
            work.scaler.unscale_(work.optimiser)
            parameters = [parameter for group in work.optimiser.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_value_(parameters, self.config.optimiser.clip_value)
        work.scaler.step(work.optimiser)
        work.scaler.update()
        (rate,) = (group["lr"] for group in work.optimiser.param_groups if group["name"] == "head")
        work.schedule.step()
        return {"loss": loss.item(), "learning_rate": rate, **getattr(work.loss, "last_report", {})}

    def measure(self, record: dict[str, Any]) -> None:
        """Completes an epoch's record: the validation classes decide, the test classes are only looked at."""
        config, work, epoch = self.config, self.work, record["epoch"]
        if self.world.is_first:
            if work.validation:
                measured = work.validation.measure(work.model, untrained=epoch == 0)
                record |= {f"validation.{name}": value for name, value in measured.items()}
            if epoch == 0 or (config.test_every and epoch % config.test_every == 0):
                record |= work.test.measure(work.model, untrained=epoch == 0)
        record = self.world.share(record)
        self.progress.history.append(record)
        self.recorder.epoch(self.progress.history, epoch * len(work.batches))
        self.watcher.measured(record)

    def select(self) -> None:
        """Keeps the model that the validation classes like best so far."""
        score = self.progress.history[-1].get(f"validation.{self.config.selection.metric}")
        if score is not None and score > self.progress.best_score:
            self.progress.best_score, self.progress.best_epoch = score, self.progress.epoch
            if self.world.is_first:
                self.folder.save_best(self.work.model.state_dict())

    def out_of_patience(self) -> bool:
        patience = self.config.selection.patience
        return patience is not None and self.progress.epoch - self.progress.best_epoch >= patience

    def save(self) -> None:
        if self.world.is_first:
            self.folder.save({"work": self.work.state_dict(), "progress": asdict(self.progress)})

    def finish(self) -> dict[str, Any]:
        """The figures of the chosen model on the test classes, looked at once more if that epoch was not."""
        history = self.progress.history
        result: dict[str, Any] = {}
        if self.world.is_first:
            chosen = self.progress.best_epoch if self.work.validation else self.progress.epoch
            result = next(record for record in history if record["epoch"] == chosen)
            if "recall@1" not in result:
                self.work.model.load_state_dict(self.folder.model().state_dict())
                result = result | self.work.test.measure(self.work.model)
            self.folder.write_result(result)
        shared: dict[str, Any] = self.world.share(result)
        return shared
