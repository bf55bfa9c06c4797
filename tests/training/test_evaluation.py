"""Evaluation of a run, of its checkpoint files and of a bundle: exactly, with intervals, and through the index."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from index.evaluation.metrics import mean_metrics, query_metrics
from tests.support.training_runs import SMALL_SETTINGS, RecordingCallback
from training.checkpoints import RunFolder
from training.config import load_config
from training.data import DataSet, Photo
from training.errors import TrainingError
from training.evaluation import full_report, index_metrics, load_model, measure, measuring_embedder, photo_protocol
from training.loop import train


def test_a_checkpoint_file_is_measured_as_itself(data: DataSet, tmp_path: Path) -> None:
    """A high rate makes the model worse, so that the best epoch and the newest differ."""
    wild = [*SMALL_SETTINGS, "selection.validation_share=0.4", "optimiser.learning_rate=0.1", "test_every=0"]
    train(load_config(None, wild), data, tmp_path / "run", "folder:photos", RecordingCallback())
    run = RunFolder(tmp_path / "run")
    best, newest = (measure(data.test, *load_model(run.path / name)) for name in ("best.pt", "checkpoint.pt"))
    assert best == measure(data.test, *load_model(run.path))
    state = run.load_checkpoint()
    assert state is not None
    weights, file = state["work"]["model"], run.model(run.path / "checkpoint.pt").state_dict()
    assert all(value.equal(file[name]) for name, value in weights.items())
    assert newest.keys() == best.keys()

    (run.path / "notes.pt").write_text("no weights")
    with pytest.raises(TrainingError, match="is not a checkpoint"):
        load_model(run.path / "notes.pt")
    (tmp_path / "elsewhere.pt").write_bytes((run.path / "best.pt").read_bytes())
    with pytest.raises(TrainingError, match="No training run at"):
        load_model(tmp_path / "elsewhere.pt")


def test_the_index_costs_what_half_precision_costs() -> None:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((50, 32))
    vectors = (centres[np.arange(300) % 50] + 1.2 * rng.standard_normal((300, 32))).astype(np.float32)
    photos = [
        Photo(Path(f"{number}.jpg"), f"{number % 50}", is_query=number % 3 == 0, is_gallery=number % 3 != 1)
        for number in range(300)
    ]
    exact, served = (
        mean_metrics(figures)
        for figures in (
            query_metrics(vectors, photo_protocol(photos)),
            index_metrics(vectors, photo_protocol(photos)),
        )
    )
    assert served.keys() == exact.keys() - {"map"}, "an index does not rank the complete gallery"
    assert 0.2 < served["recall@1"] < 1
    assert all(value == pytest.approx(exact[name], abs=0.01) for name, value in served.items())


def test_a_report_counts_queries_and_gallery() -> None:
    photos = [
        Photo(Path("x.jpg"), label, is_query=query)
        for label, query in zip("aabbc", map(bool, (1, 1, 1, 0, 1)), strict=True)
    ]
    report = full_report(np.eye(5, dtype=np.float32), photos, (1,), rounds=50, through_index=True)
    assert (report["queries"], report["queries_without_answer"], report["gallery"]) == (3, 1, 5)
    assert report["figures"].keys() == {"recall@1", "map@r", "r_precision", "map"} == report["intervals"].keys()


def test_photos_without_a_usable_vector_are_named() -> None:
    photos = [Photo(Path(f"{number}.jpg"), "mug") for number in range(8)]
    vectors = np.ones((8, 4), np.float32)
    for place, value in ((1, 0), (3, np.nan), (5, np.inf), (7, 0)):
        vectors[place] = value
    message = r"4 of 8 vectors .*: 1\.jpg \(class mug\), 3\.jpg \(class mug\), 5\.jpg \(class mug\) and 1 more\."
    with pytest.raises(TrainingError, match=message):
        full_report(vectors, photos)


def test_a_device_that_computes_other_vectors_measures_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise TrainingError("The device cuda computes different vectors than the CPU (cosine 0.1).", "Set device=cpu.")

    class Means(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels.float().mean(dim=(1, 2))

    monkeypatch.setattr("training.evaluation.check_device", refuse)
    pixels = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    np.testing.assert_allclose(measuring_embedder(Means(), 64)(pixels), Means()(pixels).numpy(), rtol=1e-6)
    assert caplog.messages[0].startswith("photos are embedded on the CPU: The device cuda computes different vectors")
