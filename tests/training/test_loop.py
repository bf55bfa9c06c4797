"""A small run on real weights: it learns, goes on after a kill as if nothing had been, and exports what it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import training.export
from index.bundle import Bundle
from index.embedder import Embedder
from index.images import decode
from tests.support.tiny_gallery import tiny_photo, write_tiny_folder
from training.checkpoints import RunFolder
from training.config import TrainingConfig, load_config
from training.data.photos import DataSet, load_data
from training.devices import choose_device
from training.errors import TrainingError
from training.evaluate import load_model, measure
from training.export import export_run
from training.loop import train

SMALL = ["epochs=2", "batch_size=8", "preprocessing={resize: 36, input_size: 32}", "workers=0", "learning_rate=0.0003"]


class Silent:
    """Watches nothing; may be told to end the run after an epoch, as a kill would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.epochs: list[int] = []
        self.losses: list[float] = []

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        self.losses.append(loss)

    def measured(self, epoch: int, record: dict[str, Any]) -> None:
        self.epochs.append(epoch)
        if epoch == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """So that sums are added in one order and runs can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load_data(f"folder:{write_tiny_folder(tmp_path_factory.mktemp('data') / 'photos')}")


@pytest.fixture(scope="module")
def config() -> TrainingConfig:
    return load_config(None, SMALL)


@pytest.fixture(scope="module")
def run(data: DataSet, config: TrainingConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    out = tmp_path_factory.mktemp("runs") / "whole"
    watcher = Silent()
    train(config, data, out, "folder:photos", watcher)
    assert watcher.epochs == [0, 1, 2]
    assert np.isfinite(watcher.losses).all() and len(watcher.losses) == 2 * (len(data.train) // 8)
    return RunFolder(out)


def test_a_run_records_every_epoch_and_its_settings(run: RunFolder, config: TrainingConfig) -> None:
    history = run.history()
    assert [record["epoch"] for record in history] == [0, 1, 2]
    assert all(0 <= record[name] <= 1 for record in history for name in ("recall@1", "recall@8", "map@r"))
    assert run.config == config and run.data == "folder:photos"


def test_a_killed_run_goes_on_to_the_same_weights(
    run: RunFolder, data: DataSet, config: TrainingConfig, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(config, data, tmp_path / "killed", "folder:photos", Silent(stop_after=1))
    watcher = Silent()
    train(config, data, tmp_path / "killed", "folder:photos", watcher)
    assert watcher.epochs == [2], "only the missing epoch was trained"
    resumed, whole = RunFolder(tmp_path / "killed").load(), run.load()
    assert resumed and whole and resumed["history"] == whole["history"]
    for part in ("model", "loss"):
        for name, value in whole[part].items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, resumed[part][name]), f"{part} {name}"


def test_training_moves_the_weights_and_leaves_batch_norm_statistics(run: RunFolder, config: TrainingConfig) -> None:
    from training.backbones import EmbeddingModel

    torch.manual_seed(config.seed)
    before, after = EmbeddingModel(config.backbone).state_dict(), run.model().state_dict()
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert not torch.equal(before["backbone.conv_stem.weight"], after["backbone.conv_stem.weight"])
    assert torch.equal(before["backbone.bn1.running_mean"], after["backbone.bn1.running_mean"])


def test_a_folder_of_another_run_is_not_overwritten(run: RunFolder, data: DataSet, config: TrainingConfig) -> None:
    with pytest.raises(TrainingError, match="other settings"):
        train(config.model_copy(update={"epochs": 7}), data, run.path, "folder:photos", Silent())


def test_a_foreign_folder_is_not_filled(data: DataSet, config: TrainingConfig, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="holds no run"):
        train(config, data, tmp_path, "folder:photos", Silent())


@pytest.fixture(scope="module")
def bundle(run: RunFolder, data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_run(run, tmp_path_factory.mktemp("bundles") / "bundle", data.test)


def test_the_bundle_embeds_as_the_run_does(run: RunFolder, bundle: Bundle) -> None:
    pixels = np.stack([bundle.preprocessing.apply(decode(tiny_photo(number, 9))) for number in range(5)])
    with torch.inference_mode():
        expected = run.model()(torch.from_numpy(pixels)).numpy()
    got = Embedder(bundle).embed(pixels)
    assert np.sum(expected * got, axis=1).min() > 0.99999
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


def test_the_bundle_measures_as_the_run_does(run: RunFolder, bundle: Bundle, data: DataSet) -> None:
    figures = [measure(data.test, *load_model(path)) for path in (run.path, bundle.directory)]
    assert figures[0] == pytest.approx(figures[1], abs=1e-3)
    assert bundle.card.metrics == pytest.approx(figures[1], abs=1e-3)
    assert bundle.card.untrained_metrics.keys() == bundle.card.metrics.keys()
    assert bundle.card.loss == "proxy_isa" and bundle.card.versions["torch"]


def test_a_model_that_strays_is_not_exported(
    run: RunFolder, data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.export, "LOWEST_COSINE", 1.01)
    with pytest.raises(TrainingError, match="strays from PyTorch"):
        export_run(run, tmp_path / "bundle", data.test)
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays behind"


def test_export_does_not_replace_what_is_no_bundle(run: RunFolder, data: DataSet, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="is not a bundle"):
        export_run(run, tmp_path, data.test)


def test_the_device_is_chosen_or_refused() -> None:
    assert choose_device("auto").type in ("cuda", "mps", "cpu")
    assert choose_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="cuda is not available"):
            choose_device("cuda")


def test_an_unknown_backbone_is_refused(data: DataSet, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="Unknown backbone 'resnet9000'"):
        train(load_config(None, [*SMALL, "backbone.name=resnet9000"]), data, tmp_path, "x", Silent())
