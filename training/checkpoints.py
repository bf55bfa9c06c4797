"""Checkpoints and the run folder: everything that is needed to resume, measure or export a run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml

from index._util.files import atomic_write, atomic_write_text
from training.backbones import EmbeddingModel
from training.config import RESUMABLE, TrainingConfig, flatten_settings
from training.data import Photo
from training.data.validation import DUPLICATES, UNREADABLE
from training.errors import TrainingError
from training.seen_classes import SeenClasses

_CONFIG = "config.yaml"
_CHECKPOINT = "checkpoint.pt"
_BEST = "best.pt"
_NEXT_BEST = "next-best-{}.pt"
_RESULT = "result.json"
_CLASSES = "classes.json"
_SPLITS = ("train", "validation", "test")
_SEEN = ("train", "validation", "earlier")
"""The classes that a model counts as seen; `earlier` ones were seen by the run that it started from."""
REFIT = "refit"
"""Subfolder of a run for its repetition on all products."""


@dataclass(frozen=True)
class RunFolder:
    """A folder with `config.yaml` (settings and data), `checkpoint.pt` (the run's state), `best.pt` (the best epoch's
    weights), `classes.json` (the labels of each split), `result.json` (the chosen model's figures), and the logger's
    `metrics.jsonl`, `log.txt`, plots and TensorBoard events."""

    path: Path

    @contextmanager
    def begin(self, config: TrainingConfig, data: str, *, resume: bool) -> Iterator[None]:
        """Starts a run, and removes a new one again if its preparation in the `with` block fails."""
        new = self.start(config, data, resume=resume)
        try:
            yield
        except Exception:
            if new:
                (self.path / _CONFIG).unlink()
            raise

    def start(self, config: TrainingConfig, data: str, *, resume: bool) -> bool:
        """Creates the folder, or with `resume` accepts one with the same run; returns whether it is new."""
        new = not (self.path / _CONFIG).is_file()
        config = self.settle(config)
        if not new:
            if not resume:
                raise TrainingError(
                    f"{self.path} already holds a run.", "Continue it with --resume, or choose another --out."
                )
            self._check_same(config, data)
            if self.config == config:
                return False
            (self.path / _RESULT).unlink(missing_ok=True)  # the result of a different number of epochs
        elif self.path.exists() and any(path.name not in (UNREADABLE, DUPLICATES) for path in self.path.iterdir()):
            raise TrainingError(f"{self.path} is not empty and not a run.", "Choose another folder with --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config, data)
        return new

    def write_config(self, config: TrainingConfig, data: str) -> None:
        """Records settings and data, also settings that were chosen while the run was prepared."""
        description = {"data": data, "config": config.model_dump(mode="json")}
        atomic_write_text(self.path / _CONFIG, yaml.safe_dump(description, sort_keys=False))

    def settle(self, config: TrainingConfig) -> TrainingConfig:
        """Returns the settings with the batch size that the run in this folder chose, if it is automatic."""
        if config.sampling.batch_size != "auto" or not (self.path / _CONFIG).is_file():
            return config
        old = self.config
        optimiser = config.optimiser.model_copy(update={"accumulation": old.optimiser.accumulation})
        sampling = config.sampling.model_copy(update={"batch_size": old.sampling.batch_size})
        return config.model_copy(update={"sampling": sampling, "optimiser": optimiser})

    def _check_same(self, config: TrainingConfig, data: str) -> None:
        """Refuses to continue a run with different settings, and names them."""
        old, new = (
            flatten_settings(of.model_dump(mode="json", exclude=set(RESUMABLE))) for of in (self.config, config)
        )
        changed = [name for name in old | new if old.get(name) != new.get(name)]
        differing = [f"{name}={new.get(name)!r} (was {old.get(name)!r})" for name in changed]
        trained = self.history()[-1]["epoch"] if (self.path / "metrics.jsonl").is_file() else 0
        if config.last_epoch < trained:
            differing.append(f"{config.last_epoch} epochs (already trained: {trained})")
        if self.data != data:
            differing.append(f"--data {data} (was {self.data})")
        if differing:
            raise TrainingError(
                f"{self.path} holds a run with different settings: {', '.join(differing)}.",
                f"Choose another folder with --out; only {', '.join(sorted(RESUMABLE))} may change.",
            )

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig.model_validate(self._description()["config"])

    @property
    def data(self) -> str:
        """The specification that the run was trained on."""
        return str(self._description()["data"])

    def _description(self) -> dict[str, Any]:
        try:
            description: dict[str, Any] = yaml.safe_load((self.path / _CONFIG).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TrainingError(f"No training run at {self.path}.", "Make one with `lookalike train`.") from None
        return description

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint atomically."""
        with atomic_write(self.path / _CHECKPOINT) as temporary:
            torch.save(state, temporary)
        self._promote_best(state)

    def save_best(self, weights: dict[str, Any], epoch: int | None = None) -> None:
        """Saves the chosen weights; those of an `epoch` become `best.pt` with the next checkpoint."""
        with atomic_write(self.path / (_BEST if epoch is None else _NEXT_BEST.format(epoch))) as temporary:
            torch.save(weights, temporary)

    def _promote_best(self, checkpoint: dict[str, Any]) -> None:
        """Makes `best.pt` that of the checkpoint's best epoch, also after a kill between the two writes."""
        chosen = self.path / _NEXT_BEST.format(checkpoint["progress"]["best_epoch"])
        if chosen.is_file():
            chosen.replace(self.path / _BEST)
        for other in self.path.glob(_NEXT_BEST.format("*")):
            other.unlink()

    def load_checkpoint(self) -> dict[str, Any] | None:
        """Returns the newest checkpoint, or None."""
        path = self.path / _CHECKPOINT
        if not path.is_file():
            return None
        checkpoint = _load_state(path)
        self._promote_best(checkpoint)
        return checkpoint

    def write_classes(self, photos: Sequence[Sequence[Photo]]) -> None:
        """Records the classes of the training, validation and test photos, and those of the run it started from."""
        labels = {split: sorted({p.label for p in part}) for split, part in zip(_SPLITS, photos, strict=True)}
        if parent := self.config.start_from:
            earlier = RunFolder(Path(parent))._read_classes() or {}
            labels["earlier"] = sorted({label for split in _SEEN for label in earlier.get(split, ())})
        atomic_write_text(self.path / _CLASSES, json.dumps(labels, indent=1) + "\n")

    def _read_classes(self) -> dict[str, list[str]] | None:
        try:
            labels: dict[str, list[str]] = json.loads((self.path / _CLASSES).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return labels

    def seen_classes(self, file: Path | None = None) -> SeenClasses | None:
        """Returns the classes that the model of `file` learned or that chose it; None if the run did not record them.

        The untrained backbone learned none; without a trained epoch to compare it with, none chose it either.
        """
        labels = self._read_classes()
        if labels is None:
            return None
        earlier = labels.get("earlier", [])
        result = self.result() if self.is_finished and (file is None or file.name == _BEST) else {"epoch": 1}
        if not result["epoch"]:
            return SeenClasses.of([*earlier, *(labels["validation"] if result["epochs"] else ())])
        return SeenClasses.of([*earlier, *labels["train"], *labels["validation"]])

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes the chosen model's figures; the file marks a finished run, so it is written last."""
        atomic_write_text(self.path / _RESULT, json.dumps(result, indent=2) + "\n")

    @property
    def is_finished(self) -> bool:
        return (self.path / _RESULT).is_file()

    def result(self) -> dict[str, Any]:
        """Returns the chosen model's figures."""
        try:
            result: dict[str, Any] = json.loads((self.path / _RESULT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TrainingError(
                f"The run {self.path} has not finished.", "Continue it with `train --resume`."
            ) from None
        return result

    @property
    def is_refit(self) -> bool:
        """Whether the model was trained on all classes, so that its figures are those of the first run."""
        inside = self.path.name == REFIT and (self.path.parent / _CONFIG).is_file()
        return inside or (self.is_finished and "refit" in self.result())

    def history(self) -> list[dict[str, Any]]:
        """Returns the records of the epochs so far; epoch 0 is the untrained backbone."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def model(self, file: Path | None = None) -> EmbeddingModel:
        """Returns the model in evaluation mode: that of `file`, by default the best epoch's, else the newest."""
        file = file or next((path for name in (_BEST, _CHECKPOINT) if (path := self.path / name).is_file()), None)
        if file is None:
            raise TrainingError(f"{self.path} has no checkpoint yet.", "Let `lookalike train` finish an epoch.")
        state = _load_state(file)
        if "work" not in state:
            return self.model_of(state)
        work, progress = state["work"], state["progress"]
        weights = work["average"]["model"] if "average" in work else work["model"]
        return self.model_of(weights if progress["epoch"] or progress["step"] else without_head(weights))

    def model_of(self, weights: dict[str, Any]) -> EmbeddingModel:
        """Returns the run's model with the given weights, in evaluation mode."""
        config, head = self.config, "head.weight" in weights
        side = config.preprocessing.input_size
        model = EmbeddingModel(config.backbone, input_size=side, pretrained=False, head=head)
        model.load_state_dict(weights)
        return model.eval()


def without_head(weights: dict[str, Any]) -> dict[str, Any]:
    """Returns the weights of the backbone alone: the untrained model, whose head would be random."""
    return {name: value for name, value in weights.items() if not name.startswith("head.")}


def _load_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError) as error:
        raise TrainingError(
            f"{path} is not a checkpoint, or damaged: {str(error).splitlines()[0]}", "Give a run's best.pt."
        ) from error
    return state
