"""Models by name: pretrained backbones, runs and bundles."""

from pathlib import Path

import pytest

from tests.support.tiny_bundle import make_tiny_bundle
from training.checkpoints import RunFolder
from training.data import DataSet
from training.errors import TrainingError
from training.evaluation import measure
from training.models import load_backbone, open_model
from training.seen_classes import SeenClasses


def test_a_backbone_has_its_own_input_size_unless_that_is_set() -> None:
    config, model = load_backbone("backbone:test_efficientnet,backbone.weights=none")
    assert config.preprocessing.input_size == model.input_size == 160
    config, model = load_backbone("backbone:test_efficientnet,backbone.weights=none,preprocessing.input_size=64")
    assert config.preprocessing.input_size == model.input_size == 64 and config.preprocessing.resize == 73
    assert not model.training


def test_a_backbone_is_the_untrained_model_of_a_run(run: RunFolder, data: DataSet) -> None:
    model = open_model("backbone:efficientnet_lite0,preprocessing.resize=36,preprocessing.input_size=32")
    assert model.seen == SeenClasses()
    measured = measure(data.test, model.preprocessing, model.embed)
    assert measured == pytest.approx(run.result()["untrained"], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("backbone:", "names no backbone"),
        ("backbone:resnet9000", "Unknown backbone"),
        ("backbone:test_efficientnet,weights", "has no '='"),
        ("backbone:test_efficientnet,backbone.weights=nowhere.pth", "No weights file at"),
    ],
)
def test_a_wrong_name_is_refused(name: str, problem: str) -> None:
    with pytest.raises(TrainingError, match=problem):
        open_model(name)


def test_runs_and_bundles_bring_their_seen_classes(run: RunFolder, data: DataSet, tmp_path: Path) -> None:
    opened = open_model(str(run.path))
    assert opened.run == run and opened.seen == SeenClasses.of(photo.label for photo in data.train)
    bundle = open_model(str(make_tiny_bundle(tmp_path / "bundle")))
    assert bundle.bundle and bundle.seen is None
