"""A study of two losses and two seeds that trains in seconds."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import yaml

from tests.support.training_runs import RecordingCallback
from training.config import TrainingConfig
from training.data import load_data
from training.study.file import RunKey, read_study
from training.study.results import StudyFolder
from training.study.runner import StudyRunner

ROOT = Path(__file__).parents[3]


TABLE: dict[str, Any] = {
    "name": "tiny",
    "settings": {
        "epochs": 2,
        "preprocessing": {"resize": 36, "input_size": 32},
        "sampling": {"batch_size": 8},
        "optimiser": {"learning_rate": 0.0003},
        "selection": {"validation_share": 0.4, "patience": None},
        "workers": 0,
        "loss": {"name": "proxy_isa", "settings": {"volume": 4, "queue_start": 0, "filter_start": 0}},
    },
    "seeds": [0, 1],
    "runs": {"anchor": {"loss": {"name": "proxy_anchor"}}, "isa": None},
}


KEYS = [RunKey(run, seed) for seed in (0, 1) for run in ("anchor", "isa")]


def write_table(directory: Path, **changes: Any) -> Path:
    file = directory / "study.yaml"
    file.write_text(yaml.safe_dump(TABLE | changes, sort_keys=False))
    return file


def run_study(file: Path, photos: Path, out: Path, **options: Any) -> tuple[list[str], list[RunKey]]:
    """Trains the remaining runs in this process; returns the messages and the failed runs."""
    messages: list[str] = []

    def make_callback(config: TrainingConfig) -> AbstractContextManager[RecordingCallback]:
        return nullcontext(RecordingCallback())

    study, spec = read_study(file), f"folder:{photos}"
    runner = StudyRunner(study, spec, load_data(spec), StudyFolder(out), make_callback, messages.append, **options)
    return messages, runner.run(study.plan())
