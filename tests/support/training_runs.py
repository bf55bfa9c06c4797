"""Settings of a training run that takes seconds, and a callback that records the run or interrupts it."""

from typing import Any

from training.callbacks import Callback

SMALL_SETTINGS = [
    "epochs=2",
    "preprocessing={resize: 36, input_size: 32}",
    "sampling.batch_size=8",
    "optimiser.learning_rate=0.0003",
    "selection.validation_share=0",
    "workers=0",
]


class RecordingCallback(Callback):
    """Records the events of a run; can interrupt it after an epoch or a step, as a kill would."""

    def __init__(self, *, stop_after_epoch: int | None = None, stop_after_step: tuple[int, int] | None = None) -> None:
        self.stop_after_epoch = stop_after_epoch
        self.stop_after_step = stop_after_step
        self.epochs: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self.messages: list[str] = []

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        self.steps.append((epoch, step))
        if (epoch, step) == self.stop_after_step:
            raise KeyboardInterrupt

    def on_epoch(self, record: dict[str, Any]) -> None:
        self.epochs.append(record["epoch"])
        if record["epoch"] == self.stop_after_epoch:
            raise KeyboardInterrupt

    def on_message(self, text: str) -> None:
        self.messages.append(text)
