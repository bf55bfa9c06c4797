"""The settings of a training run: one validated file, with overrides from the command line."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from index._util.models import Frozen
from index._util.validation import explain_errors, suggest
from index.embedding.images import Preprocessing
from training.errors import TrainingError


class Settings(Frozen):
    """Settings whose numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class BackboneSettings(Settings):
    """The network from pixels to vectors."""

    name: str = Field(default="efficientnet_lite0", description="a name of docs/backbones.md, or any timm model")
    weights: str = Field(default="auto", description="auto, package, hub, none or the path of a file")
    pooling: Literal["default", "avg", "max", "avg+max"] = Field(
        default="default", description="the model's own, or the final feature map's mean, maximum or their sum"
    )
    layer_norm: bool = Field(default=False, description="normalise the features before the head")
    embedding_size: int = Field(default=512, gt=0)
    batch_norm: Literal["learn", "fixed_statistics", "frozen"] = Field(
        default="fixed_statistics",
        description="learn statistics and affine parameters, keep the pretrained statistics, or keep both",
    )
    frozen_stages: int = Field(
        default=0, description="first stages that never learn; negative: all but the last so many, as in a slice"
    )


class LossSettings(Settings):
    """A loss of the registry and its own settings."""

    name: str = "proxy_anchor"
    settings: dict[str, Any] = {}


Share = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentationSettings(Settings):
    """Random resized crop and horizontal flip as in the paper; everything else is off by default."""

    crop_scale: tuple[Share, Share] = Field(default=(0.2, 1.0), description="smallest and largest share of the area")
    interpolation: Literal["bicubic", "bilinear"] = Field(default="bicubic", description="filter of the resize")
    flip: bool = True
    rotation: float = Field(default=0, ge=0, le=180, description="largest angle in degrees, either way")
    colour_jitter: Probability = Field(
        default=0, description="brightness, contrast and saturation change by up to this share"
    )
    hue_jitter: float = Field(default=0, ge=0, le=0.5, description="largest shift of the hue, as a share of the circle")
    blur: Probability = Field(default=0, description="probability of a Gaussian blur")
    jpeg: Probability = Field(default=0, description="probability of JPEG compression at a quality of 30 to 95")
    erasing: Probability = Field(default=0, description="probability that a random rectangle is erased")

    @model_validator(mode="after")
    def _check_order(self) -> "AugmentationSettings":
        if self.crop_scale[0] > self.crop_scale[1]:
            raise ValueError(f"crop_scale must be (min, max), got {self.crop_scale}")
        return self


DEFAULT_BATCH_SIZE = 128
"""Of `auto`, where memory allows it."""


class SamplingSettings(Settings):
    """How photos are put into batches."""

    kind: Literal["auto", "random", "balanced", "power"] = Field(
        default="auto", description="auto: balanced for losses on pairs, random for the others"
    )
    batch_size: int | Literal["auto"] = Field(
        default="auto", description="over all processes together; auto: 128, or what fits into memory, accumulated"
    )
    photos_per_class: int = Field(default=4, gt=1, description="with balanced: photos of a class in a batch")
    power: float = Field(
        default=0.5, ge=0, le=1, description="with power: a class is drawn in proportion to its size to this power"
    )
    max_per_class: int | None = Field(
        default=None, gt=0, description="with power: maximum photos of a class in an epoch; by default no limit"
    )
    steps_per_epoch: int | None = Field(
        default=None, gt=0, description="batches of an epoch; by default as many as show about every photo once"
    )

    @field_validator("batch_size", mode="before")
    @classmethod
    def _check_number(cls, value: object) -> object:
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 2):
            raise ValueError("give a whole number from 2 on, or auto")
        return value

    @model_validator(mode="after")
    def _check_batch_size(self) -> "SamplingSettings":
        if self.kind == "balanced" and self.batch_size != "auto" and self.batch_size % self.photos_per_class:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of photos_per_class {self.photos_per_class}"
            )
        return self


class OptimiserSettings(Settings):
    """How the weights move; the loss's own parameters (proxies) are a group of their own."""

    name: Literal["adam", "adamw", "rmsprop"] = "adamw"
    learning_rate: float = Field(
        default=1e-4, gt=0, description="higher by default when only the head or the last stages learn"
    )
    proxy_factor: float = Field(default=100.0, gt=0, description="the loss's parameters learn this much faster")
    layer_decay: float = Field(
        default=1.0, gt=0, le=1, description="each stage of the backbone learns at this share of the next one's rate"
    )
    weight_decay: float = Field(default=1e-4, ge=0)
    eps: float = Field(default=1e-8, gt=0, description="added to the denominator of Adam's and RMSprop's step")
    clip_value: float | None = Field(default=10.0, gt=0, description="limit of every entry of a gradient")
    clip_norm: float | None = Field(default=None, gt=0, description="limit of the norm of all gradients together")
    accumulation: int = Field(default=1, gt=0, description="batches whose mean gradient makes one step")
    ema_decay: float | None = Field(
        default=None, gt=0, lt=1, description="keep and measure a moving average of the weights, e.g. 0.999"
    )


class ScheduleSettings(Settings):
    """How the learning rate changes over a run."""

    kind: Literal["constant", "cosine", "step"] = "cosine"
    step_epochs: int = Field(default=5, gt=0, description="with `step`: epochs between two drops")
    step_factor: float = Field(default=0.5, gt=0, le=1, description="with `step`: what remains after a drop")
    warm_up_epochs: int = Field(default=0, ge=0, description="first epochs that train only the head and the proxies")
    ramp_epochs: float = Field(default=0, ge=0, description="epochs over which the rate rises linearly from zero")


class SelectionSettings(Settings):
    """Which epoch's model is kept: judged on training classes held out for it, never on the test classes."""

    validation_share: float = Field(default=0.15, ge=0, lt=1, description="of the training classes; 0 keeps the last")
    fold: int | None = Field(default=None, ge=0, description="hold out this fold of the classes instead of a share")
    folds: int = Field(default=4, gt=1)
    metric: Literal["recall@1", "map@r"] = "map@r"
    patience: int | None = Field(
        default=10, gt=0, description="stop after so many epochs without a better one; needs held-out classes"
    )

    @model_validator(mode="after")
    def _check_fold(self) -> "SelectionSettings":
        if self.fold is not None and self.fold >= self.folds:
            raise ValueError(f"fold must be in 0..{self.folds - 1}")
        return self

    @property
    def holds_out(self) -> bool:
        """Whether classes are held out to choose the epoch."""
        return self.fold is not None or self.validation_share > 0


HEAD_RATE = 1e-3
"""Default learning rate when only the head learns, on cached features."""
LAST_STAGES_RATE = 3e-4
"""Default learning rate when the last stages and the head learn, on cached activations."""


class TrainingConfig(Settings):
    """Everything that decides a run's result, except the photos."""

    backbone: BackboneSettings = BackboneSettings()
    loss: LossSettings = LossSettings()
    preprocessing: Preprocessing = Preprocessing(resize=256, input_size=224)
    augmentation: AugmentationSettings = AugmentationSettings()
    sampling: SamplingSettings = SamplingSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    selection: SelectionSettings = SelectionSettings()
    epochs: int = Field(default=40, ge=0)
    stop_epoch: int | None = Field(
        default=None, ge=0, description="end after this epoch; the schedule still plans for `epochs`"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)
    start_from: str | None = Field(
        default=None, description="an earlier run, whose kept weights are the initial ones; by default pretrained ones"
    )
    cached_views: int = Field(
        default=0, ge=0, description="train on this many cached augmented views of every photo; 0: on the photos"
    )
    cached_stage: int | None = Field(
        default=None,
        description="with cached_views: stages before this one are cached, the others learn, as in a slice (-1: the"
        " last stage learns); by default only the head learns",
    )
    test_every: int = Field(
        default=1, ge=0, description="epochs between two measurements on the test classes; 0: at the end"
    )
    log_every: int = Field(default=10, gt=0, description="steps between two entries of the loss's state in the logs")
    tracker: Literal["mlflow", "wandb"] | None = Field(default=None, description="also report to this service")
    mixed_precision: bool = Field(default=True, description="on CUDA; elsewhere it is float32")
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    workers: int | None = Field(default=None, ge=0, description="processes that decode photos; by default chosen")
    compile: bool = Field(default=False, description="compile the network with torch.compile")
    cudnn_benchmark: bool = Field(default=True, description="let cuDNN time its algorithms and take the fastest")
    tf32: bool = Field(default=True, description="on CUDA: 32-bit products with 19-bit inputs")
    checkpoint_minutes: float = Field(default=10, gt=0, description="between checkpoints within a long epoch")

    @model_validator(mode="before")
    @classmethod
    def _complete_preprocessing(cls, raw: Any) -> Any:
        """Derives `resize` from `input_size` or the other way round when only one is given, in the ratio 256 to 224."""
        rule = raw.get("preprocessing") if isinstance(raw, Mapping) else None
        if not isinstance(rule, Mapping):
            return raw
        given, missing = ("resize", "input_size") if "resize" in rule else ("input_size", "resize")
        if missing in rule or not isinstance(rule.get(given), int):
            return raw
        other = round(rule[given] * (256 / 224 if missing == "resize" else 224 / 256))
        return {**raw, "preprocessing": {**rule, missing: other}}

    @model_validator(mode="before")
    @classmethod
    def _choose_learning_rate(cls, raw: Any) -> Any:
        """Sets the learning rate by what learns, unless it is given: the fewer weights, the higher the rate."""
        if not isinstance(raw, Mapping) or not raw.get("cached_views"):
            return raw
        optimiser = raw.get("optimiser", {})
        if not isinstance(optimiser, Mapping) or "learning_rate" in optimiser:
            return raw
        rate = HEAD_RATE if raw.get("cached_stage") is None else LAST_STAGES_RATE
        return {**raw, "optimiser": {**optimiser, "learning_rate": rate}}

    @model_validator(mode="after")
    def _check_cache(self) -> "TrainingConfig":
        if self.cached_stage is not None and not self.cached_views:
            raise ValueError(f"cached_stage={self.cached_stage} needs cached_views of 1 or more")
        return self

    @property
    def last_epoch(self) -> int:
        """The epoch after which the run ends."""
        return self.epochs if self.stop_epoch is None else min(self.stop_epoch, self.epochs)


RESUMABLE = frozenset({"epochs", "stop_epoch", "workers", "device", "checkpoint_minutes", "tracker"})
"""Settings that may change when a run is resumed: they decide how long and where it runs, not what it learns."""


def load_config(file: Path | None, overrides: list[str], presets: Sequence[str] = ()) -> TrainingConfig:
    """Layers the defaults, the presets in turn, the file, and `key=value` overrides with dotted keys."""
    raw: dict[str, Any] = {}
    for preset in presets:
        raw = layer_settings(raw, read_preset(preset))
    if file:
        if not file.is_file():
            raise TrainingError(f"No configuration file at {file}.", "Check the path given with --config.")
        raw = layer_settings(raw, _parse_file(file))
    raw = layer_settings(raw, _parse_overrides(overrides))
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> TrainingConfig:
    """Validates settings; the error names every invalid one with its value."""
    try:
        return TrainingConfig.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(explain_errors(error.errors(), TrainingConfig))
        raise TrainingError(f"Bad training settings: {problems}.", "See docs/train.md.") from None


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten_settings(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def preset_names() -> list[str]:
    """Returns every name that `--preset` accepts."""
    files = (resources.files("training") / "presets").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_preset(name: str) -> dict[str, Any]:
    """Returns the settings in the file of a preset."""
    if name not in (known := preset_names()):
        raise TrainingError(
            f"No preset is called {name!r}{suggest(name, known)}.", f"Known presets: {', '.join(known)}."
        )
    raw: dict[str, Any] = yaml.safe_load((resources.files("training") / "presets" / f"{name}.yaml").read_text("utf-8"))
    return raw


def _parse_file(file: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainingError(f"{file} is not YAML: {error}.", "Correct the file.") from None
    if not isinstance(raw, dict):
        raise TrainingError(f"{file} has no settings.", "Write them as `key: value` lines.")
    return raw


def _parse_overrides(overrides: list[str]) -> dict[str, Any]:
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
        parsed = _merge(parsed, nested)
    return parsed


def layer_settings(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lays `over` on `base`; a different loss does not inherit the settings of the one below."""
    loss, other = base.get("loss"), over.get("loss")
    if isinstance(loss, dict) and isinstance(other, dict) and other.get("name", loss.get("name")) != loss.get("name"):
        base = base | {"loss": {}}
    return _merge(base, over)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
