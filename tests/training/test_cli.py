"""The commands of training: what they print, write and refuse."""

from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.training_runs import untrained_run
from training import cli
from training.data import DataSet
from training.errors import TrainingError


@pytest.mark.slow
def test_export_writes_a_bundle_per_precision_and_prints_its_id(
    data: DataSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = untrained_run(tmp_path / "run", "test_efficientnet", data)
    cli.export(str(run.path), tmp_path / "bundle", precision="fp32,fp16")
    printed = capsys.readouterr().out
    assert Bundle.load(tmp_path / "bundle-fp16").id in printed and "fp16" in printed


def test_a_reduced_precision_that_loses_recall_gets_a_warning(tmp_path: Path) -> None:
    card = Bundle.load(make_tiny_bundle(tmp_path / "bundle")).card
    for lost, lines in ((0.004, 2), (0.006, 3)):
        figures = {"precision": "int8", "fp32_metrics": {"recall@1": 0.9}, "metrics": {"recall@1": 0.9 - lost}}
        assert len(cli.format_precision(card.model_copy(update=figures))) == lines
    assert cli.format_precision(card.model_copy(update=figures))[2].startswith("  int8 loses 0.6 points of Recall@1")


def test_an_unknown_precision_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="'fp8' is unknown"):
        cli.export(str(tmp_path / "no-run"), tmp_path / "bundle", precision="fp32,fp8")


@pytest.mark.slow
def test_a_backbone_is_exported_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.export("backbone:efficientnet_lite0,preprocessing.input_size=64", tmp_path / "bundle")
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.id in capsys.readouterr().out
    assert (bundle.dimension, bundle.preprocessing.input_size, bundle.card.loss) == (1280, 64, "")
    assert "as it was pretrained" in (tmp_path / "bundle" / "README.md").read_text()
    with pytest.raises(TrainingError, match="measured on photos"):
        cli.export("backbone:efficientnet_lite0", tmp_path / "other", precision="int8")
