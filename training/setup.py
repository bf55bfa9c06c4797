"""Builds the parts of a run from its settings: batches of photos, network, loss, optimiser."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.layers.norm_act import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from training.backbones import EmbeddingModel
from training.callbacks import Callback
from training.checkpoints import REFIT, RunFolder
from training.config import DEFAULT_BATCH_SIZE, TrainingConfig
from training.data import DataSet, Photo
from training.data.dataset import check_learnable, fold_out, hold_out
from training.data.feature_cache import CachedFeatures, FeatureStore
from training.data.samplers import Batches, expected_positives, make_batches
from training.data.torch_datasets import TrainingPhotos, decoding_workers
from training.devices import check_device, half_precision, set_precision
from training.distributed import ProcessGroup
from training.errors import TrainingError
from training.evaluation import Evaluator
from training.losses.class_state import HardnessSettings, volume_for
from training.losses.gather import gather_batch
from training.losses.registry import learns_from_pairs, make_loss, parse_loss_settings, setting_names
from training.losses.sample_aware import SampleAwareProxyLoss
from training.optimizers import Factor, MovingAverage, make_optimiser, rate_factor
from training.step_cost import RunPlan, available_memory, format_bytes, measure_step

_FOLD = re.compile(r"fold-\d+")
_FEW_POSITIVES = 0.5
"""Share of photos with a positive in their batch below which a loss on pairs gets a warning."""


@dataclass
class TrainingSetup:
    """The parts of a run; together they are its state."""

    config: TrainingConfig
    world: ProcessGroup
    model: EmbeddingModel
    loss: nn.Module
    trained: nn.Module
    """From the loader's tensors to vectors, on this process alone."""
    criterion: nn.Module
    batches: Batches
    loader: DataLoader[Any]
    blank_inputs: Callable[[int], Tensor]
    """Makes so many blank inputs of the network."""
    optimiser: torch.optim.Optimizer
    rate: Factor
    scaler: torch.amp.GradScaler
    average: MovingAverage | None
    test: Evaluator | None
    validation: Evaluator | None
    photos: tuple[Sequence[Photo], ...]
    """Training, validation and test photos."""
    network: nn.Module = field(init=False)
    """The trained part over all processes."""
    initial: dict[str, str] = field(init=False)
    """Digests of the initial weights, of the first epoch's batches and of the photos: equal ones make two runs
    comparable."""

    def __post_init__(self) -> None:
        self._backbone = [parameter for parameter in self.model.backbone.parameters() if parameter.requires_grad]
        self._warming_up: bool | None = None
        self.initial = {
            "weights": _digest(self.model),
            "batches": _text_digest(list(self.batches)),
            "photos": _text_digest([(p.label, p.path.name, p.box) for part in self.photos for p in part]),
        }

    def class_sizes(self) -> dict[str, int]:
        """Returns the number of photos of each class, to learn and to measure."""
        return dict(Counter(photo.label for part in self.photos for photo in part))

    @property
    def measured(self) -> EmbeddingModel:
        """The model that is measured, kept and exported."""
        return self.average.model if self.average else self.model

    def begin_epoch(self, epoch: int, start_step: int) -> None:
        """Sets batches and network to a place in the run; during the warm-up the backbone has no gradient."""
        self.batches.epoch, self.batches.start_step = epoch, start_step
        warming_up = epoch < self.config.schedule.warm_up_epochs
        if warming_up != self._warming_up:
            self._warming_up = warming_up
            for parameter in self._backbone:
                parameter.requires_grad_(not warming_up)
            # DDP inspects the parameters when it is created; the old one must be freed before.
            self.network = nn.Identity()
            self.network = _distribute(self.trained, self.world)
        self.model.train()

    def _parts(self) -> dict[str, Any]:
        names = ("model", "loss", "optimiser", "scaler", "average")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])


def prepare_training(
    config: TrainingConfig,
    data: DataSet,
    out: Path,
    world: ProcessGroup,
    callback: Callback,
    *,
    pretrained: bool = True,
) -> TrainingSetup:
    """Builds a run's parts, equal on every process; `pretrained` unless a checkpoint is going to fill them."""
    check_learnable(data)
    torch.manual_seed(config.seed)
    set_precision(world.device, cudnn_benchmark=config.cudnn_benchmark, tf32=config.tf32)
    photos, held_out = train_validation_split(config, data)
    model, stage = _model(config, world, callback, pretrained=pretrained)
    half = half_precision(world.device) if config.mixed_precision else None
    workers = decoding_workers(config.workers, world.device.type, world.local_size)
    inputs = _Inputs(config, photos, model, stage, world, workers)
    trained: nn.Module = _TrainedPart(model, inputs.features(), half)
    if config.sampling.batch_size == "auto":
        config = _choose_batch(config, trained, inputs)
    batches = _batches(config, photos, world, callback)
    if pretrained:
        check_device(model, config.preprocessing.input_size, world.device, half)
    loss = _loss(config, photos, batches).to(world.device)
    optimiser = make_optimiser(config.optimiser, model, loss)

    store = feature_store(config, model, stage, out, world, workers) if config.cached_views else None

    def evaluator(of: Sequence[Photo], name: str) -> Evaluator | None:
        if not of:
            return None
        on_progress = partial(callback.on_progress, f"Embedding the {name} photos")
        kept: dict[str, Any] = {"store": store, "frozen": stage, "on_progress": on_progress}
        return Evaluator(of, config.preprocessing, world, half=half, workers=workers, **kept)

    return TrainingSetup(
        config=config,
        world=world,
        model=model,
        loss=loss,
        trained=torch.compile(trained) if config.compile else trained,  # type: ignore[arg-type]
        criterion=_distribute(loss if isinstance(loss, SampleAwareProxyLoss) else _GatheredLoss(loss), world),
        batches=batches,
        loader=inputs.loader(batches, store, callback),
        blank_inputs=inputs.blank,
        optimiser=optimiser,
        rate=rate_factor(config, len(batches)),
        scaler=torch.amp.GradScaler(world.device.type, enabled=half is torch.float16),
        average=MovingAverage(model, config.optimiser.ema_decay) if config.optimiser.ema_decay else None,
        test=evaluator(data.test, "test"),
        validation=evaluator(held_out, "validation"),
        photos=(photos, held_out, data.test),
    )


def train_validation_split(config: TrainingConfig, data: DataSet) -> tuple[Sequence[Photo], Sequence[Photo]]:
    """Returns the training photos, and the validation photos that select the epoch."""
    selection = config.selection
    if selection.fold is not None:
        return fold_out(data.train, selection.fold, selection.folds, config.seed)
    if selection.validation_share:
        return hold_out(data.train, selection.validation_share, config.seed)
    return data.train, ()


def _model(
    config: TrainingConfig, world: ProcessGroup, callback: Callback, *, pretrained: bool
) -> tuple[EmbeddingModel, int | None]:
    """Returns the network with its frozen parts, and the number of cached stages: None when only the head learns."""
    side = config.preprocessing.input_size
    # Cached activations are looked up by the weights that made them, so those are needed on resuming too.
    pretrained = pretrained or bool(config.cached_views)
    model = EmbeddingModel(config.backbone, input_size=side, pretrained=pretrained and config.start_from is None)
    if pretrained and config.start_from is not None:
        _load_earlier_run(model, RunFolder(Path(config.start_from)), callback)
    if config.backbone.batch_norm == "learn" and world.size > 1:
        if world.device.type == "cuda":
            model = convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        else:
            callback.on_message("Batch norm uses each process's part of the batch: SyncBatchNorm needs CUDA.")
    model = model.to(world.device).to(memory_format=torch.channels_last)
    stage = None if config.cached_stage is None else model.stage_index(config.cached_stage)
    if stage == 0:
        raise TrainingError(
            f"cached_stage={config.cached_stage} caches nothing: there is no stage before the first.",
            f"Choose from 1 to {len(model.stage_names())} ({', '.join(model.stage_names())}), or cached_views=0.",
        )
    if config.cached_views and stage is None:
        model.freeze_backbone()
    model.freeze_stages(config.backbone.frozen_stages)
    model.freeze_stages(stage or 0)
    if world.size > 1 and (unused := model.freeze_unused()):
        callback.on_message(
            f"{len(unused)} parameters of the backbone are unused and not trained, such as {unused[0]}."
        )
    return model, stage


def _load_earlier_run(model: EmbeddingModel, run: RunFolder, callback: Callback) -> None:
    """Takes the backbone of an earlier run's kept model, and its head if that has the same size."""
    state, target = run.model().state_dict(), model.state_dict()
    misfits = [name for name in target if name.startswith("backbone.") and _shape(state, name) != target[name].shape]
    if misfits:
        raise TrainingError(
            f"start_from={run.path} has the backbone {run.config.backbone.name}, which does not fit ({misfits[0]}).",
            f"Set backbone.name={run.config.backbone.name}, or start from a run with this backbone.",
        )
    fitting = {name: value for name, value in state.items() if _shape(target, name) == value.shape}
    model.load_state_dict(fitting, strict=False)
    parts = "backbone and head" if "head.weight" in fitting else "backbone; its head has another size"
    callback.on_message(f"Starts from {run.path}: {parts}.")
    if run.is_refit:
        callback.on_message(
            f"Warning: {run.path} was trained on all its products, so figures on them are too high."
            f" Start from {run.path.parent} to measure on products that were never learned."
        )


def _shape(state: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return state[name].shape if name in state else None


class _TrainedPart(nn.Module):
    """The forward pass of a step: up to vectors of any length, which each loss normalises as it needs."""

    def __init__(self, model: EmbeddingModel, features: Callable[[Tensor], Tensor], half: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self._features, self._half = features, half

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, self._half, enabled=self._half is not None):
            features = self._features(inputs)
        return self.model.embed(features)


class _GatheredLoss(nn.Module):
    """A peer loss on the joint batch of all processes; the sample-aware losses gather internally."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if torch.distributed.is_initialized():
            embeddings, labels = gather_batch(embeddings, labels)
        value: Tensor = self.loss(embeddings, labels)
        return value


def _distribute(module: nn.Module, world: ProcessGroup) -> nn.Module:
    """Wraps a module in DDP, which averages gradients; buffers are equal on every process by construction."""
    if world.size == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, broadcast_buffers=False)


@dataclass(frozen=True)
class _Inputs:
    """The source of a step's inputs: decoded photos, or cached activations."""

    config: TrainingConfig
    photos: Sequence[Photo]
    model: EmbeddingModel
    stage: int | None
    """The number of cached stages; None means the whole backbone."""
    world: ProcessGroup
    workers: int

    def loader(self, batches: Batches, store: FeatureStore | None, callback: Callback) -> DataLoader[Any]:
        config, pin = self.config, self.world.device.type == "cuda"
        if store:
            return DataLoader(self._load_cache(store, callback), batch_sampler=batches, pin_memory=pin)
        rule = config.preprocessing
        decoded = TrainingPhotos(self.photos, rule.input_size, config.augmentation, config.seed, rule.fit)
        keep = self.workers > 0
        return DataLoader(
            decoded, batch_sampler=batches, num_workers=self.workers, pin_memory=pin, persistent_workers=keep
        )

    def _load_cache(self, store: FeatureStore, callback: Callback) -> CachedFeatures:
        config, rule = self.config, self.config.preprocessing
        on_progress = partial(callback.on_progress, "Caching features")
        cache = store.cache_views(
            self.photos, config.cached_views, rule.input_size, config.augmentation, rule.fit, on_progress
        )
        callback.on_message(
            f"Cached features: {cache.places.size:,} rows of this run in {store.directory},"
            f" which holds {format_bytes(store.size())}."
        )
        return CachedFeatures(cache)

    def blank(self, count: int) -> Tensor:
        """Returns inputs of a step, as the loader yields them, of blank photos."""
        side = self.config.preprocessing.input_size
        pixels = torch.zeros((count, side, side, 3), dtype=torch.uint8, device=self.world.device)
        if not self.config.cached_views:
            return pixels
        with torch.no_grad():
            return _frozen_part(self.model, self.stage, pixels).half()

    def features(self) -> Callable[[Tensor], Tensor]:
        """Returns the function from what the loader yields to pooled features."""
        if not self.config.cached_views:
            return self.model.features
        return Tensor.float if self.stage is None else partial(self.model.features_from, stage=self.stage)


def feature_store(
    config: TrainingConfig, model: EmbeddingModel, stage: int | None, out: Path, world: ProcessGroup, workers: int
) -> FeatureStore:
    """Returns the cache of the frozen part of a run's model; the runs of a folder share one, with refits and folds."""
    while out.name == REFIT or _FOLD.fullmatch(out.name):
        out = out.parent
    backbone = config.backbone
    return FeatureStore(
        out.parent / "feature-cache",
        lambda pixels: _frozen_part(model, stage, pixels.to(world.device)),
        f"{backbone.name} {backbone.pooling if stage is None else stage} {_digest(model.backbone)}",
        workers,
    )


def _frozen_part(model: EmbeddingModel, stage: int | None, pixels: Tensor) -> Tensor:
    model.eval()
    return model.features(pixels) if stage is None else model.activations(pixels, stage)


def _digest(module: nn.Module) -> str:
    """Returns a digest of a network's weights."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def _text_digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _choose_batch(config: TrainingConfig, trained: nn.Module, inputs: _Inputs) -> TrainingConfig:
    """Returns the settings with the default batch size, or a smaller one that fits, accumulated to the default."""
    world, classes = inputs.world, len({photo.label for photo in inputs.photos})
    cost = measure_step(trained, inputs.blank, classes * config.backbone.embedding_size)
    kind = config.sampling.kind
    balanced = kind == "balanced" or (kind == "auto" and learns_from_pairs(config.loss.name))
    divisor = math.lcm(world.size, config.sampling.photos_per_class if balanced else 1)
    largest = math.ceil(DEFAULT_BATCH_SIZE / divisor) * divisor
    memory = available_memory(world.device, world.local_size) * world.size
    batch = world.broadcast(cost.fitting_batch(memory, divisor, largest=largest))
    sampling = config.sampling.model_copy(update={"batch_size": batch})
    together = config.optimiser.accumulation * max(1, round(largest / batch))
    optimiser = config.optimiser.model_copy(update={"accumulation": together})
    return config.model_copy(update={"sampling": sampling, "optimiser": optimiser})


def plan_run(work: TrainingSetup, *, chosen: bool) -> RunPlan:
    """Measures a step on blank photos and estimates the memory and the time of the run."""
    config, world, (photos, *measured) = work.config, work.world, work.photos
    classes, batch = len({photo.label for photo in photos}), work.batches.batch_size
    network = getattr(work.trained, "_orig_mod", work.trained)  # not compiled for batches that never come again
    cost = measure_step(network, work.blank_inputs, classes * config.backbone.embedding_size)
    available = available_memory(world.device, world.local_size)
    own = math.ceil(batch / world.size)
    embedded = 0 if config.cached_views else sum(map(len, measured)) / world.size
    return RunPlan(
        photos=len(photos),
        classes=classes,
        epochs=config.last_epoch,
        batch_size=batch,
        accumulation=config.optimiser.accumulation,
        steps=len(work.batches),
        learns=_describe_learning(work),
        memory=cost.memory(own),
        available=available,
        epoch_seconds=len(work.batches) * own * cost.photo_seconds + embedded * cost.forward_seconds,
        fitting_batch=cost.fitting_batch(available, largest=own) * world.size,
        chosen=chosen,
    )


def _describe_learning(work: TrainingSetup) -> str:
    config = work.config
    cached = f" on {config.cached_views} cached views of each photo" if config.cached_views else ""
    learns = "All weights learn"
    if config.cached_views:
        learns = "The last stages and the head learn" if config.cached_stage is not None else "Only the head learns"
    return f"{learns}{cached}, with {config.loss.name} at a learning rate of {config.optimiser.learning_rate:g}"


def _batches(config: TrainingConfig, photos: Sequence[Photo], world: ProcessGroup, callback: Callback) -> Batches:
    """Makes the sampler, by default a balanced one for losses on pairs, which need positives in the batch."""
    sampling, labels = config.sampling, [photo.label for photo in photos]
    on_pairs = learns_from_pairs(config.loss.name)
    if sampling.kind == "auto":
        sampling = sampling.model_copy(update={"kind": "balanced" if on_pairs else "random"})
    batch = sampling.batch_size
    if sampling.kind == "balanced" and batch != "auto" and batch % sampling.photos_per_class:
        raise TrainingError(
            f"sampling.batch_size={batch} is not a multiple of"
            f" photos_per_class={sampling.photos_per_class}, and {config.loss.name} takes balanced batches.",
            "Choose a multiple, or set sampling.kind=random.",
        )
    batches = make_batches(sampling, labels, config.seed, rank=world.rank, world_size=world.size)
    if on_pairs and (share := expected_positives(sampling, labels)) < _FEW_POSITIVES:
        callback.on_message(
            f"Only {share:.0%} of the photos have a positive in their batch, which {config.loss.name} needs:"
            " set sampling.kind=balanced."
        )
    return batches


def _loss(config: TrainingConfig, photos: Sequence[Photo], batches: Batches) -> nn.Module:
    """Makes the loss, with the sizes of the run that its state depends on."""
    classes = {photo.label for photo in photos}
    known = setting_names(config.loss.name)
    sizes: dict[str, Any] = {"steps_per_epoch": len(batches), "train_size": len(photos)}
    settings = {name: value for name, value in sizes.items() if name in known} | config.loss.settings
    parsed = parse_loss_settings(config.loss.name, settings)
    if isinstance(parsed, HardnessSettings) and "volume" not in settings:
        settings["volume"] = volume_for(_planned_samples(config, photos, batches), parsed.tau)
    return make_loss(config.loss.name, len(classes), config.backbone.embedding_size, settings)


def describe_volume(work: TrainingSetup) -> str | None:
    """Describes the V of a Proxy-ISA loss and when its decay acts; call it after a checkpoint was loaded."""
    if not isinstance(work.loss, SampleAwareProxyLoss) or work.loss.hardness.settings.positive_penalty != "sigma":
        return None
    settings, planned = work.loss.hardness.settings, _planned_samples(work.config, work.photos[0], work.batches)
    needed, steps = settings.half_decay_samples(), work.config.epochs * len(work.batches)
    by_hand = "volume" in work.config.loss.settings
    text = f"V = {settings.volume:.4g} ({'as set' if by_hand else 'chosen from the planned epochs'})"
    if settings.first_filter_step >= steps:
        start = settings.first_filter_step / len(work.batches)
        return f"{text} never acts: positives are weighed from epoch {start:g} on, counted from 0. Train longer."
    if needed >= planned:
        fitting = volume_for(planned, settings.tau)
        remedy = f"Set loss.settings.volume={fitting:.4g}, or leave it out." if by_hand else "Train longer."
        few = f"its half-decay needs {needed:.1f} samples per class, {planned:.0f} are planned"
        return f"{text} never acts: {few}. {remedy}"
    share = f"{needed:.0f} of {planned:.0f} samples per class ({needed / planned:.0%})"
    return f"{text}: half-decay of learned positives after {share}."


def _planned_samples(config: TrainingConfig, photos: Sequence[Photo], batches: Batches) -> float:
    """Returns how many photos per class the planned epochs show on average."""
    classes = len({photo.label for photo in photos})
    shown = len(photos) if config.sampling.steps_per_epoch is None else len(batches) * batches.batch_size
    return config.epochs * shown / classes
