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

    name: str = Field(default="efficientnet_lite0", description="efficientnet_lite0 or any timm model")
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


class TrainingConfig(Frozen):
    """Everything that decides a run's result, apart from the photos themselves."""

    backbone: BackboneSettings = BackboneSettings()
    loss: LossSettings = LossSettings()
    preprocessing: Preprocessing = Preprocessing(resize=256, input_size=224)
    augmentation: AugmentationSettings = AugmentationSettings()
    epochs: int = Field(default=40, ge=0)
    batch_size: int = Field(default=128, gt=1)
    learning_rate: float = Field(default=1e-4, gt=0)
    proxy_learning_rate_factor: float = Field(
        default=100.0, gt=0, description="the loss's own parameters learn this much faster"
    )
    weight_decay: float = Field(default=1e-4, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    workers: int | None = Field(default=None, ge=0, description="processes that decode photos; by default chosen")


def load_config(file: Path | None, overrides: list[str], preset: str | None = None) -> TrainingConfig:
    """Defaults, then a preset, then the file, then `key=value` overrides with dotted keys."""
    raw: dict[str, Any] = {}
    if preset and (text := _preset(preset)):
        raw = yaml.safe_load(text)
    if file:
        if not file.is_file():
            raise TrainingError(f"No configuration file at {file}.", "Check the path given with --config.")
        raw = _merged(raw, _parsed_file(file))
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise TrainingError(f"--set {override} has no '='.", "Write it as --set key=value, e.g. epochs=5.")
        nested: Any = yaml.safe_load(value)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        raw = _merged(raw, nested)
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


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
