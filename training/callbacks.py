"""The callback through which a training run reports to its caller."""

from typing import Any


class Callback:
    """Receives the events of a run; override what you need. The default ignores them all."""

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        """Called after every step; `epoch` counts from 0, `step` from 1."""

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Called with an epoch's record; epoch 0 is the untrained model."""

    def on_progress(self, title: str, done: int, total: int) -> None:
        """Called during long work outside the steps, such as checking photos."""

    def on_message(self, text: str) -> None:
        """Called with a remark for the user."""
