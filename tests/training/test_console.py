"""What a training run prints."""

import pytest

from training.config import load_config
from training.console import TrainingProgressBar

RECORD = {"epoch": 1, "loss": 12.3456, "learning_rate": 0.001, "photos_per_second": 30.0}
FIGURES = {"recall@1": 0.971, "recall@2": 0.98, "recall@4": 0.99, "recall@8": 1.0, "map@r": 0.546}
WIDTH = 100


@pytest.fixture
def callback() -> TrainingProgressBar:
    return TrainingProgressBar(load_config(None, ["epochs=2"]))


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_epochs_are_rows_of_a_narrow_table(callback: TrainingProgressBar, capsys: pytest.CaptureFixture[str]) -> None:
    validation = {f"validation.{name}": value / 2 for name, value in FIGURES.items()}
    with callback:
        callback.on_epoch({"epoch": 0, **validation, **FIGURES})
        callback.on_epoch({**RECORD, **validation})
    lines = printed(capsys)
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[1].split() == ["epoch", "loss", "rate", "Recall@1", "MAP@R", "Recall@1", "MAP@R", "elapsed"]
    assert lines[2].split() == ["untrained", "48.5", "27.3", "97.1", "54.6", "0:00"]
    assert lines[3].split() == ["1/2", "12.35", "0.001", "48.5", "27.3", "0:00"], "not measured on the test classes"


def test_the_result_is_compared_with_the_untrained_backbone(
    callback: TrainingProgressBar, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained = dict.fromkeys(FIGURES, 0.5)
    with callback:
        callback.on_result({**RECORD, **FIGURES, "untrained": untrained})
    title, header, before, after = printed(capsys)
    assert title == "On the test classes, in percent:"
    assert header.split() == ["Recall@1", "Recall@2", "Recall@4", "Recall@8", "MAP@R"]
    assert before.split() == ["untrained", *["50.0"] * 5]
    assert after.split() == ["epoch", "1", "97.1", "98.0", "99.0", "100.0", "54.6"]


def test_a_run_that_is_not_measured_prints_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgressBar(load_config(None, []), unmeasured=True) as callback:
        callback.on_epoch(RECORD)
        callback.on_result({**RECORD, "untrained": {}})
    assert printed(capsys) == []


def test_other_processes_print_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with TrainingProgressBar(load_config(None, [])) as callback:
        callback.on_step(0, 1, 2)
        callback.on_epoch({"epoch": 0, **FIGURES})
    assert printed(capsys) == []
