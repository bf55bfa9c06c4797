"""Settings of a training run that takes seconds, a callback that records or interrupts it, and an untrained run."""

from pathlib import Path
from typing import Any

import torch

from training.backbones import EmbeddingModel
from training.callbacks import Callback
from training.checkpoints import RunFolder
from training.config import load_config
from training.data import DataSet
from training.step_cost import RunPlan

SMALL_SETTINGS = [
    "loss.name=proxy_isa",
    "epochs=2",
    "preprocessing={resize: 36, input_size: 32}",
    "sampling.batch_size=8",
    "optimiser.learning_rate=0.0003",
    "selection.validation_share=0",
    "workers=0",
]


class RecordingCallback(Callback):
    """Records the events of a run; can interrupt it after an epoch or a step, as a kill would."""

    def __init__(self, *, stop_after_epoch: int | None = None, stop_after_step: tuple[int, int] | None = None) -> None:
        self.stop_after_epoch = stop_after_epoch
        self.stop_after_step = stop_after_step
        self.epochs: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self.messages: list[str] = []
        self.plans: list[RunPlan] = []
        self.results: list[dict[str, Any]] = []

    def on_plan(self, plan: RunPlan) -> None:
        self.plans.append(plan)

    def on_result(self, result: dict[str, Any]) -> None:
        self.results.append(result)

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        self.steps.append((epoch, step))
        if (epoch, step) == self.stop_after_step:
            raise KeyboardInterrupt

    def on_epoch(self, record: dict[str, Any]) -> None:
        self.epochs.append(record["epoch"])
        if record["epoch"] == self.stop_after_epoch:
            raise KeyboardInterrupt

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def untrained_run(folder: Path, backbone: str, data: DataSet, *, gain: float = 1) -> RunFolder:
    """Writes a finished run of a small network with random weights."""
    settings = [f"backbone={{name: {backbone}, weights: none, embedding_size: 32}}"]
    config = load_config(None, [*settings, "preprocessing={resize: 176, input_size: 160}"])
    run = RunFolder(folder)
    with run.begin(config, f"folder:{data.train[0].path.parents[1]}", resume=False):
        torch.manual_seed(1)
        model = EmbeddingModel(config.backbone, input_size=160, pretrained=False)
    with torch.no_grad():
        next(iter(model.backbone.parameters())).mul_(gain)
    run.save_best(model.state_dict())
    run.write_result({"epoch": 1, "recall@1": 0.9, "map@r": 0.8, "untrained": {"recall@1": 0.5}})
    return run
