"""Trains the runs of a study: resumable, shared by processes, and portable to other machines.

Runs of one seed share held-out classes, initial weights and batch order, since all of these follow from the seed;
digests of weights and batches are compared before the first run starts.
"""

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from index._util.files import atomic_write_text
from index.errors import LookalikeError
from training.callbacks import Callback
from training.checkpoints import RunFolder
from training.config import RESUMABLE, TrainingConfig, flatten_settings
from training.data import DataSet
from training.devices import choose_device
from training.distributed import ProcessGroup
from training.errors import TrainingError
from training.evaluation import versions
from training.loop import train
from training.metric_names import retrieval_figures
from training.setup import prepare_training
from training.study.file import DropRule, PlannedRun, RunKey, Study
from training.study.results import History, Initial, RunResult, StudyFolder, shared_start, sharing_warnings

CallbackFactory = Callable[[TrainingConfig], AbstractContextManager[Callback]]

_MACHINE_SETTINGS = RESUMABLE - {"epochs", "stop_epoch"}
"""Settings of where a run is trained: not part of its identity."""
_WEIGHT_WORDS = frozenset({"auto", "package", "hub", "none"})
_MAX_DIFFERENCES = 3


# --- before the first run ---


def describe_config(config: TrainingConfig) -> dict[str, Any]:
    """Returns every setting that affects the training, equal on each machine."""
    described = config.model_dump(mode="json", exclude=set(_MACHINE_SETTINGS))
    weights = config.backbone.weights
    if weights not in _WEIGHT_WORDS:
        described["backbone"]["weights"] = Path(weights).name  # its content is in the digest of the initial weights
    return described


def config_digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def photos_digest(data: DataSet) -> str:
    """Returns a digest of the classes and file names of training and test photos, in their order."""
    digest = hashlib.sha256()
    for part in (data.train, data.test):
        digest.update(repr([(photo.label, photo.path.name, photo.box) for photo in part]).encode())
    return digest.hexdigest()


def check_finished(folder: StudyFolder, study: Study, runs: Sequence[PlannedRun], spec: str, data: DataSet) -> None:
    """Refuses a folder with runs of other settings or data."""
    results = folder.results()
    photos = photos_digest(data)
    if others := {result.study for result in results.values()} - {study.name}:
        raise TrainingError(
            f"{folder.results_file} holds the study {min(others)!r}, not {study.name!r}.", "Choose another --out."
        )
    for run in runs:
        if result := results.get(run.key):
            _refuse_other_settings(run, result.config, describe_config(run.config))
            if (result.data, result.photos) != (_kind(spec), photos):
                raise TrainingError(
                    f"{run.key} was trained on other photos ({result.data}) than those of {spec}.",
                    "Give the same data with --data, or choose another --out.",
                )
        elif (folder.run(run.key).path / "config.yaml").is_file():
            _refuse_other_settings(run, describe_config(folder.run(run.key).config), describe_config(run.config))


def _refuse_other_settings(run: PlannedRun, kept: dict[str, Any], wanted: dict[str, Any]) -> None:
    if config_digest(kept) == config_digest(wanted):
        return
    old, new = flatten_settings(kept), flatten_settings(wanted)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    listed = "; ".join(
        f"{name} was {old.get(name, 'not set')}, is {new.get(name, 'not set')}" for name in names[:_MAX_DIFFERENCES]
    )
    more = f" and {len(names) - _MAX_DIFFERENCES} more" if len(names) > _MAX_DIFFERENCES else ""
    raise TrainingError(
        f"{run.key} was trained with different settings: {listed}{more}.",
        "Restore the setting, give the run another name, or choose another --out.",
    )


def try_runs(runs: Iterable[PlannedRun], study: Study, data: DataSet, folder: StudyFolder) -> dict[RunKey, Initial]:
    """Builds the model, loss and batches of each run, to find mistakes before training."""
    initial = {}
    for run in runs:
        if study.drop and not run.config.selection.holds_out:
            raise TrainingError(
                f"drop.metric={study.drop.metric} needs held-out classes, and run {run.key.run!r} has none.",
                "Set selection.validation_share, e.g. 0.2, or leave out drop.",
            )
        # Cached activations take long to make and change neither weights nor batches.
        config = run.config.model_copy(update={"cached_views": 0, "cached_stage": None})
        try:
            work = prepare_training(
                config, data, folder.run(run.key).path, ProcessGroup(0, 1, torch.device("cpu")), Callback()
            )
        except TrainingError as error:
            raise TrainingError(f"Run {run.key.run!r}: {error.problem}", error.remedy) from None
        initial[run.key] = Initial(**work.initial)
    return initial


# --- the runs ---


@dataclass(frozen=True)
class StudyRunner:
    """Trains the remaining runs of a study; several processes may share one folder."""

    study: Study
    spec: str
    data: DataSet
    folder: StudyFolder
    make_callback: CallbackFactory
    on_message: Callable[[str], None]
    keep_checkpoints: bool = False

    def check(self, runs: Sequence[PlannedRun]) -> None:
        """Finds mistakes before training, and reports what the runs of a seed do not share."""
        check_finished(self.folder, self.study, runs, self.spec, self.data)
        finished = self.folder.results()
        left = [run for run in runs if run.key not in finished]
        initial = try_runs(left, self.study, self.data, self.folder)
        starts = {key: result.start for key, result in finished.items()}
        for run in left:
            starts[run.key] = shared_start(initial[run.key], _processor(run.config), torch.get_num_threads())
        for warning in sharing_warnings(starts):
            self.on_message(warning)

    def run(self, runs: Sequence[PlannedRun]) -> list[RunKey]:
        """Trains each run that is neither finished nor locked by another process; returns those that failed."""
        self.check(runs)
        failed = []
        for number, run in enumerate(runs, 1):
            with self.folder.lock(run.key.folder) as free:
                if not free:
                    self.on_message(f"{run.key} is being trained by another process")
                elif run.key in self.folder.results():
                    self._trim(run)
                else:
                    self.on_message(f"{run.key}: run {number} of {len(runs)}")
                    try:
                        self._finish(run)
                    except LookalikeError as error:  # such as a diverged loss: the other runs continue
                        self.on_message(f"{run.key} failed: {error}")
                        failed.append(run.key)
        return failed

    def _finish(self, run: PlannedRun) -> None:
        folder = self.folder.run(run.key)
        clock = _Clock(folder)
        if not folder.is_finished:
            _set_data(folder, self.spec)

            def after_epoch(history: History) -> str | None:
                clock.save()
                return self._drop_reason(run, history)

            with self.make_callback(run.config) as callback:
                train(run.config, self.data, folder.path, self.spec, callback, resume=True, drop=after_epoch)
        self.folder.add(self._result(run, folder, clock.seconds), folder.history())
        self._trim(run)

    def _drop_reason(self, run: PlannedRun, history: History) -> str | None:
        rule, name = self.study.drop, run.key.run
        if rule is None or name == self.study.baseline_run or history[-1]["epoch"] >= run.config.last_epoch:
            return None
        rivals = [other for other in self.study.plan() if other.key.seed == run.key.seed and other.key != run.key]
        histories = self.folder.histories(rivals)
        return drop_reason(rule, history, {other.key.run: histories.get(other.key, []) for other in rivals})

    def _result(self, run: PlannedRun, folder: RunFolder, seconds: float) -> RunResult:
        chosen, described = folder.result(), describe_config(run.config)
        speeds = [record["photos_per_second"] for record in folder.history() if "photos_per_second" in record]
        return RunResult(
            study=self.study.name,
            run=run.key.run,
            seed=run.key.seed,
            data=_kind(self.spec),
            photos=photos_digest(self.data),
            config=described,
            config_digest=config_digest(described),
            epoch=chosen["epoch"],
            figures=retrieval_figures(chosen),
            validation={name: value for name, value in chosen.items() if name.startswith("validation.")},
            untrained=chosen["untrained"],
            epochs_trained=chosen["epochs"],
            dropped=chosen.get("dropped"),
            seconds=round(seconds, 1),
            photos_per_second=round(statistics.median(speeds), 1) if speeds else None,
            initial=Initial(**chosen["initial"]),
            versions=versions(),
            processor=_processor(run.config),
            threads=torch.get_num_threads(),
        )

    def _trim(self, run: PlannedRun) -> None:
        """Keeps the chosen weights of a finished run and deletes its checkpoint, which is many times larger."""
        folder = self.folder.run(run.key)
        checkpoint = folder.path / "checkpoint.pt"
        if self.keep_checkpoints or not checkpoint.is_file():
            return
        if not (folder.path / "best.pt").is_file():
            folder.save_best(folder.model().state_dict())
        checkpoint.unlink()


class _Clock:
    """The total seconds of a run, kept in a file across restarts."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.path / "seconds.json"
        self._counted = time.monotonic()
        self.seconds: float = json.loads(self._file.read_text(encoding="utf-8")) if self._file.is_file() else 0.0

    def save(self) -> None:
        now = time.monotonic()
        self.seconds, self._counted = self.seconds + now - self._counted, now
        atomic_write_text(self._file, json.dumps(self.seconds) + "\n")


def drop_reason(rule: DropRule, history: History, rivals: Mapping[str, History]) -> str | None:
    """Returns why a run ends early: too far behind the best rival at the same epoch; or None."""
    epoch, own = history[-1]["epoch"], history[-1].get(rule.metric)
    if epoch < rule.after_epoch or own is None:
        return None
    scores = {
        name: record[rule.metric]
        for name, records in rivals.items()
        for record in records
        if record["epoch"] == epoch and rule.metric in record
    }
    if not scores:
        return None
    best = max(scores, key=scores.__getitem__)
    if scores[best] - own < rule.behind:
        return None
    points = 100 * (scores[best] - own)
    return f"{points:.2f} points of {rule.metric} behind {best} at epoch {epoch} (the rule: {100 * rule.behind:g})"


def _set_data(folder: RunFolder, spec: str) -> None:
    """Updates the location of the photos in a run that was started on another machine."""
    file = folder.path / "config.yaml"
    if file.is_file() and folder.data != spec:
        description = yaml.safe_load(file.read_text(encoding="utf-8")) | {"data": spec}
        atomic_write_text(file, yaml.safe_dump(description, sort_keys=False))


def _kind(spec: str) -> str:
    return spec.partition(":")[0]


def _processor(config: TrainingConfig) -> str:
    """Returns the name of the processor or GPU."""
    if choose_device(config.device).type == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
