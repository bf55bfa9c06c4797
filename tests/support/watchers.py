"""Watchers of a training run: one that stays quiet, and may interrupt the run as a kill would."""

from typing import Any


class Silent:
    """Records what a run reports; may interrupt it after an epoch or a step."""

    def __init__(self, *, stop_after_epoch: int | None = None, stop_after_step: tuple[int, int] | None = None) -> None:
        self.stop_after_epoch = stop_after_epoch
        self.stop_after_step = stop_after_step
        self.epochs: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self.said: list[str] = []

    def step(self, epoch: int, step: int, steps: int) -> None:
        self.steps.append((epoch, step))
        if (epoch, step) == self.stop_after_step:
            raise KeyboardInterrupt

    def measured(self, record: dict[str, Any]) -> None:
        self.epochs.append(record["epoch"])
        if record["epoch"] == self.stop_after_epoch:
            raise KeyboardInterrupt

    def busy(self, what: str, done: int, total: int) -> None:
        self.said.append(what)

    def say(self, text: str) -> None:
        self.said.append(text)
