"""Everything that a run works with, made from its settings: photos in batches, network, loss, optimiser."""

import hashlib
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from training.backbones import EmbeddingModel
from training.config import TrainingConfig
from training.data.feature_cache import CachedFeatures, cache_features
from training.data.loading import TrainingPhotos
from training.data.records import DataSet, Photo, fold_out, hold_out
from training.data.sampling import BalancedBatches, Batches, RandomBatches
from training.evaluate import Examiner
from training.losses.distributed import gather_batch
from training.losses.registry import make_loss, setting_names
from training.losses.sample_aware import SampleAwareProxyLoss
from training.recording import Watcher
from training.world import World


@dataclass
class Workshop:
    """The moving parts of a run; together they are its whole state."""

    model: EmbeddingModel
    loss: nn.Module
    network: nn.Module
    """What embeds a batch: the model, or its head on cached features; over all processes."""
    criterion: nn.Module
    batches: Batches
    loader: DataLoader[Any]
    optimiser: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    half: torch.dtype | None
    """The type of mixed precision; None computes in float32."""
    test: Examiner
    validation: Examiner | None

    def _parts(self) -> dict[str, Any]:
        names = ("model", "loss", "optimiser", "schedule", "scaler")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return parts | {"random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])


def prepare(
    config: TrainingConfig, data: DataSet, out: Path, world: World, watcher: Watcher, *, pretrained: bool = True
) -> Workshop:
    """Builds a run's parts, equal on every process; `pretrained` unless a checkpoint is going to fill them."""
    torch.manual_seed(config.seed)
    photos: Sequence[Photo] = data.train
    held_out: Sequence[Photo] = ()
    selection = config.selection
    if selection.fold is not None:
        photos, held_out = fold_out(data.train, selection.fold, selection.folds, config.seed)
    elif selection.validation_share:
        photos, held_out = hold_out(data.train, selection.validation_share, config.seed)
    side = config.preprocessing.input_size
    # A frozen backbone's features are looked up by its weights, so those are needed on resuming too.
    model = EmbeddingModel(config.backbone, input_size=side, pretrained=pretrained or bool(config.cached_views))
    model = model.to(world.device).to(memory_format=torch.channels_last)
    cached = bool(config.cached_views)
    dataset: Dataset[Any] = _dataset(config, photos, model, out, world, watcher)
    batches = _batches(config, photos, world)
    loss = _loss(config, photos, len(batches), watcher).to(world.device)
    optimiser = _optimiser(config, model, loss)
    half = _half(config, world.device)

    def examiner(of: Sequence[Photo]) -> Examiner:
        return Examiner(of, config.preprocessing, world.device, frozen_backbone=cached)

    return Workshop(
        model=model,
        loss=loss,
        network=_over_processes(_Head(model) if cached else model, world),
        criterion=_over_processes(loss if isinstance(loss, SampleAwareProxyLoss) else _Gathered(loss), world),
        batches=batches,
        loader=DataLoader(dataset, batch_sampler=batches, num_workers=0 if cached else _workers(config, world.device)),
        optimiser=optimiser,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimiser, _factors(config, optimiser, len(batches))),
        scaler=torch.amp.GradScaler(world.device.type, enabled=half is torch.float16),
        half=half,
        test=examiner(data.test),
        validation=examiner(held_out) if held_out else None,
    )


class _Head(nn.Module):
    """The trainable rest of a model whose backbone's features are cached."""

    def __init__(self, model: EmbeddingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        return self.model.from_features(features)


class _Gathered(nn.Module):
    """A peer loss on the joint batch of all processes; the sample-aware losses gather by themselves."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if torch.distributed.is_initialized():
            embeddings, labels = gather_batch(embeddings, labels)
        value: Tensor = self.loss(embeddings, labels)
        return value


def _over_processes(module: nn.Module, world: World) -> nn.Module:
    """DDP averages the gradients; buffers stay the module's own affair, equal on every process by construction."""
    if world.size == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, broadcast_buffers=False)


def _dataset(
    config: TrainingConfig, photos: Sequence[Photo], model: EmbeddingModel, out: Path, world: World, watcher: Watcher
) -> TrainingPhotos | CachedFeatures:
    side = config.preprocessing.input_size
    if not config.cached_views:
        return TrainingPhotos(photos, side, config.augmentation, config.seed)
    model.freeze_backbone()

    def features(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return model.eval().features(pixels.to(world.device)).cpu()

    cache = cache_features(
        photos,
        features,
        views=config.cached_views,
        side=side,
        settings=config.augmentation,
        seed=config.seed,
        directory=out.parent / "feature-cache",
        key=f"{config.backbone.name} {config.backbone.pooling} {_digest(model.backbone)}",
        workers=_workers(config, world.device),
        on_progress=partial(watcher.busy, "Caching features"),
    )
    return CachedFeatures(cache)


def _digest(module: nn.Module) -> str:
    """Of a network's weights, whatever file they came from."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def _batches(config: TrainingConfig, photos: Sequence[Photo], world: World) -> Batches:
    sampling = config.sampling
    labels = [photo.label for photo in photos]
    if sampling.kind == "balanced":
        return BalancedBatches(
            labels,
            sampling.batch_size // sampling.photos_per_class,
            sampling.photos_per_class,
            config.seed,
            rank=world.rank,
            world_size=world.size,
        )
    return RandomBatches(len(labels), sampling.batch_size, config.seed, rank=world.rank, world_size=world.size)


def _loss(config: TrainingConfig, photos: Sequence[Photo], steps: int, watcher: Watcher) -> nn.Module:
    """The loss, told the facts of the run that a loss with a memory wants to know."""
    classes = Counter(photo.label for photo in photos)
    known = setting_names(config.loss.name)
    facts = {"steps_per_epoch": steps, "train_size": len(photos)}
    settings = {name: value for name, value in facts.items() if name in known} | config.loss.settings
    loss = make_loss(config.loss.name, len(classes), config.backbone.embedding_size, settings)
    if isinstance(loss, SampleAwareProxyLoss):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.hardness.settings.warn_if_decay_is_late(len(photos) / len(classes), config.epochs)
        for warning in caught:
            watcher.say(str(warning.message))
    return loss


def _optimiser(config: TrainingConfig, model: EmbeddingModel, loss: nn.Module) -> torch.optim.Optimizer:
    """Three groups: backbone, head, and the loss's own parameters at their own rate."""
    settings = config.optimiser
    backbone = {id(parameter) for parameter in model.backbone.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "backbone", "params": [p for p in trained if id(p) in backbone]},
        {"name": "head", "params": [p for p in trained if id(p) not in backbone]},
        {"name": "proxies", "params": list(loss.parameters()), "lr": settings.learning_rate * settings.proxy_factor},
    ]
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    used = [group for group in groups if group["params"]]
    return kind(used, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def _factors(
    config: TrainingConfig, optimiser: torch.optim.Optimizer, steps_per_epoch: int
) -> list[Callable[[int], float]]:
    """The learning rate's factor at a step, for each group: the backbone rests during the warm-up."""
    schedule, steps = config.schedule, max(1, config.epochs * steps_per_epoch)
    drop = schedule.step_epochs * steps_per_epoch
    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda step: 1.0,
        "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))),
        "step": lambda step: schedule.step_factor ** (step // drop),
    }
    shape = shapes[schedule.kind]
    rest = schedule.warm_up_epochs * steps_per_epoch

    def rested(step: int) -> float:
        return 0.0 if step < rest else shape(step)

    return [rested if group["name"] == "backbone" else shape for group in optimiser.param_groups]


def _half(config: TrainingConfig, device: torch.device) -> torch.dtype | None:
    """bfloat16 where the GPU has it, for it needs no scaling; float16 otherwise."""
    if device.type != "cuda" or not config.mixed_precision:
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def _workers(config: TrainingConfig, device: torch.device) -> int:
    """On a CPU the training itself wants the cores; one process ahead of it is enough."""
    if config.workers is not None:
        return config.workers
    return 1 if device.type == "cpu" else min(8, os.cpu_count() or 1)
