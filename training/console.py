"""What a training run prints: its plan, a row per epoch, and a table of its result."""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from index.cli.progress import format_duration, progress_bar
from training.callbacks import Callback
from training.metric_names import metric_title, retrieval_figures

if TYPE_CHECKING:
    from training.config import TrainingConfig
    from training.step_cost import RunPlan

_FIGURES = ("recall@1", "map@r")
"""What a row of the table shows; the log has all figures."""


class TrainingProgressBar(Callback):
    """A progress bar over a run's photos, and a row for every epoch; silent in all processes but the first.

    Without a terminal, lines take the place of the bar.
    """

    def __init__(self, config: "TrainingConfig", *, unmeasured: bool = False) -> None:
        """With `unmeasured` the run has no test photos, and its epochs print no row."""
        self.first = os.environ.get("RANK", "0") == "0"
        self._unmeasured = unmeasured
        self._epochs = config.last_epoch
        self._loss = config.loss.name
        self._batch_size = 1
        self._bar = progress_bar(f"Training with {self._loss}")

    def __enter__(self) -> "TrainingProgressBar":
        self._update = self._bar.__enter__()
        self._started = time.monotonic()
        self._has_header = False
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def on_plan(self, plan: "RunPlan") -> None:
        self._batch_size = plan.batch_size
        for line in plan.lines():
            self.on_message(line)

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        if self.first:
            title = f"Training with {self._loss}, epoch {epoch + 1}/{self._epochs}, step {step}/{steps}"
            shown, total = epoch * steps + step, self._epochs * steps
            self._update(shown * self._batch_size, total * self._batch_size, title)

    def on_progress(self, title: str, done: int, total: int) -> None:
        if self.first:
            self._update(done, total, title)

    def on_epoch(self, record: dict[str, Any]) -> None:
        if self._unmeasured:
            return
        if not self._has_header:
            self._has_header = True
            self.on_message(_HEADER)
        name = f"{record['epoch']}/{self._epochs}" if record["epoch"] else "untrained"
        cells = [_percent(record.get(f"{part}{figure}")) for part in ("validation.", "") for figure in _FIGURES]
        formats = {"loss": ".4g", "learning_rate": ".2g"}
        loss, rate = (format(record[key], digits) if key in record else "" for key, digits in formats.items())
        elapsed = format_duration(time.monotonic() - self._started)
        self.on_message(_align((name, loss, rate, *cells, elapsed)))

    def on_result(self, result: dict[str, Any]) -> None:
        columns = {f"epoch {result['epoch']}" if result["epoch"] else "kept": retrieval_figures(result)}
        if result["epoch"]:
            columns = {"untrained": result.get("untrained", {})} | columns
        names = list(retrieval_figures(result))
        if self._unmeasured or not names:
            return
        self.on_message("On the test classes, in percent:")
        self.on_message(_align_result(("", *map(metric_title, names))))
        for title, figures in columns.items():
            self.on_message(_align_result((title, *(_percent(figures.get(name)) for name in names))))

    def on_message(self, text: str) -> None:
        if self.first:
            typer.echo(text)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _align(cells: Sequence[str]) -> str:
    name, loss, rate, *figures, elapsed = cells
    return f"{name:<10}{loss:>9}{rate:>10}" + "".join(f"{cell:>12}" for cell in figures) + f"{elapsed:>10}"


def _align_result(cells: Sequence[str]) -> str:
    return f"{cells[0]:<12}" + "".join(f"{cell:>10}" for cell in cells[1:])


_HEADER = f"{'':<29}{'validation, percent':>24}{'test, percent':>24}\n" + _align(
    ("epoch", "loss", "rate", "Recall@1", "MAP@R", "Recall@1", "MAP@R", "elapsed")
)
