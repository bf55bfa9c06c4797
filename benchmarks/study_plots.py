"""Draws the lines of a study as small plots in one SVG: what settings do, or the course of its runs.

    python benchmarks/study_plots.py settings benchmarks/studies/shop-ablations.yaml \\
        --out benchmarks/studies/results/shop-ablations --svg docs/results-settings.svg
    python benchmarks/study_plots.py course benchmarks/studies/cub-a.yaml \\
        --out benchmarks/studies/results/cub-a --svg docs/results-course.svg
"""

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from training.config import flatten_settings
from training.study.file import RunKey, Study, read_study
from training.study.results import History, RunResult, StudyFolder
from training.study.summary import Difference, summarise

_SETTINGS = {
    "hardness_sensitivity": "k",
    "search_margin": "λ",
    "volume": "V",
    "queue_size": "T, photos",
    "hardness_scale": "h",
}
"""The panels of `settings`, with the symbols of the paper."""
_COURSE = {
    "validation.map@r": "MAP@R, held-out training classes",
    "map@r": "MAP@R, test classes",
    "own_cosine_p50": "median cosine to the own proxy",
    "other_cosine_p50": "median cosine to other proxies",
    "gradient_positive": "gradient norm, positives",
    "gradient_negative": "gradient norm, negatives",
    "sigma": "sigma, decay of learned positives",
    "damped_negatives": "share of damped negatives",
}
_STANDARD = "proxy-isa"
"""The run from which those of `settings` differ in one setting each."""
_AUTOMATIC = {
    "hardness_sensitivity": 0.9,
    "search_margin": 0.1,
    "volume": 17.7,
    "queue_size": 19_746,
    "hardness_scale": 0.15,
}
"""What the loss makes of settings that are left open, on the photos of shop-ablations."""
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "study",
}


@dataclass(frozen=True)
class Series:
    """Points of a panel."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[tuple[float, ...]] = ()
    """The ends of each point's interval; none where there is one seed."""


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[Series]
    ticks: Sequence[str] = ()
    """Words for the places 0, 1, 2 … of the x-axis; without them it shows epochs."""
    y_label: str = ""
    """Of a row of panels with a common y-axis."""


def settings_panels(
    study: Study, results: Mapping[RunKey, RunResult], histories: Mapping[RunKey, History]
) -> list[Panel]:
    """Returns for each setting the difference of MAP@R to the baseline, then the share of damped negatives."""
    configs = {run.key.run: flatten_settings(run.config.model_dump(mode="json")) for run in study.plan()}
    summary = {run.name: run for run in summarise(study, results, histories).runs}

    def gain(run: str) -> Difference:
        difference = summary[run].differences["chosen"]
        if difference is None:
            raise SystemExit(f"{run} or {study.baseline_run} has no result yet: train the study first.")
        return difference

    def damped(run: str) -> float:
        last = [history[-1]["damped_negatives"] for key, history in histories.items() if key.run == run]
        return 100 * statistics.mean(float(value) for value in last)

    gains, shares = [], []
    for setting, symbol in _SETTINGS.items():
        name = f"loss.settings.{setting}"
        varied = [run for run in configs if _only_difference(configs[_STANDARD], configs[run]) == name]
        numbers = {run: configs[run][name] for run in varied} | {_STANDARD: _AUTOMATIC[setting]}
        runs = sorted(numbers, key=numbers.__getitem__)
        ticks, places = [f"{numbers[run]:g}" for run in runs], list(range(len(runs)))
        differences = [gain(run) for run in runs]
        means = [100 * difference.spread.mean for difference in differences]
        ends = [tuple(100 * end for end in difference.interval or ()) for difference in differences]
        gained, damped_share = Series("", places, means, ends), Series("", places, [*map(damped, runs)])
        gains.append(Panel(symbol, [gained], ticks, f"MAP@R minus {study.baseline_run}"))
        shares.append(Panel(symbol, [damped_share], ticks, "negatives damped, %"))
    return gains + shares


def course_panels(study: Study, histories: Mapping[RunKey, History]) -> list[Panel]:
    """Returns a panel for each recorded figure: the mean over seeds of every run by epoch."""
    panels = []
    for field, title in _COURSE.items():
        series = []
        for run in study.runs:
            records = [record for key, history in histories.items() if key.run == run for record in history]
            epochs = sorted({record["epoch"] for record in records if field in record})
            means = [statistics.mean(r[field] for r in records if r["epoch"] == e and field in r) for e in epochs]
            if epochs:
                series.append(Series(run, epochs, means))
        panels.append(Panel(title, series))
    return panels


def _only_difference(standard: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    names = [name for name in {**standard, **config} if standard.get(name) != config.get(name)]
    return names[0] if len(names) == 1 else None


@rc_context(_STYLE)
def draw(panels: Sequence[Panel], columns: int, svg: Path) -> None:
    """Writes the panels in rows, with a digest of their values as the description of the file."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.1 * columns, 1.9 * rows))
    grid = figure.subplots(rows, columns, sharey="row" if panels[0].y_label else False)
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    for number, (panel, axes) in enumerate(zip(panels, grid.flat, strict=True)):
        axes.set_title(panel.title, fontsize=8)
        axes.set_ylabel("" if number % columns else panel.y_label)
        for series in panel.series:
            colour = f"C{names.index(series.name)}"  # the same in every panel, also where a run has no such figure
            axes.plot(series.x, series.y, color=colour, marker="o" if panel.ticks else "", ms=3, label=series.name)
            for x, ends in zip(series.x, series.intervals or [()] * len(series.x), strict=True):
                axes.plot([x] * len(ends), ends, color=colour, alpha=0.5)
        if panel.ticks:
            axes.set_xticks(range(len(panel.ticks)), panel.ticks)
            axes.margins(x=0.15)
        if panel.series and panel.series[0].intervals:
            axes.axhline(0, color="black", linewidth=0.8)
    if len(names) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    metadata = {"Creator": None, "Date": None, "Description": values_digest(panels)}
    figure.savefig(svg, format="svg", metadata=metadata, facecolor="white")


def values_digest(panels: Sequence[Panel]) -> str:
    """Returns a digest of the plotted values, to compare a file with the lines it was drawn from."""
    rounded = json.loads(json.dumps([asdict(panel) for panel in panels]), parse_float=lambda text: f"{float(text):.9g}")
    return f"values {hashlib.sha256(json.dumps(rounded, sort_keys=True).encode()).hexdigest()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["settings", "course"])
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("--out", type=Path, required=True, help="folder with results.jsonl and history.jsonl")
    parser.add_argument("--svg", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    study, folder = read_study(arguments.study), StudyFolder(arguments.out)
    histories = folder.histories(study.plan())
    panels: Callable[[], list[Panel]] = {
        "settings": lambda: settings_panels(study, folder.results(), histories),
        "course": lambda: course_panels(study, histories),
    }[arguments.kind]
    draw(panels(), 5 if arguments.kind == "settings" else 4, arguments.svg)
    print(f"Wrote {arguments.svg}.")


if __name__ == "__main__":
    main()
