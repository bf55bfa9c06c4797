"""Builds the parts of a run from its settings: batches of photos, network, loss, optimiser."""

import hashlib
from collections.abc import Callable, Sequence
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
from training.checkpoints import REFIT
from training.config import TrainingConfig
from training.data import DataSet, Photo
from training.data.dataset import fold_out, hold_out
from training.data.feature_cache import CachedFeatures, cache_features
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
    torch.manual_seed(config.seed)
    set_precision(world.device, cudnn_benchmark=config.cudnn_benchmark, tf32=config.tf32)
    photos, held_out = train_validation_split(config, data)
    batches = _batches(config, photos, world, callback)
    model, stage = _model(config, world, callback, pretrained=pretrained)
    half = half_precision(world.device) if config.mixed_precision else None
    if pretrained:
        check_device(model, config.preprocessing.input_size, world.device, half)
    loss = _loss(config, photos, batches).to(world.device)
    optimiser = make_optimiser(config.optimiser, model, loss)
    workers = decoding_workers(config.workers, world.device.type, world.local_size)
    inputs = _Inputs(config, photos, model, stage, world, workers)
    trained: nn.Module = _TrainedPart(model, inputs.features(), half)

    def evaluator(of: Sequence[Photo]) -> Evaluator | None:
        frozen = stage if config.cached_views else 0
        return Evaluator(of, config.preprocessing, world, half=half, workers=workers, frozen=frozen) if of else None

    return TrainingSetup(
        config=config,
        world=world,
        model=model,
        loss=loss,
        trained=torch.compile(trained) if config.compile else trained,  # type: ignore[arg-type]
        criterion=_distribute(loss if isinstance(loss, SampleAwareProxyLoss) else _GatheredLoss(loss), world),
        batches=batches,
        loader=inputs.loader(batches, out, callback),
        optimiser=optimiser,
        rate=rate_factor(config, len(batches)),
        scaler=torch.amp.GradScaler(world.device.type, enabled=half is torch.float16),
        average=MovingAverage(model, config.optimiser.ema_decay) if config.optimiser.ema_decay else None,
        test=evaluator(data.test),
        validation=evaluator(held_out),
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
    model = EmbeddingModel(config.backbone, input_size=side, pretrained=pretrained or bool(config.cached_views))
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

    def loader(self, batches: Batches, out: Path, callback: Callback) -> DataLoader[Any]:
        config, pin = self.config, self.world.device.type == "cuda"
        if config.cached_views:
            return DataLoader(self._load_cache(out, callback), batch_sampler=batches, pin_memory=pin)
        decoded = TrainingPhotos(self.photos, config.preprocessing.input_size, config.augmentation, config.seed)
        keep = self.workers > 0
        return DataLoader(
            decoded, batch_sampler=batches, num_workers=self.workers, pin_memory=pin, persistent_workers=keep
        )

    def _load_cache(self, out: Path, callback: Callback) -> CachedFeatures:
        config, backbone = self.config, self.config.backbone
        cache = cache_features(
            self.photos,
            self._activations,
            views=config.cached_views,
            side=config.preprocessing.input_size,
            settings=config.augmentation,
            seed=config.seed,
            directory=(out.parent.parent if out.name == REFIT else out.parent) / "feature-cache",
            key=f"{backbone.name} {backbone.pooling if self.stage is None else self.stage}"
            f" {_digest(self.model.backbone)}",
            workers=self.workers,
            on_progress=partial(callback.on_progress, "Caching features"),
        )
        return CachedFeatures(cache)

    def _activations(self, pixels: Tensor) -> Tensor:
        model, pixels = self.model.eval(), pixels.to(self.world.device)
        return model.features(pixels) if self.stage is None else model.activations(pixels, self.stage)

    def features(self) -> Callable[[Tensor], Tensor]:
        """Returns the function from what the loader yields to pooled features."""
        if not self.config.cached_views:
            return self.model.features
        return Tensor.float if self.stage is None else partial(self.model.features_from, stage=self.stage)


def _digest(module: nn.Module) -> str:
    """Returns a digest of a network's weights."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def _text_digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _batches(config: TrainingConfig, photos: Sequence[Photo], world: ProcessGroup, callback: Callback) -> Batches:
    """Makes the sampler, by default a balanced one for losses on pairs, which need positives in the batch."""
    sampling, labels = config.sampling, [photo.label for photo in photos]
    on_pairs = learns_from_pairs(config.loss.name)
    if sampling.kind == "auto":
        sampling = sampling.model_copy(update={"kind": "balanced" if on_pairs else "random"})
    if sampling.kind == "balanced" and sampling.batch_size % sampling.photos_per_class:
        raise TrainingError(
            f"sampling.batch_size={sampling.batch_size} is not a multiple of"
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
    text = f"V = {settings.volume:.4g} ({'as set' if by_hand else 'from the planned epochs'})"
    if settings.first_filter_step >= steps:
        start = settings.first_filter_step / len(work.batches)
        return f"{text} never acts: positives are weighed from epoch {start:g} on, counted from 0. Train longer."
    if needed >= planned:
        return f"{text} never acts: its half-decay needs {needed:.1f} samples per class, {planned:.0f} are planned."
    share = f"{needed:.0f} of {planned:.0f} samples per class ({needed / planned:.0%})"
    return f"{text}: half-decay of learned positives after {share}."


def _planned_samples(config: TrainingConfig, photos: Sequence[Photo], batches: Batches) -> float:
    """Returns how many photos per class the planned epochs show on average."""
    classes = len({photo.label for photo in photos})
    shown = len(photos) if config.sampling.steps_per_epoch is None else len(batches) * config.sampling.batch_size
    return config.epochs * shown / classes
