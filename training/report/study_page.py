"""The page of a study: tables and curves of its runs in one HTML file without scripts."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean

from index._util.files import atomic_write_text
from training.config import flatten_settings
from training.report.charts import Axes, Line, as_number, as_percent, draw_curve, draw_figure, draw_legend, show_end
from training.report.template import html_page, html_table
from training.study.file import RunKey
from training.study.results import History, RunResult
from training.study.summary import (
    BEST_REMARK,
    METRICS,
    StudySummary,
    difference_table,
    difference_title,
    figure_table,
    metric_title,
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
_PALETTE = 5
"""Colours that the page's style has; more runs get colours from a circle."""
_GOLDEN_ANGLE = 137.508
_SHOWN_DIGEST = 8
_NOTHING = "\u2013"


def write_study_page(
    summary: StudySummary, results: Mapping[RunKey, RunResult], histories: Histories, out: Path
) -> None:
    """Writes the page of a study, finished or not."""
    sections = {
        "summary": ("Summary", _summary(summary)),
        "curves": ("Curves", _curves(summary, histories)),
        "state": ("State of the loss", _states(summary, histories)),
        "settings": ("Settings", _settings(summary)),
        "runs": ("Runs", _runs(summary, results)),
    }
    title = f"{summary.study.name} · Lookalike study"
    page = html_page(title, sections, made_by="lookalike study", style=_style(len(summary.runs)))
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(out, page)


def _style(runs: int) -> str:
    """Thin lines for single seeds, and a colour for each run beyond the palette."""
    colours = "".join(
        f".c{number} {{ color: hsl({number * _GOLDEN_ANGLE % 360:.0f} 52% 50%); }}\n"
        for number in range(_PALETTE + 1, runs + 1)
    )
    return f"""
.thin {{ stroke-width: 0.8; opacity: 0.55; }}
.scroll th:first-child {{ white-space: nowrap; }}
.scroll thead th {{ white-space: normal; vertical-align: bottom; }}
{colours}"""


def _wide(table: str, label: str) -> str:
    return f'<div class="card scroll" tabindex="0" role="group" aria-label="{escape(label)}">{table}</div>'


def _summary(summary: StudySummary) -> str:
    study = summary.study
    remarks = "".join(f"<li>{escape(note)}</li>" for note in notes(summary))
    title, (columns, rows) = difference_title(study), difference_table(summary)
    differences = f"<p>{escape(title)}.</p>{_wide(html_table(columns, rows), title)}" if rows else ""
    seeds = ", ".join(map(str, study.seeds))
    return f"""<div><h1>{escape(study.name)}</h1>
<p class="lead">{len(study.runs)} runs over the seeds {seeds}; differences are to {escape(study.baseline_run)}</p></div>
{f'<ul class="remarks quiet">{remarks}</ul>' if remarks else ""}
<p>Percent on the test classes: mean ±deviation over seeds.</p>
{_wide(html_table(*figure_table(summary), "dense"), "Figures of the runs")}
<p class="quiet">{escape(BEST_REMARK)}</p>
{differences}"""


# --- curves ---


def _curves(summary: StudySummary, histories: Histories) -> str:
    charts = [
        _chart(summary, histories, f"{prefix}{metric}", f"{metric_title(metric)} on the {classes} classes", as_percent)
        for metric in reversed(METRICS)
        for prefix, classes in (("validation.", "held-out training"), ("", "test"))
    ]
    return _section("Curves", "The held-out training classes choose the epoch. The test classes never do.", charts)


def _states(summary: StudySummary, histories: Histories) -> str:
    charts = [_chart(summary, histories, name, title, as_number) for name, title in _STATES.items()]
    return _section("State of the loss", "Means over the logged steps of each epoch.", charts)


def _section(title: str, words: str, charts: Sequence[str]) -> str:
    drawn = "".join(charts)
    return f'<h2>{title}</h2><p class="words">{words}</p><div class="charts">{drawn}</div>' if drawn else ""


def _chart(summary: StudySummary, histories: Histories, field: str, title: str, show: Callable[[float], str]) -> str:
    """A curve per run: the mean over seeds, and thin lines for single seeds where there are several."""
    thick, thin = [], []
    for style, run in enumerate(summary.study.runs, 1):
        seeds = [_points(history, field) for key, history in sorted(histories.items()) if key.run == run]
        curves = [Line(run, points, style) for points in seeds if points]
        if curves:
            thick.append(Line(run, _mean_points(curves), style))
            thin += curves if len(curves) > 1 else []
    points = [point for line in [*thick, *thin] for point in line.points]
    if not points:
        return ""
    axes = Axes([x for x, _ in points], [y for _, y in points], "epoch", show)
    drawn = "".join(f'<path class="line thin c{line.style}" d="{axes.path(line.points)}"/>' for line in thin)
    drawn = axes.drawn() + drawn + "".join(draw_curve(axes, line) for line in thick)
    told = "; ".join(f"{line.name} from {show_end(line, 0, show)} to {show_end(line, -1, show)}" for line in thick)
    note = "" if len(thick) > 1 else f"Only {thick[0].name} has it."
    return draw_figure(title, f"{title}: {told}.", drawn, draw_legend(thick), note=note)


def _points(history: History, field: str) -> list[tuple[float, float]]:
    known = [(record["epoch"], record[field]) for record in history if field in record]
    return [(epoch, value) for epoch, value in known if math.isfinite(value)]


def _mean_points(curves: Sequence[Line]) -> list[tuple[float, float]]:
    """The mean where all seeds have a value: one that ended early would bend the curve."""
    values = [dict(line.points) for line in curves]
    common = sorted(set.intersection(*(set(own) for own in values))) or sorted(values[0])
    return [(epoch, mean(own[epoch] for own in values if epoch in own)) for epoch in common]


# --- settings and single runs ---


def _settings(summary: StudySummary) -> str:
    study = summary.study
    configs = {run.key.run: flatten_settings(run.config.model_dump(mode="json")) for run in study.plan()}
    names = sorted({name for config in configs.values() for name in config} - {"seed"})
    differing = [name for name in names if len({repr(config.get(name)) for config in configs.values()}) > 1]
    rows = [[run, *(str(config.get(name, _NOTHING)) for name in differing)] for run, config in configs.items()]
    if not differing:
        return ""
    return f"<h2>Settings that differ</h2>{_wide(html_table(['run', *differing], rows), 'Settings that differ')}"


def _runs(summary: StudySummary, results: Mapping[RunKey, RunResult]) -> str:
    rows = [_run(results[run.key]) for run in summary.study.plan() if run.key in results]
    if not rows:
        return ""
    columns = ["run", *(metric_title(metric) for metric in METRICS), "epoch", "hours", "photos per second"]
    columns += ["processor, threads", "initial weights", "batch order", "settings"]
    table = _wide(html_table(columns, rows, "dense"), "Finished runs")
    words = "Equal digests of initial weights and batch order within a seed make its runs comparable."
    return f'<h2>Finished runs</h2><p class="words">{words}</p>{table}'


def _run(result: RunResult) -> list[str]:
    return [
        str(result.key),
        *(f"{100 * result.figures[metric]:.2f}" for metric in METRICS),
        f"{result.epoch} of {result.epochs_trained}",
        f"{result.seconds / 3600:.2f}",
        f"{result.photos_per_second or 0:,.0f}",
        f"{result.processor}, {result.threads}",
        result.initial.weights[:_SHOWN_DIGEST],
        result.initial.batches[:_SHOWN_DIGEST],
        result.config_digest[:_SHOWN_DIGEST],
    ]
