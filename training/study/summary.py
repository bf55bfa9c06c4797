"""The summary of a study: means and deviations over seeds, and paired differences to the baseline."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from index._util.validation import suggest
from training.errors import TrainingError
from training.metric_names import metric_title, retrieval_figures
from training.study.file import PlannedRun, RunKey, Study
from training.study.results import History, RunResult, sharing_warnings

METRICS = ("recall@1", "map@r")
VIEWS = {"chosen": "chosen epoch", "last": "last epoch", "best": "best test*"}
"""The epochs whose figures are summarised."""
_BEST_REMARK = "* chosen on test: the best epoch of the test curve, as papers report it; too good, and never used here."
_NOTHING = "\u2013"
_MAX_CURVE_COLUMNS = 11


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over seeds; one seed has no deviation."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        known = list(values)
        if not known:
            return None
        return cls(statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class Difference:
    """Mean and deviation of a figure or of its paired differences to a baseline, with a 95 % interval of the mean."""

    spread: Spread
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, values: Mapping[int, float], baseline: Mapping[int, float]) -> "Difference | None":
        """Pairs two runs' values by seed; from two common seeds on with a t-interval."""
        spread = Spread.of(value - baseline[seed] for seed, value in values.items() if seed in baseline)
        if spread is None:
            return None
        if spread.deviation is None:
            return cls(spread, None)
        from scipy.stats import t  # takes a second to import

        reach = float(t.ppf(0.975, spread.count - 1)) * spread.deviation / math.sqrt(spread.count)
        return cls(spread, (spread.mean - reach, spread.mean + reach))


@dataclass(frozen=True)
class RunSummary:
    """One run over its seeds; dropped seeds are listed and are not part of any mean."""

    name: str
    done: int
    planned: int
    epoch: Spread | None
    """The chosen epoch."""
    untrained: dict[str, Spread | None]
    figures: dict[str, dict[str, Spread | None]]
    """By view, then by metric."""
    differences: dict[str, Difference | None]
    """Of the study's metric, by view; the baseline has none."""
    minutes: Spread | None
    """Of all of a run; the first with cached stages also fills the cache."""
    speed: Spread | None
    """Photos per second while it learns."""


@dataclass(frozen=True)
class StudySummary:
    """What the text and the page of a study show."""

    study: Study
    runs: list[RunSummary]
    dropped: list[RunResult]
    running: list[tuple[PlannedRun, int]]
    """Unfinished runs that have been started, with their newest epoch."""
    warnings: list[str]


def summarise(study: Study, results: Mapping[RunKey, RunResult], histories: Mapping[RunKey, History]) -> StudySummary:
    """Summarises the finished runs."""
    planned = study.plan()
    known = {run.key: results[run.key] for run in planned if run.key in results}
    complete = {key: result for key, result in known.items() if result.dropped is None}
    views = {key: _views(result, histories.get(key, []), study.metric) for key, result in complete.items()}

    def values(name: str, view: str, metric: str) -> dict[int, float]:
        own = {key.seed: figures[view] for key, figures in views.items() if key.run == name}
        return {seed: figures[metric] for seed, figures in own.items() if metric in figures}

    def difference(name: str, view: str) -> Difference | None:
        if name == study.baseline_run:
            return None
        return Difference.of(values(name, view, study.metric), values(study.baseline_run, view, study.metric))

    def summary(name: str) -> RunSummary:
        own = [result for result in complete.values() if result.run == name]
        return RunSummary(
            name=name,
            done=len(own),
            planned=len(study.seeds),
            epoch=Spread.of(result.epoch for result in own),
            untrained={metric: Spread.of(result.untrained[metric] for result in own) for metric in METRICS},
            figures={view: {m: Spread.of(values(name, view, m).values()) for m in METRICS} for view in VIEWS},
            differences={view: difference(name, view) for view in VIEWS},
            minutes=Spread.of(result.seconds / 60 for result in own),
            speed=Spread.of(r.photos_per_second for r in own if r.photos_per_second is not None),
        )

    started = [(run, histories[run.key][-1]["epoch"]) for run in planned if run.key in set(histories) - set(known)]
    return StudySummary(
        study=study,
        runs=[summary(name) for name in study.runs],
        dropped=[result for result in known.values() if result.dropped],
        running=started,
        warnings=sharing_warnings({key: result.start for key, result in known.items()}),
    )


def _views(result: RunResult, history: Sequence[Mapping[str, Any]], metric: str) -> dict[str, dict[str, float]]:
    measured = [record for record in history if record["epoch"] and metric in record]
    return {
        "chosen": result.figures,
        "last": retrieval_figures(history[-1]) if history else {},
        "best": retrieval_figures(max(measured, key=lambda record: float(record[metric]))) if measured else {},
    }


# --- as text ---


def _shown_views(summary: StudySummary) -> dict[str, str]:
    """Returns the views that have figures: without measurements of the test classes in between only the chosen one."""
    measured = {view for run in summary.runs for view in VIEWS if run.figures[view][METRICS[0]]}
    return {view: title for view, title in VIEWS.items() if view == "chosen" or view in measured}


def best_remark(summary: StudySummary) -> str:
    """Returns what the mark of the best test epoch means, or nothing where it is not shown."""
    return _BEST_REMARK if "best" in _shown_views(summary) else ""


def format_spread(spread: Spread | None, scale: float = 100, digits: int = 2) -> str:
    """Formats as `12.34 ±0.56`, in percent by default."""
    if spread is None:
        return _NOTHING
    mean = f"{scale * spread.mean:.{digits}f}"
    return mean if spread.deviation is None else f"{mean} ±{scale * spread.deviation:.{digits}f}"


def format_difference(difference: Difference | None) -> str:
    """Formats as `+0.42 ±0.31 [-2.36, +3.20]`, in points."""
    if difference is None:
        return _NOTHING
    text = f"{100 * difference.spread.mean:+.2f}"
    if difference.spread.deviation is not None:
        text += f" ±{100 * difference.spread.deviation:.2f}"
    if difference.interval is None:
        return text
    low, high = (f"{100 * end:+.2f}" for end in difference.interval)
    return f"{text} [{low}, {high}]"


def figure_table(summary: StudySummary) -> tuple[list[str], list[list[str]]]:
    """Returns the columns, and a row per run: figures in percent on the test classes."""
    views = _shown_views(summary)
    columns = ["run", "seeds", "untrained", "epoch"]
    columns += [f"{metric_title(metric)}, {title}" for title in views.values() for metric in METRICS]
    rows = [
        [
            run.name,
            f"{run.done}/{run.planned}",
            "/".join(format_spread(run.untrained[metric], digits=1).partition(" ")[0] for metric in METRICS),
            format_spread(run.epoch, scale=1, digits=0 if run.done == 1 else 1),
            *(format_spread(run.figures[view][metric]) for view in views for metric in METRICS),
        ]
        for run in summary.runs
    ]
    return columns, rows


def difference_table(summary: StudySummary) -> tuple[list[str], list[list[str]]]:
    """Returns the columns, and a row per run apart from the baseline: paired differences in points."""
    views = _shown_views(summary)
    rows = [
        [run.name, str(_pairs(run)), *(format_difference(run.differences[view]) for view in views)]
        for run in summary.runs
        if run.name != summary.study.baseline_run
    ]
    return ["run", "pairs", *views.values()], rows


def time_table(summary: StudySummary) -> tuple[list[str], list[list[str]]]:
    """Returns the columns, and a row per run: how long it took, which depends on what else the machine did."""
    rows = [
        [run.name, format_spread(run.minutes, scale=1, digits=1), format_spread(run.speed, scale=1, digits=0)]
        for run in summary.runs
    ]
    return ["run", "minutes", "photos/s"], rows


def curve_table(
    summary: StudySummary, histories: Mapping[RunKey, History], field: str
) -> tuple[list[str], list[list[str]]]:
    """Returns up to eleven epochs as columns, and a row per run that has the figure: its means over seeds."""
    records = [
        (key.run, record) for key, history in histories.items() for record in history if key.run in summary.study.runs
    ]
    epochs = sorted({record["epoch"] for _, record in records if field in record})
    if not epochs:
        known = {name for _, record in records for name, value in record.items() if isinstance(value, float)}
        raise TrainingError(
            f"No epoch of {summary.study.name} has a figure {field!r}{suggest(field, known)}.",
            f"Recorded: {', '.join(sorted(known)) or 'nothing yet'}.",
        )
    if len(epochs) > _MAX_CURVE_COLUMNS:
        last = len(epochs) - 1
        epochs = [epochs[round(i * last / (_MAX_CURVE_COLUMNS - 1))] for i in range(_MAX_CURVE_COLUMNS)]
    show = "{:.1%}" if field.rpartition(".")[2] in METRICS else "{:.3g}"

    def cell(run: str, epoch: int) -> str:
        spread = Spread.of(r[field] for name, r in records if name == run and r["epoch"] == epoch and field in r)
        return show.format(spread.mean).rstrip("%") if spread else _NOTHING

    recorded = {name for name, record in records if field in record}
    names = [run.name for run in summary.runs if run.name in recorded]
    return ["run", *map(str, epochs)], [[name, *(cell(name, epoch) for epoch in epochs)] for name in names]


def _pairs(run: RunSummary) -> int:
    return max((difference.spread.count for difference in run.differences.values() if difference), default=0)


def difference_title(study: Study) -> str:
    return (
        f"{metric_title(study.metric)} minus that of {study.baseline_run}, paired by seed:"
        " mean ±deviation [95 % interval] in points"
    )


def notes(summary: StudySummary) -> list[str]:
    """Returns remarks: dropped and unfinished runs, and what runs do not share."""
    dropped = [f"{result.key} was dropped: {result.dropped}." for result in summary.dropped]
    running = [f"{run.key} is at epoch {epoch} of {run.config.last_epoch}." for run, epoch in summary.running]
    return [*dropped, *running, *summary.warnings]


def format_summary(summary: StudySummary) -> str:
    """Formats the summary for a terminal."""
    study = summary.study
    ended = sum(run.done for run in summary.runs) + len(summary.dropped)
    columns, rows = figure_table(summary)
    titles = _shown_views(summary).values()
    upper = ["", "", *(title if metric == METRICS[0] else "" for title in titles for metric in METRICS)]
    lower = [column.partition(",")[0] for column in columns]
    parts = [
        f"Study {study.name}: {ended} of {len(study.runs) * len(study.seeds)} runs have ended",
        "Percent on the test classes: mean ±deviation over seeds\n" + align_columns([["", "", *upper], lower, *rows]),
        *filter(None, [best_remark(summary)]),
    ]
    columns, rows = difference_table(summary)
    if rows:
        parts.append(f"{difference_title(study)}\n{align_columns([columns, *rows])}")
    columns, rows = time_table(summary)
    parts.append(f"Training time, on a machine that may have had other work\n{align_columns([columns, *rows])}")
    if remarks := notes(summary):
        parts.append("\n".join(remarks))
    return "\n\n".join(parts)


def format_curve(summary: StudySummary, histories: Mapping[RunKey, History], field: str) -> str:
    """Formats the course of a recorded figure for a terminal."""
    unit = " in percent" if field.rpartition(".")[2] in METRICS else ""
    columns, rows = curve_table(summary, histories, field)
    return f"{field} by epoch, mean over seeds{unit}\n{align_columns([columns, *rows])}"


def align_columns(table: Sequence[Sequence[str]]) -> str:
    """Formats columns of equal width, names on the left and figures on the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    )
