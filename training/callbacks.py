"""The callbacks through which long work reports to its caller."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.step_cost import RunPlan

Progress = Callable[[int, int], None]
"""Progress callback: (done, total)."""


class Callback:
    """Receives the events of a run; override what you need. The default ignores them all."""

    def on_plan(self, plan: "RunPlan") -> None:
        """Called before the first step of a run, or of its continuation."""

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        """Called after every step; `epoch` counts from 0, `step` from 1."""

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Called with an epoch's record; epoch 0 is the untrained model."""

    def on_result(self, result: dict[str, Any]) -> None:
        """Called at the end of a run with the chosen model's figures."""

    def on_progress(self, title: str, done: int, total: int) -> None:
        """Called during long work outside the steps, such as checking photos."""

    def on_message(self, text: str) -> None:
        """Called with a remark for the user."""
