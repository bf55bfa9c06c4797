"""Checkpoints and the run folder: everything a run needs to go on, be measured or be exported."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from index.files import write_text, written_whole
from training.backbones import EmbeddingModel
from training.config import TrainingConfig
from training.errors import TrainingError

_CHECKPOINT = "checkpoint.pt"
_METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """`config.json` (settings and data), `metrics.jsonl` (a line an epoch) and `checkpoint.pt`."""

    path: Path

    def start(self, config: TrainingConfig, data: str) -> None:
        """Makes the folder, or accepts one that holds the same run."""
        description = {"data": data, "config": config.model_dump(mode="json")}
        if (self.path / "config.json").is_file():
            if self._description() != description:
                raise TrainingError(
                    f"{self.path} holds a run with other settings or data.",
                    "Choose another folder with --out.",
                )
            return
        if self.path.exists() and any(self.path.iterdir()):
            raise TrainingError(f"{self.path} is not empty and holds no run.", "Choose another folder with --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "config.json", json.dumps(description, indent=2) + "\n")

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig.model_validate(self._description()["config"])

    @property
    def data(self) -> str:
        """The specification that the run was trained on."""
        return str(self._description()["data"])

    def _description(self) -> dict[str, Any]:
        try:
            description: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TrainingError(f"No training run at {self.path}.", "Make one with `lookalike train`.") from None
        return description

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint as a whole: a kill leaves the old one or the new one."""
        with written_whole(self.path / _CHECKPOINT) as temporary:
            torch.save(state, temporary)

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint, if one was written."""
        path = self.path / _CHECKPOINT
        if not path.is_file():
            return None
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        """One JSON line an epoch; written from the checkpoint's own history, so that the two always agree."""
        write_text(self.path / _METRICS, "".join(json.dumps(line) + "\n" for line in history))

    def history(self) -> list[dict[str, Any]]:
        """What was measured so far, epoch by epoch."""
        lines = (self.path / _METRICS).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def model(self) -> EmbeddingModel:
        """The trained model, ready to embed."""
        state = self.load()
        if state is None:
            raise TrainingError(f"{self.path} has no checkpoint yet.", "Let `lookalike train` finish an epoch.")
        model = EmbeddingModel(self.config.backbone)
        model.load_state_dict(state["model"])
        return model.eval()
