"""Checkpoints and the run folder: everything a run needs to go on, be measured or be exported."""

import json
from collections.abc import Iterator
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
from training.errors import TrainingError

_CONFIG = "config.yaml"
_CHECKPOINT = "checkpoint.pt"
_BEST = "best.pt"
_NEXT_BEST = "next-best-{}.pt"
_RESULT = "result.json"
REFIT = "refit"
"""Folder in a run's folder of its repetition on all products."""


@dataclass(frozen=True)
class RunFolder:
    """`config.yaml` (settings and data), `checkpoint.pt` (all of a run's state), `best.pt` (the weights that validation
    chose), `result.json` (the chosen model's figures), and the recorder's `metrics.jsonl`, `log.txt`, plots and
    TensorBoard events."""

    path: Path

    @contextmanager
    def begun(self, config: TrainingConfig, data: str, *, resume: bool) -> Iterator[None]:
        """Starts a run for the time of its preparations.

        Should these fail, a new run is taken back, so that the corrected command finds its place free.
        """
        new = self.start(config, data, resume=resume)
        try:
            yield
        except Exception:
            if new:
                (self.path / _CONFIG).unlink()
            raise

    def start(self, config: TrainingConfig, data: str, *, resume: bool) -> bool:
        """Makes the folder, or with `resume` accepts one that holds the same run; returns whether it is new."""
        new = not (self.path / _CONFIG).is_file()
        if not new:
            if not resume:
                raise TrainingError(f"{self.path} holds a run.", "Continue it with --resume, or choose another --out.")
            self._check_same(config, data)
            if self.config == config:
                return False
            (self.path / _RESULT).unlink(missing_ok=True)  # it was the result of another number of epochs
        elif self.path.exists() and any(self.path.iterdir()):
            raise TrainingError(f"{self.path} is not empty and holds no run.", "Choose another folder with --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        description = {"data": data, "config": config.model_dump(mode="json")}
        atomic_write_text(self.path / _CONFIG, yaml.safe_dump(description, sort_keys=False))
        return new

    def _check_same(self, config: TrainingConfig, data: str) -> None:
        """Refuses to continue a run with settings that would make it another one, and names them."""
        old, new = (
            flatten_settings(of.model_dump(mode="json", exclude=set(RESUMABLE))) for of in (self.config, config)
        )
        changed = [name for name in old | new if old.get(name) != new.get(name)]
        differing = [f"{name}={new.get(name)!r} (was {old.get(name)!r})" for name in changed]
        trained = self.history()[-1]["epoch"] if (self.path / "metrics.jsonl").is_file() else 0
        if config.last_epoch < trained:
            differing.append(f"{config.last_epoch} epochs (trained already: {trained})")
        if self.data != data:
            differing.append(f"--data {data} (was {self.data})")
        if differing:
            raise TrainingError(
                f"{self.path} holds a run with other settings: {', '.join(differing)}.",
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
        """Replaces the checkpoint as a whole: a kill leaves the old one or the new one."""
        with atomic_write(self.path / _CHECKPOINT) as temporary:
            torch.save(state, temporary)
        self._promote_best(state)

    def save_best(self, weights: dict[str, Any], epoch: int | None = None) -> None:
        """Saves the weights that validation chose; those of an `epoch` count once the next checkpoint is written."""
        with atomic_write(self.path / (_BEST if epoch is None else _NEXT_BEST.format(epoch))) as temporary:
            torch.save(weights, temporary)

    def _promote_best(self, checkpoint: dict[str, Any]) -> None:
        """Lets `best.pt` be of the epoch that the checkpoint names, also after a kill between the two."""
        chosen = self.path / _NEXT_BEST.format(checkpoint["progress"]["best_epoch"])
        if chosen.is_file():
            chosen.replace(self.path / _BEST)
        for other in self.path.glob(_NEXT_BEST.format("*")):
            other.unlink()

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint, if one was written."""
        path = self.path / _CHECKPOINT
        if not path.is_file():
            return None
        checkpoint = _loaded(path)
        self._promote_best(checkpoint)
        return checkpoint

    def write_result(self, result: dict[str, Any]) -> None:
        """The chosen model's figures; written last, so its presence tells a finished run."""
        atomic_write_text(self.path / _RESULT, json.dumps(result, indent=2) + "\n")

    @property
    def is_finished(self) -> bool:
        return (self.path / _RESULT).is_file()

    def result(self) -> dict[str, Any]:
        """The chosen model's figures."""
        try:
            result: dict[str, Any] = json.loads((self.path / _RESULT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TrainingError(
                f"The run {self.path} has not finished.", "Continue it with `train --resume`."
            ) from None
        return result

    @property
    def is_refit(self) -> bool:
        """Whether the model has learned all classes, so that its figures are those of the run before."""
        inside = self.path.name == REFIT and (self.path.parent / _CONFIG).is_file()
        return inside or (self.is_finished and "refit" in self.result())

    def history(self) -> list[dict[str, Any]]:
        """What was measured so far, epoch by epoch; epoch 0 is the untrained backbone."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def model(self, file: Path | None = None) -> EmbeddingModel:
        """The chosen model, ready to embed: validation's best, else the newest, or that of a given file."""
        file = file or next((path for name in (_BEST, _CHECKPOINT) if (path := self.path / name).is_file()), None)
        if file is None:
            raise TrainingError(f"{self.path} has no checkpoint yet.", "Let `lookalike train` finish an epoch.")
        state = _loaded(file)
        if "work" in state:
            work = state["work"]
            state = work["average"]["model"] if "average" in work else work["model"]
        model = EmbeddingModel(self.config.backbone, input_size=self.config.preprocessing.input_size, pretrained=False)
        model.load_state_dict(state)
        return model.eval()


def _loaded(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError) as error:
        raise TrainingError(
            f"{path} is no checkpoint, or a damaged one: {str(error).splitlines()[0]}", "Give a run's best.pt."
        ) from error
    return state
