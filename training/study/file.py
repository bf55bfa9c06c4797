"""The file of a study: its format, its checks, and its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from index._util.models import Frozen
from index._util.validation import explain_errors, suggest
from training.config import DEFAULT_BATCH_SIZE, TrainingConfig, layer_settings, read_preset
from training.errors import TrainingError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=60)]
Seed = Annotated[int, Field(ge=0, strict=True)]


class DropRule(Frozen):
    """When a run is stopped early."""

    after_epoch: int = Field(ge=1, description="the first epoch at which runs are compared, and at each later one")
    behind: float = Field(gt=0, lt=1, description="largest distance to the best run of the seed, 0.015 for 1.5 points")
    metric: Literal["validation.map@r", "validation.recall@1"] = "validation.map@r"


class RunKey(NamedTuple):
    """The name and seed of a run in its study."""

    run: str
    seed: int

    def __str__(self) -> str:
        return f"{self.run}, seed {self.seed}"

    @property
    def folder(self) -> str:
        return f"{self.run}-seed-{self.seed}"


class PlannedRun(NamedTuple):
    """A run with all its settings."""

    key: RunKey
    config: TrainingConfig


class Study(Frozen):
    """Runs that are compared with each other, each over the same seeds."""

    name: Name
    data: str | None = Field(default=None, description="as --data of `train`; --data replaces it")
    presets: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default={}, description="common to all runs")
    seeds: tuple[Seed, ...] = Field(default=(0,), min_length=1)
    runs: dict[Name, dict[str, Any]] = Field(min_length=1, description="settings over the common ones")
    baseline: str | None = Field(
        default=None, description="the run that others are compared with; by default the first"
    )
    metric: Literal["map@r", "recall@1"] = "map@r"
    drop: DropRule | None = None

    @field_validator("runs", mode="before")
    @classmethod
    def _fill_empty_runs(cls, runs: Any) -> Any:
        """Reads `name:` without a value as a run with the common settings."""
        return {name: {} if own is None else own for name, own in runs.items()} if isinstance(runs, dict) else runs

    @model_validator(mode="after")
    def _check_consistent(self) -> "Study":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)} lists a seed twice")
        if self.baseline is not None and self.baseline not in self.runs:
            raise ValueError(f"baseline={self.baseline!r} is not a run{suggest(self.baseline, self.runs)}")
        for place, own in {
            "settings": self.settings,
            **{f"runs.{name}": own for name, own in self.runs.items()},
        }.items():
            if "seed" in own:
                raise ValueError(f"{place}.seed={own['seed']!r}: list seeds under seeds, which all runs share")
        return self

    @property
    def baseline_run(self) -> str:
        return self.baseline or next(iter(self.runs))

    def plan(self) -> list[PlannedRun]:
        """Returns all runs, seed by seed, so that an interrupted study has runs to compare."""
        common: dict[str, Any] = {}
        for preset in self.presets:
            common = layer_settings(common, read_preset(preset))
        common = layer_settings(common, self.settings)
        _parse_config(common, "settings")
        raw = {name: layer_settings(common, own) for name, own in self.runs.items()}
        return [
            PlannedRun(RunKey(name, seed), _parse_config(settings | {"seed": seed}, f"runs.{name}"))
            for seed in self.seeds
            for name, settings in raw.items()
        ]

    def select(self, names: Sequence[str]) -> list[PlannedRun]:
        """Returns the runs of these names over all seeds."""
        for name in names:
            if name not in self.runs:
                raise TrainingError(
                    f"--only {name}: the study {self.name} has no such run{suggest(name, self.runs)}.",
                    f"Its runs: {', '.join(self.runs)}.",
                )
        return [run for run in self.plan() if run.key.run in names]


def read_study(file: Path) -> Study:
    """Reads a study and checks the settings of every run."""
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeys)
    except (FileNotFoundError, IsADirectoryError):
        raise TrainingError(f"No study at {file}.", "Give a YAML file, see docs/study.md.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainingError(f"{file} is not YAML: {error}.", "Correct the file.") from None
    try:
        study = Study.model_validate(raw)
        study.plan()
    except ValidationError as error:
        problems = "; ".join(explain_errors(error.errors(), Study))
        raise TrainingError(f"{file}: {problems}.", "See docs/study.md.") from None
    except TrainingError as error:
        raise TrainingError(f"{file}: {error.problem}", error.remedy) from None
    return study


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is a duplicate key", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_config(raw: Mapping[str, Any], place: str) -> TrainingConfig:
    try:
        config = TrainingConfig.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(explain_errors(error.errors(), TrainingConfig, prefix=f"{place}."))
        raise TrainingError(f"{problems}.", "See docs/train.md.") from None
    if config.sampling.batch_size != "auto":
        return config
    # Not what fits into this machine: runs of a study have equal batches wherever they are trained.
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"batch_size": DEFAULT_BATCH_SIZE})})
