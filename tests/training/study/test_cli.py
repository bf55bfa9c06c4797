"""The command `study`."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lookalike import app
from tests.training.study.small_study import KEYS
from training.errors import TrainingError
from training.study.results import StudyFolder


@pytest.mark.slow
def test_the_command_checks_summarises_and_writes_a_page(
    finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path
) -> None:
    file, folder = finished
    arguments = ["--summary", "--report", f"{tmp_path}/p.html", "--curve", "map@r", "--curve", "sigma"]
    result = CliRunner().invoke(app, ["study", str(file), "--out", str(folder.path), *arguments])
    assert result.exit_code == 0, result.output
    assert "4 of 4 runs have ended" in result.output and "minus that of anchor, paired by seed" in result.output
    assert "map@r by epoch, mean over seeds in percent" in result.output and "sigma by epoch" in result.output
    page = (tmp_path / "p.html").read_text()
    assert "default-src 'none'" in page and "<script" not in page and "http://" not in page
    results = folder.results()
    assert all(f"{100 * result.figures['map@r']:.2f}" in page for result in results.values())
    for text in (
        "MAP@R on the test classes",
        "MAP@R on the held-out training classes",
        "loss.settings.volume",
        "stroke-width: 0.8",
    ):
        assert text in page
    assert results[KEYS[0]].initial.weights[:8] in page

    plan = ["study", str(file), "--data", f"folder:{photos}", "--out", f"{tmp_path}/new", "--dry-run", "--no-nice"]
    result = CliRunner().invoke(app, [*plan, "--only", "isa"])
    assert result.exit_code == 0, result.output
    assert result.output.count("not started") == 2 and "isa, seed 1" in result.output
    assert not (tmp_path / "new" / "runs").exists()
    result = CliRunner().invoke(app, [*plan, "--only", "isb"])
    assert isinstance(result.exception, TrainingError) and "did you mean isa?" in str(result.exception)
