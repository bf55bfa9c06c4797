"""The page of a training run: figures, curves, the worst queries as photos, and the embedding space."""

import base64
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from index.embedding.images import thumbnail
from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data import DataSet, Photo
from training.data.dataset import count_noun
from training.data.torch_datasets import read_photo
from training.metric_names import metric_title
from training.report.analysis import ReportProgress, RunAnalysis, analyse_run
from training.report.charts import Chart, Line, as_percent, heat_map, line_chart, point_map
from training.report.learned import LearnedClasses
from training.report.rendering import Table, write_page
from training.report.space import Similarity
from training.run_logger import PAIR_SHARES

_SAME = 2e-3
"""Largest difference of a model's figures on the same photos, between machines and versions of the decoder."""
_WORST, _NEIGHBOURS, _PAIRS = 24, 6, 12
_SIDE = 128
"""Of a thumbnail, in pixels."""
LOSS_CHARTS: tuple[tuple[str, dict[str, str], str], ...] = (
    (
        "Cosines to proxies",
        {
            "own_cosine_p10": "own, 10 %",
            "own_cosine_p50": "own, median",
            "own_cosine_p90": "own, 90 %",
            "other_cosine_p50": "others, median",
            "other_cosine_p90": "others, 90 %",
        },
        "Quantiles over the photos of a batch; they should move apart.",
    ),
    (
        "Thresholds of Proxy-ISA",
        {"s_avg": "S_avg", "s_learned": "S_learned", "s_outlier": "S_outlier"},
        "Means over the classes. Negatives below S_outlier are damped.",
    ),
    (
        "Weights of pairs",
        {"weight_positive": "positive pairs", "weight_negative": "negative pairs", "sigma": "\u03c3"},
        "Means over the pairs of a batch; \u03c3 over the classes.",
    ),
    (
        "Gradients of the two terms",
        {"gradient_positive": "attraction", "gradient_negative": "repulsion"},
        "Norms of the gradient by the unit vectors of a batch.",
    ),
)
"""What a proxy loss reports about itself: title, fields of an epoch's record with their names, and a note."""
_NOTHING = "\u2013"
_SIGMA, _NU, _TAU = "\u03c3", "\u03bd", "\u03c4"


def write_report(run: RunFolder, data: DataSet, out: Path, *, spec: str, on_progress: ReportProgress) -> None:
    """Analyses a run on its photos and writes the page; `spec` names the data in it."""
    analysis = analyse_run(run, data, on_progress)
    name = run.path.resolve().name
    results = analysis.results
    worst, confusions = results.worst(_WORST, _NEIGHBOURS), results.confusions(_PAIRS)
    found = [neighbour for row in worst for neighbour in (*row.neighbours, row.right)]
    found += [pair.found for pair in confusions]
    shown = [row.query for row in worst] + [pair.query for pair in confusions] + [one.photo for one in found]
    history = _measured_history(analysis)
    write_page(
        out,
        "run.html",
        title=f"{name} · Lookalike training report",
        command="lookalike report",
        name=name,
        spec=spec,
        config=analysis.config,
        settings=yaml.safe_dump(analysis.config.model_dump(mode="json"), sort_keys=False),
        remarks=_remarks(analysis),
        facts=_facts(analysis, spec),
        before_and_after=_before_and_after(analysis),
        course_charts=_course_charts(history, kept=analysis.chosen["epoch"]),
        history=_history_table(history),
        queries=len(results.queries),
        wrong=int(results.wrong.sum()),
        worst=worst,
        confusions=confusions,
        photos=data.test,
        paths=_relative_paths(data.test),
        thumbnails={place: _thumbnail(data.test[place]) for place in dict.fromkeys(shown)},
        side=_SIDE,
        space_charts=_space_charts(analysis),
        newest=analysis.newest,
        class_charts=_class_charts(analysis),
        class_table=_class_table(analysis.classes) if analysis.classes else None,
    )


# --- the photos ---


def _relative_paths(photos: Sequence[Photo]) -> list[str]:
    """Returns the photos' paths below the folder that they share."""
    root = os.path.commonpath([photo.path.absolute().parent for photo in photos])
    return [os.path.relpath(photo.path.absolute(), root) for photo in photos]


def _thumbnail(photo: Photo) -> str:
    """Returns a small version of the photo as a data URI."""
    return "data:image/jpeg;base64," + base64.b64encode(thumbnail(read_photo(photo, _SIDE), _SIDE)).decode()


# --- the result and its history ---


def _facts(analysis: RunAnalysis, spec: str) -> dict[str, str]:
    config, data = analysis.config, analysis.data
    learned, measured = (len({photo.label for photo in photos}) for photos in (data.train, data.test))
    overrides = ", ".join(f"{name} {value}" for name, value in config.loss.settings.items())
    speeds = [record["photos_per_second"] for record in analysis.history if "photos_per_second" in record]
    return {
        "Data": f"{spec}: {count_noun(len(data.train), 'photo', 'photos')} of {learned:,} classes to learn, "
        f"{len(data.test):,} of {measured:,} others to measure",
        "Backbone": f"{config.backbone.name}, {analysis.dimension:,} dimensions, "
        f"{config.preprocessing.input_size} pixels",
        "Loss": f"{config.loss.name} ({overrides or 'default settings'})",
        "Training": f"{count_noun(config.epochs, 'epoch', 'epochs')}, batches of {config.sampling.batch_size}, "
        f"{config.optimiser.name} at {config.optimiser.learning_rate:g}, {config.schedule.kind}" + _cached_part(config),
        "Kept": (f"epoch {analysis.chosen['epoch']}, " if analysis.chosen["epoch"] else "the untrained backbone, ")
        + _reason(analysis),
        "Speed": f"{median(speeds):,.0f} photos per second" if speeds else "no epoch finished",
        "Page made with": ", ".join(f"{package} {version(package)}" for package in ("lookalike", "torch", "timm")),
    }


def _cached_part(config: TrainingConfig) -> str:
    if not config.cached_views:
        return ""
    return ", only the head" if config.cached_stage is None else f", stages {config.cached_stage}: and the head"


def _reason(analysis: RunAnalysis) -> str:
    if analysis.validated:
        return f"the best {metric_title(analysis.config.selection.metric)} on the validation classes"
    return "the newest, for no classes were held out to choose"


def _remarks(analysis: RunAnalysis) -> list[str]:
    remarks = list(analysis.data.remarks)
    if not analysis.run.is_finished:
        remarks.append(f"The run has not finished: it stands at epoch {analysis.newest} of {analysis.config.epochs}.")
    elif remark := analysis.run.result().get("remark"):
        remarks.append(remark)
    if analysis.proxies and analysis.proxies.classes is None:
        remarks.append("The photos to learn from are not those of this run, so its proxies are shown without them.")
    return remarks


def _before_and_after(analysis: RunAnalysis) -> Table:
    untrained, chosen, measured = analysis.history[0], analysis.chosen, analysis.measured
    names = [name for name in measured if name in untrained]
    columns = [("untrained", untrained)]
    if chosen["epoch"]:
        columns.append((f"epoch {chosen['epoch']}", chosen))
    # The run was measured on its own photos; these may be others, or the run is in the middle of an epoch.
    if any(abs(chosen.get(name, -1) - measured[name]) > _SAME for name in names):
        columns.append(("for this page", measured))
    rows = [[metric_title(name), *(_percent(record.get(name)) for _, record in columns)] for name in names]
    return ["On classes never trained", *(title for title, _ in columns)], rows


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{100 * value:.1f} %"


def _measured_history(analysis: RunAnalysis) -> list[dict[str, Any]]:
    """Returns the history; the kept epoch may have been measured on the test classes only at the end."""
    chosen = analysis.chosen
    return [chosen if record["epoch"] == chosen["epoch"] else record for record in analysis.history]


def _history_table(history: Sequence[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for record in history for name in record))
    rows = [[f"{record[name]:.4g}" if name in record else _NOTHING for name in names] for record in history]
    return [metric_title(name).replace("_", " ") for name in names], rows


def _course_charts(history: Sequence[dict[str, Any]], kept: int) -> list[Chart | None]:
    def line(field: str, name: str, style: int, *, dashed: bool = False) -> Line:
        points = [(record["epoch"], record[field]) for record in history if field in record]
        return Line(name, points, style, dashed)

    metrics = ("recall@1", "map@r")
    recall = [line(name, metric_title(name), style) for style, name in enumerate(metrics, 1)]
    recall += [
        line(f"validation.{name}", f"{metric_title(name)}, validation", style, dashed=True)
        for style, name in enumerate(metrics, 1)
    ]
    shares = [
        line(name, name.replace("_", " "), style, dashed=name == PAIR_SHARES[-1])
        for style, name in enumerate(PAIR_SHARES, 1)
    ]
    title = "Recall and MAP on classes never trained"
    return [
        line_chart(title, recall, show=as_percent, marks=[(kept, "kept")]),
        line_chart("Shares of pairs in the loss", shares, show=as_percent),
        line_chart("Loss", [line("loss", "loss", 4)]),
        line_chart("Learning rate of the head", [line("learning_rate", "learning rate", 3)]),
        *(
            line_chart(title, [line(*field, style) for style, field in enumerate(fields.items(), 1)], note=note)
            for title, fields, note in LOSS_CHARTS
        ),
    ]


# --- the space and the state of its classes ---


def _space_charts(analysis: RunAnalysis) -> list[Chart]:
    charts, proxies = [], analysis.proxies
    if analysis.space:
        note = "t-SNE of photos that were never trained on, one colour per class; rest on a dot to read its class."
        charts.append(point_map("Test photos", analysis.space.photos, analysis.space.labels, note=note))
    if proxies and (mapped := proxies.among_photos):
        note = f"t-SNE of training photos with the proxies of their classes as stars, after epoch {analysis.newest}."
        charts.append(
            point_map(
                "Training photos and proxies",
                mapped.photos,
                mapped.labels,
                stars=mapped.proxies,
                star_labels=mapped.proxy_labels,
                note=note,
            )
        )
    charts.append(_heat("Similarity of test classes", analysis.similarity, "mean cosine of the photos of two classes"))
    if proxies:
        charts.append(_heat("Similarity of proxies", proxies.similarity, "cosine of two proxies"))
    return charts


def _heat(title: str, similarity: Similarity, what: str) -> Chart:
    shown = len(similarity.names)
    some = f"{shown} of {similarity.total:,} rows, evenly drawn; " if shown < similarity.total else ""
    note = f"{some}{what}, similar ones next to each other."
    if shown > 1:
        one, other, closest = similarity.closest()
        own, between = float(similarity.matrix.diagonal().mean()), float(similarity.between().mean())
        note += f" Mean {own:.2f} on the diagonal and {between:.2f} off it; nearest {one} and {other}: {closest:.2f}."
    return heat_map(title, similarity.matrix, note=note[0].upper() + note[1:])


def _class_charts(analysis: RunAnalysis) -> list[Chart | None]:
    classes = analysis.classes
    if classes is None:
        return []
    settings, decay = classes.settings, classes.decay
    curves = [
        Line(name, list(zip(decay.samples, values, strict=True)), style)
        for name, values, style in ((_SIGMA, decay.sigma, 1), (_NU, decay.nu, 2), ("1 / E", decay.inverse, 3))
    ]
    seen, counts = np.unique(classes.seen, return_counts=True)
    now = float(np.median(classes.seen))
    return [
        line_chart(
            "Decay functions",
            curves,
            x_label="n, clean samples of a class",
            marks=[(now, f"median class, n = {now:g}")],
            shares=list(zip(seen.tolist(), (counts / counts.max()).tolist(), strict=True)),
            note=f"For V = {settings.volume:g} and {_TAU} = {settings.tau:g}: {_SIGMA} is about half-way down to {_NU} "
            f"after {settings.half_decay_samples():.0f} samples. The bars show where the classes are now.",
        ),
        _informative_range(classes, analysis.proxies.classes if analysis.proxies else None),
    ]


def _informative_range(classes: LearnedClasses, names: Sequence[str] | None) -> Chart | None:
    order = np.argsort(classes.learned, kind="stable")
    lines = [
        Line(name, [(place, float(values[number])) for place, number in enumerate(order, 1)], style)
        for name, values, style in (("S_learned", classes.learned, 1), ("S_outlier", classes.outlier, 4))
    ]
    note = "The tinted range is informative."
    if names:
        note += f" Hardest: {', '.join(names[number] for number in order[:5])}."
    return line_chart("Thresholds of the classes", lines, x_label="classes, the hardest first", filled=True, note=note)


def _class_table(classes: LearnedClasses) -> Table:
    rows = {
        "n, clean samples": (classes.seen, ".0f"),
        "E, effective number": (classes.effective, ".2f"),
        "S_learned": (classes.learned, ".4f"),
        "S_outlier": (classes.outlier, ".4f"),
    }
    return ["Over all classes", "lowest", "median", "highest"], [
        [name, *(f"{value:{style}}" for value in np.quantile(values, (0, 0.5, 1)))]
        for name, (values, style) in rows.items()
    ]
