"""The command `study`: many training runs from one file, with their summary and page."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training.cli import check_data, read_data, require_train_extra
from training.console import TrainingProgressBar
from training.errors import TrainingError

if TYPE_CHECKING:
    from training.study.file import PlannedRun, Study
    from training.study.results import StudyFolder

_LOWEST_PRIORITY = 19


def study(
    file: Annotated[Path, typer.Argument(help="YAML file of the study, see docs/study.md.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs and their results.")],
    data: Annotated[str | None, typer.Option(help="Photos, as for train; by default those of the file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the page of the study here.")] = None,
    only: Annotated[str | None, typer.Option(help="Train these runs only: NAME,NAME.")] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Train nothing, summarise what is finished.")] = False,
    curve: Annotated[
        list[str] | None, typer.Option(help="Also print this figure of the epochs, e.g. map@r; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every run and list them, train nothing.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads of this process; by default all.", min=1)] = None,
    nice: Annotated[bool, typer.Option(help="Run at the lowest priority.")] = True,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the full checkpoint of finished runs, not only weights.")
    ] = False,
) -> None:
    """Train the runs of a file over several seeds and compare them; the same command again continues.

    Example: lookalike study benchmarks/studies/sample-losses.yaml --out studies/losses --report losses.html

    Several processes may work in one folder: each takes the next run that is free.
    """
    require_train_extra()
    if nice:
        # Threads that wait in a loop for each other take five times as long when other work has a core.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from training.study.file import read_study
    from training.study.results import StudyFolder
    from training.study.runner import StudyRunner

    table, folder = read_study(file), StudyFolder(out)
    runs = table.select(only.split(",")) if only else table.plan()
    failed = []
    if not summary:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise TrainingError(
                "A study trains each run in one process.", "Start several studies in one --out instead."
            )
        spec = data or table.data
        if spec is None:
            raise TrainingError(f"{file} names no data.", "Give it with --data, e.g. cub:DIR.")
        _share_machine(threads, nice=nice)
        runner = StudyRunner(
            table, spec, check_data(read_data(spec)), folder, TrainingProgressBar, typer.echo, keep_checkpoints
        )
        if dry_run:
            runner.check(runs)
            _print_plan(runs, folder)
            return
        failed = runner.run(runs)
    _print_summary(table, folder, report, curve or [])
    if failed:
        typer.echo(f"Failed: {'; '.join(map(str, failed))}. Repeat the command to retry them.", err=True)
        raise typer.Exit(3)


def _share_machine(threads: int | None, *, nice: bool) -> None:
    import torch

    if nice:
        os.nice(_LOWEST_PRIORITY)
    if threads:
        torch.set_num_threads(threads)


def _print_plan(runs: "list[PlannedRun]", folder: "StudyFolder") -> None:
    results, histories = folder.results(), folder.histories(runs)
    for run in runs:
        if run.key in results:
            state = "dropped" if results[run.key].dropped else "finished"
        else:
            state = f"at epoch {histories[run.key][-1]['epoch']}" if run.key in histories else "not started"
        loss = run.config.loss
        settings = ", ".join(f"{name}={value}" for name, value in loss.settings.items())
        typer.echo(f"{run.key}: {state}; {run.config.last_epoch} epochs, {loss.name}({settings})")


def _print_summary(table: "Study", folder: "StudyFolder", report: Path | None, curves: list[str]) -> None:
    from training.report import write_study_page
    from training.study.summary import format_curve, format_summary, summarise

    results, histories = folder.results(), folder.histories(table.plan())
    summary = summarise(table, results, histories)
    typer.echo("\n\n".join([format_summary(summary), *(format_curve(summary, histories, name) for name in curves)]))
    if report:
        write_study_page(summary, results, histories, report)
        typer.echo(f"The page is in {report}")
