"""Reports to MLflow and Weights & Biases, by their real clients writing to this disk."""

import json
import time
from pathlib import Path

import pytest

from tests.support.tiny_gallery import write_tiny_folder
from tests.support.training_runs import RecordingCallback
from training.checkpoints import RunFolder
from training.config import load_config
from training.data import load_data
from training.loop import train
from training.trackers import ExperimentTracker

SMALL = ["epochs=1", "preprocessing={resize: 36, input_size: 32}", "sampling.batch_size=8", "workers=0"]


@pytest.mark.slow
def test_mlflow_gets_settings_epochs_and_result_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    data = load_data(f"folder:{write_tiny_folder(tmp_path / 'photos')}")
    config = load_config(None, [*SMALL, "tracker=mlflow", "selection.validation_share=0"])
    train(config, data, tmp_path / "runs" / "first", "folder:photos", RecordingCallback())
    longer = config.model_copy(update={"epochs": 2})
    train(longer, data, tmp_path / "runs" / "first", "folder:photos", RecordingCallback(), resume=True)
    client = mlflow.tracking.MlflowClient(f"file:{tmp_path / 'store'}")
    experiment = client.get_experiment_by_name("runs")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["loss.name"] == "proxy_anchor"
    steps = client.get_metric_history(run.info.run_id, "map_at_r")
    records = RunFolder(tmp_path / "runs" / "first").history()
    assert [(point.step, point.value) for point in steps] == [(record["epoch"], record["map@r"]) for record in records]
    assert run.data.metrics["chosen.epoch"] == 2, "a resumed run continues the same one"


def test_wandb_records_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    messages: list[str] = []
    callback = ExperimentTracker(load_config(None, ["tracker=wandb"]), tmp_path / "runs" / "first", messages.append)
    callback.epoch({"epoch": 1, "recall@1": 0.5})
    callback.result({"epoch": 1, "epochs": 1, "recall@1": 0.5})
    callback.close(failed=False)
    (written,) = (tmp_path / "runs" / "first").rglob("*.wandb")
    # A process of wandb writes the file, and may still do so after the run has finished.
    deadline = time.monotonic() + 60
    while b"recall@1" not in written.read_bytes():
        assert time.monotonic() < deadline, "the figures were never written"
        time.sleep(0.1)
    assert messages == [] and json.loads((tmp_path / "runs" / "first" / "tracker.json").read_text())["wandb"]


def test_a_service_that_fails_later_is_reported_once_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    (tmp_path / "run").mkdir()
    messages: list[str] = []
    callback = ExperimentTracker(load_config(None, ["tracker=mlflow"]), tmp_path / "run", messages.append)
    for epoch in (1, 2):
        callback.epoch({"epoch": epoch, "not a number": "text"})
    callback.close(failed=True)
    assert len(messages) == 1 and "mlflow rejects the run's figures" in messages[0]
