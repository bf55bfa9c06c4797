"""The logs of a run: text, JSON lines, TensorBoard events and plots."""

import json
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from index._util.files import atomic_write, atomic_write_text
from training.trackers import ExperimentTracker

PAIR_SHARES = ("outlier", "informative", "easy", "damped_negatives")
"""Shares of pairs that a sample-aware loss reports; its value alone does not show progress."""


class RunLogger:
    """Writes a run's records into its folder; of several processes only one is `active`."""

    def __init__(
        self, folder: Path, *, first_step: int, active: bool, tracker: ExperimentTracker | None = None
    ) -> None:
        self._folder = folder
        self._first_step = first_step
        self._active = active
        self._tracker = tracker

    def __enter__(self) -> "RunLogger":
        if self._active:
            # Steps after a killed run's last checkpoint are trained again: their events are removed.
            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._first_step)
            self._log = (self._folder / "log.txt").open("a", encoding="utf-8", buffering=1)
            self.log(f"begins at step {self._first_step}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._active:
            self.log(f"stopped by {kind.__name__}: {error}" if kind else "finished")
            if self._tracker:
                self._tracker.close(failed=kind is not None)
            self._board.close()
            self._log.close()

    def log(self, text: str) -> None:
        """Writes a line of the log."""
        if self._active:
            self._log.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')} {text}\n")

    def step(self, step: int, figures: dict[str, float]) -> None:
        """Logs the figures of one training step."""
        if self._active:
            for name, value in figures.items():
                self._board.add_scalar(f"step/{name}", value, step)

    def epoch(self, history: list[dict[str, Any]], step: int) -> None:
        """Records the newest epoch; files are written from the full history, so that they always agree with it."""
        if not self._active:
            return
        for name, value in history[-1].items():
            if name != "epoch":
                self._board.add_scalar(f"epoch/{name}", value, step)
        if self._tracker:
            self._tracker.epoch(history[-1])
        self.log(json.dumps(history[-1]))
        atomic_write_text(self._folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in history))
        if len(history) > 1:
            _plot(history, self._folder / "curves.png")

    def finish(self, result: dict[str, Any]) -> None:
        """Reports the chosen model's figures."""
        if self._tracker:
            self._tracker.result(result)


def _plot(history: list[dict[str, Any]], path: Path) -> None:
    """Plots recall, the shares of the loss, and the learning rate with the loss, over epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    recall, shares, rate = figure.subplots(1, 3)
    recall.set_title("Recall and MAP on classes never trained")
    shares.set_title("Shares of pairs in the loss")
    rate.set_title("Learning rate and loss")
    for axes, names in ((recall, _metric_names(history)), (shares, PAIR_SHARES), (rate, ("learning_rate",))):
        for name in names:
            points = [(record["epoch"], record[name]) for record in history if name in record]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=name.replace("_", " "))
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    losses = [(record["epoch"], record["loss"]) for record in history if "loss" in record]
    twin = rate.twinx()
    twin.plot(*zip(*losses, strict=True), color="tab:red", linestyle="--", marker=".")
    twin.set_ylabel("loss", color="tab:red")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _metric_names(history: list[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for record in history for name in record)
    return [name for name in names if name.rpartition(".")[2] in ("recall@1", "recall@8", "map@r")]
