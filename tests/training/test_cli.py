"""The commands of training: what they print, write and refuse."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from index.embedding.bundle import Bundle
from lookalike import main
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
    cli.export(run.path, tmp_path / "bundle", precision="fp32,fp16")
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
        cli.export(tmp_path / "no-run", tmp_path / "bundle", precision="fp32,fp8")


def test_evaluate_prints_figures_and_writes_them_with_their_origin(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle, file = make_tiny_bundle(tmp_path / "bundle"), tmp_path / "figures.json"
    line = f"evaluate --model {bundle} --data folder:{photos} --k 1,3 --bootstrap 100 --index --json {file}"
    monkeypatch.setattr(sys, "argv", ["lookalike", *line.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr().out
    assert ended.value.code == 0
    assert "12 queries against 12 gallery photos" in printed
    assert all(name in printed for name in ("Recall@1", "Recall@3", "MAP@R", "R-precision", "mAP", "through the index"))
    record = json.loads(file.read_text())
    assert record["bundle"] == json.loads((bundle / "bundle.json").read_text())["id"]
    assert record["data"] == f"folder:{photos}" and record["model"] == str(bundle)
    assert (record["queries"], record["gallery"]) == (12, 12)
    assert record["versions"]["lookalike"] and record["versions"]["numpy"] == np.__version__
    for name, (low, high) in record["intervals"].items():
        assert low <= record["figures"][name] <= high
    assert record["index"]["recall@1"] == pytest.approx(record["figures"]["recall@1"], abs=0.1)
