"""Four models on class-disjoint folds, measured separately and concatenated.

`--protocol folds` trains them with the user's settings, `--protocol mlrc` with those of "A Metric Learning Reality
Check" (the preset `mlrc`) under the user's. Each model selects its epoch on the quarter of the training classes that it
was not trained on; the test classes select nothing. The separated figures are the mean and deviation of one model,
the concatenated ones those of all four together.
"""

import json
import os
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index._util.files import atomic_write_text
from index.evaluation.metrics import KS, unit_vectors
from training.callbacks import Callback
from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data import DataSet, Photo, check_photos
from training.data.dataset import fold_out
from training.devices import choose_device
from training.distributed import ProcessGroup, join_process_group
from training.errors import TrainingError
from training.evaluation import Evaluator, full_report, versions
from training.loop import train
from training.setup import feature_store

FOLDS = 4
RESULT = "folds.json"


def train_folds(
    config: TrainingConfig, data: DataSet, out: Path, spec: str, callback: Callback, *, resume: bool = False
) -> list[RunFolder]:
    """Trains `out`/fold-0 to fold-3, or with `resume` the folds that are not finished."""
    fold_out(data.train, 0, FOLDS, config.seed)  # raises before any training when the classes are too few
    runs = [RunFolder(out / f"fold-{fold}") for fold in range(FOLDS)]
    first_process = os.environ.get("RANK", "0") == "0"  # the other processes may already see its files
    if first_process and not resume and out.exists() and any(out.iterdir()):
        raise TrainingError(f"{out} is not empty.", "Continue its folds with --resume, or choose another --out.")
    with join_process_group(config.device):
        for fold, run in enumerate(runs):
            selection = config.selection.model_copy(update={"fold": fold, "folds": FOLDS})
            settings = config.model_copy(update={"selection": selection})
            if run.is_finished:
                run.start(settings, spec, resume=resume)  # refuses different settings, reopens a run for more epochs
            if run.is_finished:
                callback.on_message(f"Fold {fold} is finished")
                continue
            callback.on_message(f"Fold {fold} of {FOLDS}, counted from 0")
            train(settings, data, run.path, spec, callback, resume=resume)
    return runs


def measure_folds(
    runs: Sequence[RunFolder], data: DataSet, out: Path, callback: Callback, ks: Sequence[int] = KS
) -> dict[str, Any]:
    """Measures the folds' models on the test classes and writes `out`/folds.json."""
    photos = check_photos(data).test
    vectors = [_vectors(run, photos, callback) for run in runs]
    folds = [full_report(of_one, photos, ks) for of_one in vectors]
    together = full_report(np.concatenate(vectors, axis=1), photos, ks)
    result = {
        "data": runs[0].data,
        "queries": together["queries"],
        "gallery": together["gallery"],
        "separated": {
            name: {"mean": statistics.mean(values), "deviation": statistics.stdev(values)}
            for name in together["figures"]
            for values in [[fold["figures"][name] for fold in folds]]
        },
        "concatenated": together["figures"],
        "folds": [{"epoch": run.result()["epoch"], **fold["figures"]} for run, fold in zip(runs, folds, strict=True)],
        "versions": versions(),
    }
    atomic_write_text(out / RESULT, json.dumps(result, indent=2) + "\n")
    return result


def _vectors(run: RunFolder, photos: Sequence[Photo], callback: Callback) -> NDArray[np.float32]:
    config, device = run.config, choose_device(run.config.device)
    world, model = ProcessGroup(0, 1, device), run.model().to(device)
    # Of cached stages the last ones have learned: their cache is that of the initial weights.
    head_only = config.cached_views and config.cached_stage is None
    store = feature_store(config, model, None, run.path, world, workers=0) if head_only else None
    on_progress = partial(callback.on_progress, f"Measuring {run.path.name}")
    vectors = Evaluator(photos, config.preprocessing, world, store=store, on_progress=on_progress).embed(model)
    assert vectors is not None, "a single process has all vectors"
    return unit_vectors(vectors)
