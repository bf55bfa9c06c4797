"""Reports of a run to MLflow or Weights & Biases, through one callback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from index._util.files import atomic_write_text
from index._util.imports import require
from training.config import TrainingConfig, flatten_settings
from training.errors import TrainingError

_IDENTITY = "tracker.json"
"""File in the run folder that names the run at the service, so that a resumed run continues it."""


class ExperimentTracker:
    """Sends settings, epoch records and the result to a service; its failures are reported and never end a run."""

    def __init__(self, config: TrainingConfig, folder: Path, on_message: Callable[[str], None]) -> None:
        assert config.tracker is not None
        self._name, self._on_message, self._failed = config.tracker, on_message, False
        file = folder / _IDENTITY
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        library = require(config.tracker, extra=config.tracker)
        try:
            self._service = _SERVICES[config.tracker](library, folder, known.get(config.tracker))
        except Exception as error:  # each service raises its own types; a wrong address is the user's to correct
            raise TrainingError(
                f"{config.tracker} cannot be reached: {error}.", "Check its address and key, or leave out `tracker`."
            ) from error
        atomic_write_text(file, json.dumps(known | {config.tracker: self._service.id}) + "\n")
        if config.tracker not in known:
            self._send(lambda: self._service.settings(flatten_settings(config.model_dump(mode="json"))))

    def epoch(self, record: dict[str, Any]) -> None:
        """Sends an epoch's record."""
        figures = {name: value for name, value in record.items() if name != "epoch"}
        self._send(lambda: self._service.figures(figures, record["epoch"]))

    def result(self, result: dict[str, Any]) -> None:
        """Sends the chosen model's figures."""
        chosen = {f"chosen.{name}": value for name, value in result.items() if isinstance(value, int | float)}
        self._send(lambda: self._service.figures(chosen, result["epochs"]))

    def close(self, *, failed: bool) -> None:
        self._send(lambda: self._service.close(failed))

    def _send(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a short outage of the service must not end the run
            if not self._failed:
                self._on_message(f"{self._name} rejects the run's figures: {error}. They are kept in metrics.jsonl.")
            self._failed = True


class _Service(Protocol):
    id: str

    def settings(self, settings: dict[str, Any]) -> None: ...
    def figures(self, figures: dict[str, float], epoch: int) -> None: ...
    def close(self, failed: bool) -> None: ...


class _Mlflow:
    """A run of MLflow at the address of MLFLOW_TRACKING_URI."""

    def __init__(self, mlflow: Any, folder: Path, known: str | None) -> None:
        self._mlflow = mlflow
        if known is None:
            mlflow.set_experiment(folder.resolve().parent.name)
        run = mlflow.start_run(run_id=known, run_name=None if known else folder.resolve().name)
        self.id: str = run.info.run_id

    def settings(self, settings: dict[str, Any]) -> None:
        self._mlflow.log_params(settings)

    def figures(self, figures: dict[str, float], epoch: int) -> None:
        # MLflow's names hold no @.
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in figures.items()}, step=epoch)

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class _Wandb:
    """A run of Weights & Biases, configured by its own WANDB_ variables."""

    def __init__(self, wandb: Any, folder: Path, known: str | None) -> None:
        place = folder.resolve()
        self._run = wandb.init(
            project=place.parent.name, name=place.name, id=known, resume="allow" if known else None, dir=str(place)
        )
        self.id: str = self._run.id

    def settings(self, settings: dict[str, Any]) -> None:
        self._run.config.update(settings)

    def figures(self, figures: dict[str, float], epoch: int) -> None:
        self._run.log(figures | {"epoch": epoch})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


_SERVICES: dict[str, Callable[[Any, Path, str | None], _Service]] = {"mlflow": _Mlflow, "wandb": _Wandb}
