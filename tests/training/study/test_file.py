"""The file of a study: its runs, and mistakes with their place."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.study.small_study import ROOT, write_table
from training.errors import TrainingError
from training.study.file import read_study

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"seed": [0]}, r"seed is unknown \(did you mean seeds\?\)"),
    ({"settings": {"epohcs": 3}}, r"settings.epohcs is unknown \(did you mean epochs\?\)"),
    ({"settings": {"epochs": -1}}, r"settings.epochs must be at least 0 \(got -1\)"),
    (
        {"runs": {"a": {"optimiser": {"learning_rat": 1}}}},
        r"runs.a.optimiser.learning_rat is unknown \(did you mean learning_rate\?\)",
    ),
    ({"runs": {"a/b": {}}}, "runs.a/b"),
    ({"runs": {}}, "runs must have at least 1 entries"),
    ({"baseline": "ancor"}, r"baseline='ancor' is not a run \(did you mean anchor"),
    ({"seeds": [0, 0]}, "lists a seed twice"),
    ({"seeds": ["0"]}, r"seeds\[0\] must be a whole number \(got '0'\)"),
    ({"runs": {"a": {"seed": 3}}}, "runs.a.seed=3: list seeds under seeds"),
    ({"presets": ["club"]}, r"No preset is called 'club' \(did you mean cub\?\)"),
    ({"drop": {"after_epoch": 3, "behind": 1.5}}, r"drop.behind must be less than 1 \(got 1.5\)"),
    ({"drop": {"after": 3, "behind": 0.1}}, r"drop.after_epoch is missing; drop.after is unknown \(did you mean"),
    ({"metric": "recall@3"}, "metric.*'recall@3'"),
]


@pytest.mark.parametrize(("changes", "problem"), MISTAKES, ids=[problem for _, problem in MISTAKES])
def test_a_mistake_in_the_file_is_reported_with_its_place(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=problem):
        read_study(write_table(tmp_path, **changes))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    with pytest.raises(TrainingError, match="No study at"):
        read_study(file)
    file.write_text("name: x\nruns:\n  a: {}\n  a: {epochs: 3}\n")
    with pytest.raises(TrainingError, match="'a' is a duplicate key"):
        read_study(file)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "studies").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_studies_of_the_benchmarks_can_be_read(file: Path) -> None:
    study = read_study(file)
    assert study.name == file.stem and len(study.runs) > 1
