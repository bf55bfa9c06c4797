"""Fixtures of the tests of studies."""

from pathlib import Path

import pytest

from tests.training.study.small_study import KEYS, run_study, write_table
from training.study.results import StudyFolder


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyFolder]:
    directory = tmp_path_factory.mktemp("finished")
    file = write_table(directory)
    messages, failed = run_study(file, photos, directory / "out")
    assert not failed and messages == [f"{key}: run {number} of 4" for number, key in enumerate(KEYS, 1)]
    return file, StudyFolder(directory / "out")
