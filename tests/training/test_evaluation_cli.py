"""The commands that measure: what they print, write and refuse."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookalike import main
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import write_tiny_folder, write_tiny_source
from training.checkpoints import RunFolder

Command = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process; returns its exit code and output."""

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lookalike", *line.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        code: Any = ended.value.code
        return code, *capfd.readouterr()

    return run


def test_evaluate_prints_figures_and_writes_them_with_their_origin(
    photos: Path, tmp_path: Path, command: Command
) -> None:
    bundle, file = make_tiny_bundle(tmp_path / "bundle"), tmp_path / "figures.json"
    line = f"evaluate --model {bundle} --data folder:{photos} --k 1,3 --bootstrap 100 --index --json {file}"
    code, printed, errors = command(line)
    assert code == 0
    assert "12 queries against 12 gallery photos" in printed
    assert "does not record the classes it was trained on" in errors
    assert all(name in printed for name in ("Recall@1", "Recall@3", "MAP@R", "R-precision", "mAP", "through the index"))
    record = json.loads(file.read_text())
    assert record["bundle"] == json.loads((bundle / "bundle.json").read_text())["id"]
    assert record["data"] == f"folder:{photos}" and record["model"] == str(bundle)
    assert (record["queries"], record["gallery"]) == (12, 12)
    assert record["versions"]["lookalike"] and record["versions"]["numpy"] == np.__version__
    for name, (low, high) in record["intervals"].items():
        assert low <= record["figures"][name] <= high
    assert record["index"]["recall@1"] == pytest.approx(record["figures"]["recall@1"], abs=0.1)


def test_evaluate_measures_photos_against_a_catalogue(tmp_path: Path, command: Command) -> None:
    bundle, file = make_tiny_bundle(tmp_path / "bundle"), tmp_path / "figures.json"
    catalogue, queries = write_tiny_source(tmp_path / "shop"), write_tiny_folder(tmp_path / "photos")
    for colour in ("red", "green", "blue"):
        (queries / colour).rename(queries / f"ball-{colour}")
    code, printed, errors = command(
        f"evaluate --model {bundle} --queries {queries} --gallery {catalogue} --json {file}"
    )
    assert code == 0, errors
    assert "12 queries against 16 gallery photos" in printed
    assert "20 more queries have no photo of their class in the gallery and are left out" in printed
    record = json.loads(file.read_text())
    assert record["figures"]["recall@1"] == 1 and record["queries_without_answer"] == 20
    assert (record["data"], record["query_photos"], record["gallery_photos"]) == (None, str(queries), str(catalogue))
    assert record["seen_classes"] == {"classes": 8, "seen": 0, "policy": "refuse"}


@pytest.mark.parametrize("source", ["", "--data sample --queries a --gallery b", "--queries a", "--gallery b"])
def test_the_photos_must_be_given_in_one_way(tmp_path: Path, command: Command, source: str) -> None:
    for line in (f"evaluate --model {tmp_path}", f"compare {tmp_path}"):
        code, _, errors = command(f"{line} {source}")
        assert code == 1 and "Give --data, or --queries and --gallery" in errors


def test_a_run_is_not_measured_on_classes_it_was_trained_on(
    run: RunFolder, photos: Path, tmp_path: Path, command: Command
) -> None:
    """Here the split is another one, as with photos that were moved or renamed."""
    learned = json.loads((run.path / "classes.json").read_text())["train"]
    table = tmp_path / "leaky.csv"
    rows = [f"{label},{file},test" for label in (*learned[:2], "purple", "cyan") for file in (photos / label).iterdir()]
    table.write_text("\n".join(["label,path,split", *rows]))
    for model in (run.path, run.path / "checkpoint.pt"):
        code, _, errors = command(f"evaluate --model {model} --data table:{table}")
        assert code == 1 and f"2 of the 4 classes to measure were used to train {model}" in errors
    line = f"evaluate --model {run.path} --data table:{table} --seen-classes exclude"
    code, printed, errors = command(line)
    assert code == 0 and "8 queries against 16 gallery photos" in printed and "2 classes are not queried" in errors
    code, _, errors = command(f"report {run.path} --data table:{table} --out {tmp_path / 'page.html'}")
    assert code == 1 and "2 of the 4 classes" in errors
    code, _, errors = command(f"export {run.path} --out {tmp_path / 'b'} --data table:{table} --precision int8")
    assert code == 1 and "2 of the 4 classes" in errors


def test_compare_prints_a_table_with_paired_differences(
    run: RunFolder, photos: Path, tmp_path: Path, command: Command
) -> None:
    backbone = "backbone:efficientnet_lite0,preprocessing.resize=36,preprocessing.input_size=32"
    file = tmp_path / "comparison.json"
    line = f"compare {backbone} {run.path} --data folder:{photos} --k 1,2 --bootstrap 50 --json {file}"
    code, printed, errors = command(line)
    assert code == 0, errors
    assert all(text in printed for text in ("Recall@2", "MAP@R", f"Points above {backbone}", "1280", "512"))
    record = json.loads(file.read_text())
    first, second = record["models"]
    result = run.result()
    assert first["figures"]["map@r"]["mean"] == pytest.approx(result["untrained"]["map@r"], abs=1e-3)
    assert second["figures"]["map@r"]["mean"] == pytest.approx(result["map@r"], abs=1e-3)
    gain = second["figures"]["map@r"]["mean"] - first["figures"]["map@r"]["mean"]
    assert first["differences"] is None and second["differences"]["map@r"]["mean"] == pytest.approx(gain)
    low, high = second["differences"]["map@r"]["interval"]
    assert low <= gain <= high


def test_compare_refuses_a_model_that_is_given_twice(run: RunFolder, command: Command) -> None:
    code, _, errors = command(f"compare {run.path} {run.path} --data sample")
    assert code == 1 and "is given twice" in errors
