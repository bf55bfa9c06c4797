"""The results of a study as JSON lines: finished runs and their epochs, enough to continue elsewhere."""

import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from index._util.files import atomic_write_text
from index._util.models import Frozen
from index._util.validation import explain_errors
from training.checkpoints import RunFolder
from training.errors import TrainingError
from training.study.file import PlannedRun, RunKey

History = list[dict[str, Any]]


class Initial(Frozen):
    """Digests of what runs of one seed share."""

    weights: str = Field(description="of the model before its first step")
    batches: str = Field(description="of the first epoch's batches in their order")
    photos: str = Field(default="", description="of those that are learned, held out and measured")


class RunResult(Frozen):
    """A finished run as a line of `results.jsonl`; independent of file locations."""

    study: str
    run: str
    seed: int
    data: str = Field(description="kind of the data, such as cub")
    photos: str = Field(description="digest of the photos' names and classes")
    config: dict[str, Any]
    config_digest: str
    epoch: int = Field(description="the epoch that was chosen")
    figures: dict[str, float] = Field(description="of the chosen epoch on the test classes")
    validation: dict[str, float]
    untrained: dict[str, float]
    epochs_trained: int
    dropped: str | None
    seconds: float
    photos_per_second: float | None
    initial: Initial
    versions: dict[str, str]
    processor: str
    threads: int

    @property
    def key(self) -> RunKey:
        return RunKey(self.run, self.seed)

    @property
    def start(self) -> dict[str, str]:
        return shared_start(self.initial, self.processor, self.threads)


@dataclass(frozen=True)
class StudyFolder:
    """`results.jsonl` (a line per finished run), `history.jsonl` (a line per epoch of these) and `runs/`."""

    path: Path

    @property
    def results_file(self) -> Path:
        return self.path / "results.jsonl"

    @property
    def history_file(self) -> Path:
        return self.path / "history.jsonl"

    def run(self, key: RunKey) -> RunFolder:
        return RunFolder(self.path / "runs" / key.folder)

    def results(self) -> dict[RunKey, RunResult]:
        """Returns the finished runs."""
        found = {}
        for number, line in enumerate(_read_lines(self.results_file), 1):
            try:
                result = RunResult.model_validate(line)
            except ValidationError as error:
                problem = explain_errors(error.errors(), RunResult)[0]
                raise TrainingError(f"{self.results_file}, line {number}: {problem}.", "Copy the file again.") from None
            found[result.key] = result
        return found

    def histories(self, runs: Iterable[PlannedRun]) -> dict[RunKey, History]:
        """Returns the epochs of finished runs, and those of unfinished runs so far."""
        kept: dict[RunKey, History] = {}
        for line in _read_lines(self.history_file):
            key = RunKey(line.pop("run"), line.pop("seed"))
            kept.setdefault(key, []).append(line)
        for run in runs:
            if run.key not in kept and (self.run(run.key).path / "metrics.jsonl").is_file():
                kept[run.key] = self.run(run.key).history()
        return kept

    def add(self, result: RunResult, history: History) -> None:
        """Adds or replaces a run; its history is written first, so that a result never lacks it."""
        key = {"run": result.run, "seed": result.seed}
        with self.lock("results", wait=True):
            for file, lines in (
                (self.history_file, [key | record for record in history]),
                (self.results_file, [result.model_dump(mode="json")]),
            ):
                others = [line for line in _read_lines(file) if any(line[name] != key[name] for name in key)]
                atomic_write_text(file, "".join(json.dumps(line) + "\n" for line in [*others, *lines]))

    @contextmanager
    def lock(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Holds a lock of this folder and yields True, or yields False when another process holds it.

        A record lock and not `flock`: processes that decode photos inherit the latter and keep it for seconds after
        their parent was killed.
        """
        file = self.path / "locks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as held:
            try:
                fcntl.lockf(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except (BlockingIOError, PermissionError):
                yield False
                return
            yield True


def _read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise TrainingError(f"{file}, line {number} is not JSON: {error}.", "Copy the file again.") from None
    return lines


def shared_start(initial: Initial, processor: str, threads: int) -> dict[str, str]:
    """Returns what runs of a seed must share to be paired: another order of sums moves figures by tenths of a point."""
    return {
        "initial weights": initial.weights,
        "batches in the first epoch": initial.batches,
        "processors or numbers of threads": f"{processor}, {threads}",
    }


def sharing_warnings(starts: Mapping[RunKey, Mapping[str, str]]) -> list[str]:
    """Returns warnings about differences between the runs of a seed other than their settings."""
    warnings = []
    for seed in sorted({key.seed for key in starts}):
        own = {key.run: start for key, start in starts.items() if key.seed == seed}
        for title in next(iter(own.values())):
            groups: dict[str, list[str]] = {}
            for run, start in own.items():
                groups.setdefault(start[title], []).append(run)
            if len(groups) > 1:
                listed = " / ".join(", ".join(runs) for runs in groups.values())
                warnings.append(f"Seed {seed}: runs have different {title}: {listed}.")
    return warnings
