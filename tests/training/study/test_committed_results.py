"""The results in the repository: made from its study files, and shown by docs/results.md as the summary prints them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lookalike import app
from training.config import flatten_settings
from training.study.file import read_study
from training.study.results import StudyFolder
from training.study.runner import describe_config

ROOT = Path(__file__).parents[3]
STUDIES = ROOT / "benchmarks" / "studies"
FOLDERS = sorted(path for path in (STUDIES / "results").iterdir() if path.is_dir())
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
TABLES = re.findall(r"^```sh\n(lookalike study [^`]*?--summary[^`]*?)\n```\n+```text\n(.*?)\n```$", PAGE, re.M | re.S)
PLOTS = re.findall(r"^```sh\n(python benchmarks/study_plots\.py [^`]*?--svg (\S+))\n```$", PAGE, re.M)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_results_have_the_settings_of_their_study_file(folder: Path) -> None:
    results = StudyFolder(folder).results()
    (name,) = {result.study for result in results.values()}
    planned = {run.key: run.config for run in read_study(STUDIES / f"{name}.yaml").plan()}
    for key, result in results.items():
        kept, now = flatten_settings(result.config), flatten_settings(describe_config(planned[key]))
        differing = {setting for setting in kept if setting in now and kept[setting] != now[setting]}
        assert not differing, f"{key} of {folder.name} was trained with other settings"


def test_the_page_shows_every_committed_result() -> None:
    shown = {command.split("--out ")[1].split()[0] for command, _ in TABLES}
    assert shown == {str(folder.relative_to(ROOT)) for folder in FOLDERS}


@pytest.mark.parametrize(("command", "table"), TABLES, ids=[command.split()[4] for command, _ in TABLES])
def test_the_page_shows_what_the_summary_prints_from_the_lines_alone(
    command: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " "))[1:])
    assert result.exit_code == 0, result.output
    printed = [part.rstrip() for part in re.sub(r" +$", "", result.output, flags=re.M).split("\n\n")]
    for part in table.split("\n\n"):  # a page may leave out parts
        assert part in printed


@pytest.mark.parametrize(("command", "plot"), PLOTS, ids=[Path(plot).stem for _, plot in PLOTS])
def test_the_page_shows_plots_of_the_lines(command: str, plot: str, tmp_path: Path) -> None:
    """The description of an SVG is a digest of the values in it; the drawing itself depends on Matplotlib's version."""
    assert f"({Path(plot).name})" in PAGE
    drawn = tmp_path / "drawn.svg"
    arguments = shlex.split(command.replace("\\\n", " ").replace(plot, str(drawn)))[1:]
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)
    committed, redrawn = (re.findall(r"values [0-9a-f]{64}", path.read_text()) for path in (ROOT / plot, drawn))
    assert len(committed) == 1 and committed == redrawn


def test_every_plot_of_the_page_has_its_command() -> None:
    assert {Path(plot).name for _, plot in PLOTS} == set(re.findall(r"\]\(([^()]+\.svg)\)", PAGE))
