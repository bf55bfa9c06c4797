"""The settings of a training run: one validated file, with overrides from the command line."""

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from index.images import Preprocessing
from index.items import Frozen
from training.errors import TrainingError


class BackboneSettings(Frozen):
    """The network from pixels to vectors."""

    name: str = Field(default="efficientnet_lite0", description="a name of docs/backbones.md, or any timm model")
    weights: str = Field(default="auto", description="auto, package, hub, none or the path of a file")
    pooling: Literal["default", "avg", "max", "avg+max"] = Field(
        default="default", description="the model's own, or the final feature map's mean, maximum or their sum"
    )
    layer_norm: bool = Field(default=False, description="normalise the features before the head")
    embedding_size: int = Field(default=512, gt=0)
    freeze_batch_norm: bool = True


class LossSettings(Frozen):
    """A loss of the registry and its own settings."""

    name: str = "proxy_isa"
    settings: dict[str, Any] = {}


class AugmentationSettings(Frozen):
    """Random resized crop and horizontal flip, as in the paper."""

    crop_scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.2, 1.0)
    flip: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> "AugmentationSettings":
        if self.crop_scale[0] > self.crop_scale[1]:
            raise ValueError(f"crop_scale must be (smallest, largest), got {self.crop_scale}")
        return self


class SamplingSettings(Frozen):
    """How photos are put into batches."""

    kind: Literal["random", "balanced"] = "random"
    batch_size: int = Field(default=128, gt=1, description="over all processes together")
    photos_per_class: int = Field(default=4, gt=1, description="of a class in a balanced batch")

    @model_validator(mode="after")
    def _whole_classes(self) -> "SamplingSettings":
        if self.kind == "balanced" and self.batch_size % self.photos_per_class:
            raise ValueError(f"batch_size {self.batch_size} is no multiple of photos_per_class {self.photos_per_class}")
        return self


class OptimiserSettings(Frozen):
    """How the weights move; the loss's own parameters (proxies) are a group of their own."""

    name: Literal["adam", "adamw"] = "adamw"
    learning_rate: float = Field(default=1e-4, gt=0)
    proxy_factor: float = Field(default=100.0, gt=0, description="the loss's parameters learn this much faster")
    weight_decay: float = Field(default=1e-4, ge=0)
    clip_value: float | None = Field(default=10.0, gt=0, description="bound of every entry of a gradient")


class ScheduleSettings(Frozen):
    """How the learning rate changes over a run."""

    kind: Literal["constant", "cosine", "step"] = "cosine"
    step_epochs: int = Field(default=5, gt=0, description="with `step`: epochs between two drops")
    step_factor: float = Field(default=0.5, gt=0, le=1, description="with `step`: what remains after a drop")
    warm_up_epochs: int = Field(default=0, ge=0, description="first epochs that train only the head and the proxies")


class SelectionSettings(Frozen):
    """Which epoch's model is kept: judged on training classes held out for it, never on the test classes."""

    validation_share: float = Field(default=0.15, ge=0, lt=1, description="of the training classes; 0 keeps the last")
    fold: int | None = Field(default=None, ge=0, description="hold out this fold of the classes instead of a share")
    folds: int = Field(default=4, gt=1)
    metric: Literal["recall@1", "map@r"] = "map@r"
    patience: int | None = Field(default=None, gt=0, description="stop after so many epochs without a better one")

    @model_validator(mode="after")
    def _judged(self) -> "SelectionSettings":
        if self.fold is not None and self.fold >= self.folds:
            raise ValueError(f"fold {self.fold} is none of the {self.folds} folds, which count from 0")
        if self.patience and not self.validation_share and self.fold is None:
            raise ValueError("patience needs a validation_share above 0 or a fold to judge by")
        return self


class TrainingConfig(Frozen):
    """Everything that decides a run's result, apart from the photos themselves."""

    backbone: BackboneSettings = BackboneSettings()
    loss: LossSettings = LossSettings()
    preprocessing: Preprocessing = Preprocessing(resize=256, input_size=224)
    augmentation: AugmentationSettings = AugmentationSettings()
    sampling: SamplingSettings = SamplingSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    selection: SelectionSettings = SelectionSettings()
    epochs: int = Field(default=40, ge=0)
    seed: int = Field(default=0, ge=0)
    cached_views: int = Field(
        default=0, ge=0, description="train only the head, on this many cached views of every photo; 0 trains it all"
    )
    test_every: int = Field(default=1, ge=0, description="epochs between two looks at the test classes; 0: at the end")
    mixed_precision: bool = Field(default=True, description="on CUDA; elsewhere it is float32")
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    workers: int | None = Field(default=None, ge=0, description="processes that decode photos; by default chosen")
    checkpoint_minutes: float = Field(default=10, gt=0, description="between checkpoints within a long epoch")


def load_config(file: Path | None, overrides: list[str], preset: str | None = None) -> TrainingConfig:
    """Defaults, then a preset, then the file, then `key=value` overrides with dotted keys."""
    raw: dict[str, Any] = {}
    if preset and (text := _preset(preset)):
        raw = yaml.safe_load(text)
    if file:
        if not file.is_file():
            raise TrainingError(f"No configuration file at {file}.", "Check the path given with --config.")
        raw = _layered(raw, _parsed_file(file))
    raw = _layered(raw, _parsed_overrides(overrides))
    try:
        return TrainingConfig.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
        raise TrainingError("Bad training settings: " + "; ".join(lines) + ".", "See docs/train.md.") from None


def _preset(name: str) -> str | None:
    file = resources.files("training") / "presets" / f"{name}.yaml"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _parsed_file(file: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TrainingError(f"{file} is not YAML: {error}.", "Mend the file.") from None
    if not isinstance(raw, dict):
        raise TrainingError(f"{file} holds no settings.", "Write them as `key: value` lines.")
    return raw


def _parsed_overrides(overrides: list[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise TrainingError(f"--set {override} has no '='.", "Write it as --set key=value, e.g. epochs=5.")
        try:
            nested: Any = yaml.safe_load(value)
        except yaml.YAMLError:
            raise TrainingError(f"--set {override}: the value is not YAML.", "Quote it, e.g. 'key={a: 1}'.") from None
        for part in reversed(key.split(".")):
            nested = {part: nested}
        parsed = _merged(parsed, nested)
    return parsed


def _layered(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`; another loss does not inherit the settings of the one below."""
    loss, other = base.get("loss"), over.get("loss")
    if isinstance(loss, dict) and isinstance(other, dict) and other.get("name", loss.get("name")) != loss.get("name"):
        base = base | {"loss": {}}
    return _merged(base, over)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
