"""Compares models on the same photos: figures with intervals, and paired differences to the first model.

Runs that differ in nothing but the seed are one entry: each query's value is the mean over the runs. Intervals are over
the queries, deviations over the runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.evaluation.metrics import QueryMetrics, confidence_intervals, query_metrics
from training.data import Photo
from training.evaluation import embed_photos, photo_protocol
from training.gpu_ranking import find_ranker
from training.metric_names import metric_title
from training.models import MeasuredModel
from training.study.runner import config_digest, describe_config
from training.study.summary import Difference, Spread, align_columns, format_difference, format_spread

ComparisonProgress = Callable[[int, int, str], None]
"""Progress callback: (done, total, title)."""


@dataclass(frozen=True)
class ComparedModel:
    """A model, or the runs of one configuration."""

    name: str
    runs: tuple[str, ...]
    """The names of the models that are averaged."""
    dimension: int
    figures: dict[str, Difference]
    """By metric: the mean and its deviation over runs, with the interval over queries."""
    differences: dict[str, Difference] | None
    """The same for the differences to the first model, which has none."""


@dataclass(frozen=True)
class Comparison:
    """The models in the order in which they were given."""

    queries: int
    queries_without_answer: int
    gallery: int
    models: tuple[ComparedModel, ...]

    def record(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        return {
            "queries": self.queries,
            "queries_without_answer": self.queries_without_answer,
            "gallery": self.gallery,
            "models": [
                {
                    "name": model.name,
                    "runs": list(model.runs),
                    "dimension": model.dimension,
                    "figures": _as_json(model.figures),
                    "differences": _as_json(model.differences) if model.differences else None,
                }
                for model in self.models
            ],
        }


def _as_json(figures: dict[str, Difference]) -> dict[str, Any]:
    return {
        name: {"mean": figure.spread.mean, "deviation": figure.spread.deviation, "interval": figure.interval}
        for name, figure in figures.items()
    }


@dataclass(frozen=True)
class _Group:
    models: Sequence[MeasuredModel]
    metrics: Sequence[QueryMetrics]
    dimension: int

    def by_query(self, metric: str) -> NDArray[np.float64]:
        """Returns the values of each query, as means over the runs."""
        values: NDArray[np.float64] = np.mean([metrics[metric] for metrics in self.metrics], axis=0)
        return values

    def by_seed(self, metric: str) -> dict[int, float]:
        """Returns the mean of each run by its seed; another model has the seed 0."""
        seeds = [model.run.config.seed if model.run else 0 for model in self.models]
        return {seed: float(metrics[metric].mean()) for seed, metrics in zip(seeds, self.metrics, strict=True)}


def compare_models(
    models: Sequence[MeasuredModel],
    photos: Sequence[Photo],
    ks: Sequence[int],
    *,
    rounds: int,
    on_progress: ComparisonProgress = lambda done, total, title: None,
) -> Comparison:
    """Measures each model on the photos; `rounds` is the number of bootstrap resamples."""
    protocol = photo_protocol(photos)
    names = [*(f"recall@{k}" for k in ks), "map@r"]

    def embed(model: MeasuredModel) -> NDArray[np.float32]:
        report = partial(_report, on_progress, f"Embedding with {model.name}")
        return embed_photos(photos, model.preprocessing, model.embed, report)

    groups = []
    for members in group_runs(models):
        metrics, dimension = [], 0
        for model in members:
            vectors = embed(model)
            metrics.append(query_metrics(vectors, protocol, ks, ranker=find_ranker()))
            dimension = vectors.shape[1]
        groups.append(_Group(members, metrics, dimension))
    compared = tuple(_compare(group, groups[0], names, rounds) for group in groups)
    return Comparison(len(protocol.queries), protocol.unanswerable, len(protocol.gallery), compared)


def _report(on_progress: ComparisonProgress, title: str, done: int, total: int) -> None:
    on_progress(done, total, title)


def group_runs(models: Sequence[MeasuredModel]) -> list[list[MeasuredModel]]:
    """Puts runs of the same data and settings apart from the seed together; all other models stay alone."""
    groups: dict[str, list[MeasuredModel]] = {}
    for model in models:
        key = model.name
        if model.run:
            settings = {k: v for k, v in describe_config(model.run.config).items() if k not in ("seed", "stop_epoch")}
            key = f"{model.run.data} {model.run.is_refit} {config_digest(settings)}"
        groups.setdefault(key, []).append(model)
    return list(groups.values())


def _compare(group: _Group, first: _Group, names: Sequence[str], rounds: int) -> ComparedModel:
    runs = tuple(model.name for model in group.models)
    deviations = {name: _deviation(group.by_seed(name)) for name in names}
    values = {name: group.by_query(name) for name in names}
    paired = {name: values[name] - first.by_query(name) for name in names}
    paired_deviations = {name: _deviation(_pair_seeds(group.by_seed(name), first.by_seed(name))) for name in names}
    return ComparedModel(
        name=runs[0] if len(runs) == 1 else f"{runs[0]} and {len(runs) - 1} more",
        runs=runs,
        dimension=group.dimension,
        figures=_with_intervals(values, deviations, len(runs), rounds),
        differences=None if group is first else _with_intervals(paired, paired_deviations, len(runs), rounds),
    )


def _pair_seeds(values: dict[int, float], baseline: dict[int, float]) -> dict[int, float]:
    """Returns the differences of runs with the same seed; a baseline of one model is paired with every run."""
    if len(baseline) == 1:
        baseline = dict.fromkeys(values, *baseline.values())
    return {seed: value - baseline[seed] for seed, value in values.items() if seed in baseline}


def _deviation(values: dict[int, float]) -> float | None:
    spread = Spread.of(values.values())
    return spread.deviation if spread else None


def _with_intervals(
    values: QueryMetrics, deviations: dict[str, float | None], runs: int, rounds: int
) -> dict[str, Difference]:
    intervals = confidence_intervals(values, rounds)
    return {
        name: Difference(Spread(float(values[name].mean()), deviations[name], runs), intervals[name]) for name in values
    }


def format_comparison(comparison: Comparison) -> str:
    """Formats the comparison for a terminal."""
    metrics = list(comparison.models[0].figures)
    titles = [metric_title(name) for name in metrics]
    several = any(len(model.runs) > 1 for model in comparison.models)
    rows = [
        [m.name, str(len(m.runs)), str(m.dimension), *(_format_figure(m.figures[name]) for name in metrics)]
        for m in comparison.models
    ]
    missing = comparison.queries_without_answer
    left_out = f"; {missing:,} more have no photo of their class there and are left out" if missing else ""
    spread = "mean ±deviation over runs [95 % interval over queries]" if several else "[95 % interval over queries]"
    parts = [
        f"{comparison.queries:,} queries against {comparison.gallery:,} gallery photos{left_out}",
        f"Percent, {spread}\n" + align_columns([["model", "runs", "dimension", *titles], *rows]),
    ]
    others = [model for model in comparison.models if model.differences]
    if others:
        rows = [[m.name, *(format_difference(d) for d in (m.differences or {}).values())] for m in others]
        title = f"Points above {comparison.models[0].name}, paired by query"
        parts.append(f"{title}\n" + align_columns([["model", *titles], *rows]))
    return "\n\n".join(parts)


def _format_figure(figure: Difference) -> str:
    low, high = figure.interval or (figure.spread.mean, figure.spread.mean)
    return f"{format_spread(figure.spread)} [{100 * low:.2f}, {100 * high:.2f}]"
