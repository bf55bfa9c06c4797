"""The logs of a run: the same history as JSON lines, TensorBoard events, text and a plot."""

import json
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.run_logger import RunLogger

HISTORY = [
    {"epoch": 0, "recall@1": 0.5, "map@r": 0.3},
    {"epoch": 1, "recall@1": 0.75, "map@r": 0.5, "loss": 2.0, "learning_rate": 0.1, "easy": 0.25},
]


def test_every_log_holds_the_history(tmp_path: Path) -> None:
    with RunLogger(tmp_path, first_step=0, active=True) as logger:
        logger.step(1, {"loss": 3.0})
        for epochs in (1, 2):
            logger.epoch(HISTORY[:epochs], step=epochs)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == HISTORY
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["begins at step 0", *map(json.dumps, HISTORY), "finished"]
    with Image.open(tmp_path / "curves.png") as plot:
        assert plot.size == (1440, 432), "three plots of 12 by 3.6 inches at 120 dots per inch"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("epoch/recall@1")] == [0.5, 0.75]
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(1, 3.0)]


def test_steps_that_are_trained_again_replace_their_events(tmp_path: Path) -> None:
    for first_step, losses in ((0, {1: 5.0, 2: 4.0, 3: 3.0}), (2, {2: 2.0})):
        with RunLogger(tmp_path, first_step=first_step, active=True) as logger:
            for step, loss in losses.items():
                logger.step(step, {"loss": loss})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(1, 5.0), (2, 2.0)]


def test_a_failure_is_logged_and_an_inactive_logger_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="diverged"), RunLogger(tmp_path / "", first_step=4, active=True):
        raise ValueError("diverged")
    assert (tmp_path / "log.txt").read_text().rstrip().endswith("stopped by ValueError: diverged")
    (tmp_path / "other").mkdir()
    with RunLogger(tmp_path / "other", first_step=0, active=False) as logger:
        logger.step(1, {"loss": 1.0})
        logger.epoch(HISTORY, step=1)
    assert list((tmp_path / "other").iterdir()) == []
