"""The files of a study: results and epochs as JSON lines, and locks between processes."""

from pathlib import Path

import pytest

from tests.training.study.test_summary import result_of
from training.errors import TrainingError
from training.study.file import RunKey
from training.study.results import StudyFolder, shared_start, sharing_warnings


def test_a_run_that_is_added_again_replaces_its_lines(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    for chosen in (0.1, 0.2):
        for run in ("one", "two"):
            folder.add(result_of(run, 0, chosen), [{"epoch": 0, "map@r": chosen}, {"epoch": 1, "map@r": chosen}])
    assert list(folder.results()) == [RunKey("one", 0), RunKey("two", 0)]
    assert folder.results()[RunKey("one", 0)] == result_of("one", 0, 0.2)
    assert folder.histories([])[RunKey("two", 0)] == [{"epoch": 0, "map@r": 0.2}, {"epoch": 1, "map@r": 0.2}]
    assert len(folder.history_file.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("line", "problem"), [("{", "line 2 is not JSON"), ('{"study": "x"}', "line 2: run is missing")]
)
def test_a_damaged_line_is_reported_with_its_number(tmp_path: Path, line: str, problem: str) -> None:
    folder = StudyFolder(tmp_path)
    folder.add(result_of("one", 0, 0.1), [])
    folder.results_file.write_text(folder.results_file.read_text() + line + "\n")
    with pytest.raises(TrainingError, match=problem):
        folder.results()


def test_differences_in_the_start_of_a_seed_are_reported() -> None:
    results = [result_of("one", 0, 0.1), result_of("two", 0, 0.1, weights="other"), result_of("two", 1, 0.1)]
    starts = {result.key: shared_start(result.initial, result.processor, result.threads) for result in results}
    assert sharing_warnings(starts) == ["Seed 0: runs have different initial weights: one / two."]
