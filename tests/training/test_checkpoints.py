"""The run folder: what is kept, and what is refused."""

from pathlib import Path

import pytest
import torch

from tests.support.training_runs import RecordingCallback
from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data import DataSet
from training.errors import TrainingError
from training.loop import train


def test_a_folder_of_another_run_is_not_overwritten(run: RunFolder, data: DataSet, config: TrainingConfig) -> None:
    with pytest.raises(TrainingError, match=r"different settings: seed=7 \(was 0\)"):
        train(config.model_copy(update={"seed": 7}), data, run.path, "folder:photos", RecordingCallback(), resume=True)


def test_fewer_epochs_than_trained_are_refused(run: RunFolder, data: DataSet, config: TrainingConfig) -> None:
    shorter = config.model_copy(update={"epochs": 1})
    with pytest.raises(TrainingError, match=r"1 epochs \(already trained: 2\)"):
        train(shorter, data, run.path, "folder:photos", RecordingCallback(), resume=True)


def test_the_best_weights_are_those_of_the_epoch_that_the_checkpoint_names(run: RunFolder, tmp_path: Path) -> None:
    folder, weights = RunFolder(tmp_path), run.model().state_dict()
    first, second = ({name: value + epoch for name, value in weights.items()} for epoch in (1, 2))
    folder.save_best(first, epoch=1)
    folder.save_checkpoint({"progress": {"best_epoch": 1}})
    folder.save_best(second, epoch=2)  # killed before its checkpoint
    assert folder.load_checkpoint() is not None
    assert [path.name for path in tmp_path.glob("*best*")] == ["best.pt"]
    kept = torch.load(tmp_path / "best.pt", weights_only=True)
    assert all(torch.equal(kept[name], first[name]) for name in first)


def test_a_folder_with_other_files_is_refused(data: DataSet, config: TrainingConfig, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="not a run"):
        train(config, data, tmp_path, "folder:photos", RecordingCallback())
