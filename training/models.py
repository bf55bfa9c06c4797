"""The models that are measured and compared: runs, their checkpoint files, bundles, and pretrained backbones."""

from dataclasses import dataclass
from pathlib import Path

from index.embedding.bundle import Bundle
from index.embedding.images import Preprocessing
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.config import TrainingConfig, load_config
from training.errors import TrainingError
from training.evaluation import Embed, is_bundle, load_model, measuring_embedder
from training.seen_classes import SeenClasses

_BACKBONE = "backbone:"


@dataclass(frozen=True)
class MeasuredModel:
    """A model as it was named, ready to embed photos."""

    name: str
    preprocessing: Preprocessing
    embed: Embed
    seen: SeenClasses | None
    """None if the model has no record of them."""
    bundle: Bundle | None = None
    run: RunFolder | None = None
    """Of a run's kept epoch, not of another checkpoint file in it."""


def open_model(name: str) -> MeasuredModel:
    """Opens a run, a checkpoint file in a run, a bundle, or `backbone:NAME`."""
    if is_backbone(name):
        config, model = load_backbone(name)
        rule = config.preprocessing
        return MeasuredModel(name, rule, measuring_embedder(model, rule.input_size), SeenClasses())
    path = Path(name)
    preprocessing, embed = load_model(path)
    if is_bundle(path):
        bundle = Bundle.load(path)
        return MeasuredModel(name, preprocessing, embed, SeenClasses.of_bundle(bundle), bundle)
    if path.is_file():
        return MeasuredModel(name, preprocessing, embed, RunFolder(path.parent).seen_classes(path))
    return MeasuredModel(name, preprocessing, embed, RunFolder(path).seen_classes(), run=RunFolder(path))


def is_backbone(name: str) -> bool:
    """Returns whether a model's name is `backbone:NAME`, not a path."""
    return name.startswith(_BACKBONE)


def load_backbone(name: str) -> tuple[TrainingConfig, EmbeddingModel]:
    """Returns the settings and the model of `backbone:NAME[,key=value...]`, in evaluation mode.

    Its vectors are the backbone's features. Images have the size that it was pretrained with unless that is set.
    """
    backbone, *overrides = name.removeprefix(_BACKBONE).split(",")
    if not backbone:
        raise TrainingError(f"{name!r} names no backbone.", "Write it as backbone:efficientnet_lite0.")
    overrides = [f"backbone.name={backbone}", *overrides]
    config = load_config(None, overrides)
    chosen = any(override.startswith("preprocessing") for override in overrides)
    side = config.preprocessing.input_size if chosen else None
    model = EmbeddingModel(config.backbone, input_size=side, head=False).eval()
    if not chosen:
        config = load_config(None, [*overrides, f"preprocessing.input_size={model.input_size}"])
    return config, model
