"""The page of a study: tables and curves of its runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from training.config import flatten_settings
from training.metric_names import metric_title
from training.report.charts import Chart, Line, as_number, as_percent, line_chart
from training.report.rendering import Table, write_page
from training.study.file import RunKey
from training.study.results import History, RunResult
from training.study.summary import (
    METRICS,
    StudySummary,
    best_remark,
    difference_table,
    difference_title,
    figure_table,
    notes,
)

Histories = Mapping[RunKey, History]

_STATES = {
    "s_avg": "S_avg, mean similarity of the queue to its proxies",
    "s_learned": "S_learned",
    "s_outlier": "S_outlier",
    "sigma": "\u03c3, the decay of learned positives",
    "weight_positive": "Mean weight of positives",
    "weight_negative": "Mean weight of negatives",
    "damped_negatives": "Share of damped negatives",
    "own_cosine_p50": "Median cosine to the own proxy",
    "other_cosine_p50": "Median cosine to other proxies",
    "gradient_positive": "Gradient norm of the positive term",
    "gradient_negative": "Gradient norm of the negative term",
    "loss": "Loss",
}
"""What losses report about themselves, with the titles of the charts."""
_DIGEST_LENGTH = 8
_NOTHING = "\u2013"


def write_study_page(
    summary: StudySummary, results: Mapping[RunKey, RunResult], histories: Histories, out: Path
) -> None:
    """Writes the page of a study, finished or not."""
    curves = [
        _chart(summary, histories, f"{prefix}{metric}", f"{metric_title(metric)} on the {classes} classes", as_percent)
        for metric in reversed(METRICS)
        for prefix, classes in (("validation.", "held-out training"), ("", "test"))
    ]
    states = [_chart(summary, histories, name, title, as_number) for name, title in _STATES.items()]
    write_page(
        out,
        "study.html",
        title=f"{summary.study.name} · Lookalike study",
        command="lookalike study",
        study=summary.study,
        remarks=notes(summary),
        figure_table=figure_table(summary),
        best_remark=best_remark(summary),
        difference_title=difference_title(summary.study),
        differences=difference_table(summary),
        curves=[chart for chart in curves if chart],
        states=[chart for chart in states if chart],
        settings=_settings(summary),
        runs=_runs(summary, results),
    )


def _chart(
    summary: StudySummary, histories: Histories, field: str, title: str, show: Callable[[float], str]
) -> Chart | None:
    """Draws a curve per run: the mean over seeds, and thin lines for single seeds where there are several."""
    means, single = [], []
    for style, run in enumerate(summary.study.runs, 1):
        seeds = [_points(history, field) for key, history in sorted(histories.items()) if key.run == run]
        curves = [Line(run, points, style) for points in seeds if points]
        if curves:
            means.append(Line(run, _mean_points(curves), style))
            single += curves if len(curves) > 1 else []
    note = f"Only {means[0].name} has it." if len(means) == 1 else ""
    return line_chart(title, means, show=show, thin=single, note=note)


def _points(history: History, field: str) -> list[tuple[float, float]]:
    known = [(record["epoch"], record[field]) for record in history if field in record]
    return [(epoch, value) for epoch, value in known if math.isfinite(value)]


def _mean_points(curves: Sequence[Line]) -> list[tuple[float, float]]:
    """Returns the mean over the epochs that all seeds have: one that ended early would bend the curve."""
    values = [dict(line.points) for line in curves]
    common = sorted(set.intersection(*(set(own) for own in values))) or sorted(values[0])
    return [(epoch, mean(own[epoch] for own in values if epoch in own)) for epoch in common]


def _settings(summary: StudySummary) -> Table:
    """Returns the settings in which the runs differ."""
    configs = {run.key.run: flatten_settings(run.config.model_dump(mode="json")) for run in summary.study.plan()}
    names = sorted({name for config in configs.values() for name in config} - {"seed"})
    differing = [name for name in names if len({repr(config.get(name)) for config in configs.values()}) > 1]
    if not differing:
        return [], []
    rows = [[run, *(str(config.get(name, _NOTHING)) for name in differing)] for run, config in configs.items()]
    return ["run", *differing], rows


def _runs(summary: StudySummary, results: Mapping[RunKey, RunResult]) -> Table:
    columns = ["run", *(metric_title(metric) for metric in METRICS), "epoch", "hours", "photos per second"]
    columns += ["processor, threads", "initial weights", "batch order", "settings"]
    return columns, [_run(results[run.key]) for run in summary.study.plan() if run.key in results]


def _run(result: RunResult) -> list[str]:
    return [
        str(result.key),
        *(f"{100 * result.figures[metric]:.2f}" for metric in METRICS),
        f"{result.epoch} of {result.epochs_trained}",
        f"{result.seconds / 3600:.2f}",
        f"{result.photos_per_second or 0:,.0f}",
        f"{result.processor}, {result.threads}",
        result.initial.weights[:_DIGEST_LENGTH],
        result.initial.batches[:_DIGEST_LENGTH],
        result.config_digest[:_DIGEST_LENGTH],
    ]
