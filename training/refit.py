"""Refit: trains the model to ship on every product, after a first run has measured it.

The first run holds out a third of the products for testing and some of the others for choosing the epoch, so it is
trained on little more than half of the catalogue. The refit repeats it on all products, for the chosen number of
epochs of the same schedule. No product is left to measure it on: its figures are
those of the first run, and marked as such.
"""

from dataclasses import replace
from typing import Any

from training.callbacks import Callback
from training.checkpoints import REFIT, RunFolder
from training.data import DataSet, check_photos
from training.errors import TrainingError
from training.loop import train


def refit(first: RunFolder, data: DataSet, callback: Callback) -> RunFolder:
    """Trains on all photos into the folder `refit` of a finished run, or continues where a killed refit stopped."""
    result = first.result()
    if not result["epoch"]:
        raise TrainingError(
            f"The run {first.path} kept epoch 0, the untrained model, so it cannot be refitted.",
            "Train it with other settings first.",
        )
    config = first.config
    selection = config.selection.model_copy(update={"validation_share": 0.0, "fold": None})
    settings = config.model_copy(update={"selection": selection, "stop_epoch": result["epoch"], "test_every": 0})
    everything = check_photos(replace(data, train=(*data.train, *data.test), test=(), remarks=()))
    products = len({photo.label for photo in everything.train})
    callback.on_message(
        f"Refit on all {products:,} products for {result['epoch']} epochs; the figures are those of the first run."
    )
    run = RunFolder(first.path / REFIT)
    train(settings, everything, run.path, first.data, callback, resume=True)
    figures: dict[str, Any] = {name: value for name, value in result.items() if name != "epochs"}
    run.write_result(
        figures | {"epochs": result["epoch"], "refit": {"products": products, "photos": len(everything.train)}}
    )
    return run
