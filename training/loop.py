"""The training loop, top to bottom."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data.loading import EpochSampler, TrainingPhotos
from training.data.photos import DataSet
from training.devices import choose_device
from training.evaluate import measure, torch_embedder
from training.losses.registry import make_loss, setting_names


class Watcher(Protocol):
    """Whoever wants to see a run advance: a progress bar, a log."""

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        """After every step."""

    def measured(self, epoch: int, record: dict[str, Any]) -> None:
        """After an epoch, and before the first one as epoch 0."""


def train(config: TrainingConfig, data: DataSet, out: Path, spec: str, watcher: Watcher) -> dict[str, Any]:
    """Trains a model into the run folder `out`, or goes on with it, and answers the last measurement."""
    run = RunFolder(out)
    run.start(config, spec)
    device = choose_device(config.device)
    torch.manual_seed(config.seed)

    photos = TrainingPhotos(data.train, config.preprocessing.input_size, config.augmentation, config.seed)
    sampler = EpochSampler(len(photos), config.batch_size, config.seed)
    # The workers read (epoch, index) keys, so they must start anew each epoch: cheap, and nothing is carried along.
    loader = DataLoader(photos, batch_sampler=sampler, num_workers=_workers(config, device))

    model = EmbeddingModel(config.backbone).to(device).to(memory_format=torch.channels_last)
    loss_function = make_loss(
        config.loss.name,
        num_classes=len(photos.classes),
        embedding_size=config.backbone.embedding_size,
        settings=_loss_settings(config, steps=len(sampler), photos=len(photos)),
    ).to(device)
    groups = [{"params": list(model.parameters()), "lr": config.learning_rate}]
    if proxies := list(loss_function.parameters()):
        groups.append({"params": proxies, "lr": config.learning_rate * config.proxy_learning_rate_factor})
    optimiser = torch.optim.AdamW(groups, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _schedule(config, config.epochs * len(sampler)))
    parts: dict[str, Any] = {"model": model, "loss": loss_function, "optimiser": optimiser, "schedule": schedule}

    history: list[dict[str, Any]] = []
    if checkpoint := run.load():
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        history = checkpoint["history"]
    else:
        before = measure(data.test, config.preprocessing, torch_embedder(model.eval().features, device))
        history = [{"epoch": 0, **before}]
        watcher.measured(0, history[-1])

    for epoch in range(len(history) - 1, config.epochs):
        sampler.epoch = epoch
        model.train()
        total = 0.0
        for step, (pixels, labels) in enumerate(loader):
            embeddings = model(pixels.to(device, non_blocking=True))
            loss = loss_function(embeddings, labels.to(device, non_blocking=True))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item()
            watcher.step(epoch, step + 1, len(sampler), loss.item())
        after = measure(data.test, config.preprocessing, torch_embedder(model.eval(), device))
        history.append({"epoch": epoch + 1, "loss": total / len(sampler), **after})
        run.save({name: part.state_dict() for name, part in parts.items()} | {"history": history})
        run.write_metrics(history)
        watcher.measured(epoch + 1, history[-1])
    return history[-1]


def _schedule(config: TrainingConfig, steps: int) -> Callable[[int], float]:
    """The learning rate's factor at a step."""
    if config.schedule == "constant":
        return lambda step: 1.0
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))


def _loss_settings(config: TrainingConfig, *, steps: int, photos: int) -> dict[str, Any]:
    """The run's own facts, which a loss with a memory wants to know, unless the settings say otherwise."""
    facts = {"steps_per_epoch": steps, "train_size": photos}
    known = setting_names(config.loss.name)
    return {name: value for name, value in facts.items() if name in known} | config.loss.settings


def _workers(config: TrainingConfig, device: torch.device) -> int:
    """On a CPU the training itself wants the cores; one process ahead of it is enough."""
    if config.workers is not None:
        return config.workers
    return 1 if device.type == "cpu" else min(8, os.cpu_count() or 1)
