"""Fixtures of the tests of training."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from index.embedding.bundle import Bundle
from tests.support.tiny_gallery import write_tiny_folder
from tests.support.training_runs import SMALL_SETTINGS, RecordingCallback, untrained_run
from training.checkpoints import RunFolder
from training.config import TrainingConfig, load_config
from training.data import DataSet, load_data
from training.export import export_reduced, export_run
from training.loop import train


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Runs the tests on one thread: sums then have one order, and runs can be compared bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of eight classes with four photos each."""
    return write_tiny_folder(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="package")
def data(photos: Path) -> DataSet:
    return load_data(f"folder:{photos}")


@pytest.fixture(scope="package")
def config() -> TrainingConfig:
    return load_config(None, SMALL_SETTINGS)


@pytest.fixture(scope="package")
def run(data: DataSet, config: TrainingConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of two epochs; tests do not change it."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    train(config, data, out, "folder:photos", RecordingCallback())
    return RunFolder(out)


BACKBONES = ["test_efficientnet", "test_vit"]


@pytest.fixture(scope="module", params=BACKBONES)
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: DataSet) -> list[Bundle]:
    """The bundles at fp32, fp16 and int8."""
    folder = tmp_path_factory.mktemp("export")
    bundle = export_run(untrained_run(folder / "run", request.param, data), folder / "bundle", data.test)
    return [bundle, *export_reduced(bundle, ["fp16", "int8"], data)]
