"""The protocol of "A Metric Learning Reality Check": four models on class-disjoint folds, measured apart and together.

Each model chooses its epoch on the quarter of the training classes that it did not learn; the test classes decide
nothing. Separated figures tell what a model of this size reaches and how much it varies, concatenated figures what
the four reach as one.
"""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.files import write_text
from index.metrics import KS, unit_vectors
from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data.checking import check_photos
from training.data.records import DataSet, Photo, fold_out
from training.errors import TrainingError
from training.evaluate import embed_photos, full_report, load_model, versions
from training.loop import train
from training.recording import Watcher
from training.world import joined_world

FOLDS = 4
RESULT = "mlrc.json"


def train_folds(
    config: TrainingConfig, data: DataSet, out: Path, spec: str, watcher: Watcher, *, resume: bool = False
) -> list[RunFolder]:
    """Trains `out`/fold-0 to fold-3, or with `resume` what is left of them."""
    fold_out(data.train, 0, FOLDS, config.seed)  # too few classes are told before anything is trained
    runs = [RunFolder(out / f"fold-{fold}") for fold in range(FOLDS)]
    first_process = os.environ.get("RANK", "0") == "0"  # the others may already see what it writes
    if first_process and not resume and out.exists() and any(out.iterdir()):
        raise TrainingError(f"{out} is not empty.", "Go on with its folds with --resume, or choose another --out.")
    with joined_world(config.device):
        for fold, run in enumerate(runs):
            selection = config.selection.model_copy(update={"fold": fold, "folds": FOLDS})
            settings = config.model_copy(update={"selection": selection})
            if run.is_finished:
                run.start(settings, spec, resume=resume)  # refuses a run with other settings
                watcher.say(f"Fold {fold} is finished")
                continue
            watcher.say(f"Fold {fold} of {FOLDS}, counted from 0")
            train(settings, data, run.path, spec, watcher, resume=resume)
    return runs


def measure_folds(
    runs: Sequence[RunFolder], data: DataSet, out: Path, watcher: Watcher, ks: Sequence[int] = KS
) -> dict[str, Any]:
    """Measures the folds' models on the test classes and writes `out`/mlrc.json."""
    photos = check_photos(data).test
    vectors = [_vectors(run, photos, watcher) for run in runs]
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
    write_text(out / RESULT, json.dumps(result, indent=2) + "\n")
    return result


def _vectors(run: RunFolder, photos: Sequence[Photo], watcher: Watcher) -> NDArray[np.float32]:
    preprocessing, embed = load_model(run.path, run.config.device)
    title = f"Measuring {run.path.name}"
    vectors = embed_photos(photos, preprocessing, embed, lambda done, total: watcher.busy(title, done, total))
    return unit_vectors(vectors)
