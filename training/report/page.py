"""The page itself: one HTML file that asks nobody for anything."""

from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from index._util.files import atomic_write_text
from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data.dataset import DataSet, counted
from training.report.analysis import Progress, Study, study_run
from training.report.charts import Line, as_percent, heat_map, line_chart, point_map
from training.report.learned import LearnedClasses
from training.report.photos import Thumbnails, confused_classes, worst_queries
from training.report.space import Similarity
from training.report.template import html_page, html_table
from training.run_logger import PAIR_SHARES

_SAME = 2e-3
"""Between figures of one model on the same photos, on another machine or with another version of the decoder."""
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


def write_report(run: RunFolder, data: DataSet, out: Path, *, spec: str, on_progress: Progress) -> None:
    """Studies a run on its photos and writes the page; `spec` names the data in it."""
    study = study_run(run, data, on_progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(out, _page(study, spec, Thumbnails(data.test)))


def _page(study: Study, spec: str, thumbnails: Thumbnails) -> str:
    sections = {
        "result": ("Result", _result(study, spec)),
        "course": ("Course", _course(study)),
        "worst": ("Worst queries", worst_queries(study, thumbnails)),
        "confused": ("Confused classes", confused_classes(study, thumbnails)),
        "space": ("Embedding space", _space(study)),
        "classes": ("Learned classes", _classes(study)),
    }
    title = f"{study.run.path.resolve().name} · Lookalike training report"
    return html_page(title, sections, made_by="lookalike report", tail=thumbnails.store())


# --- the result and the way to it ---


def _result(study: Study, spec: str) -> str:
    config, chosen = study.config, study.chosen
    seen, unseen = ({photo.label for photo in photos} for photos in (study.data.train, study.test))
    set_ = ", ".join(f"{name} {value}" for name, value in config.loss.settings.items())
    speeds = [record["photos_per_second"] for record in study.history if "photos_per_second" in record]
    facts = {
        "Data": f"{spec}: {counted(len(study.data.train), 'photo', 'photos')} of {len(seen):,} classes to learn, "
        f"{len(study.test):,} of {len(unseen):,} others to measure",
        "Backbone": f"{config.backbone.name}, {config.backbone.embedding_size} dimensions, "
        f"{config.preprocessing.input_size} pixels",
        "Loss": f"{config.loss.name} ({set_ or 'settings as they come'})",
        "Training": f"{counted(config.epochs, 'epoch', 'epochs')}, batches of {config.sampling.batch_size}, "
        f"{config.optimiser.name} at {config.optimiser.learning_rate:g}, {config.schedule.kind}" + _cached_part(config),
        "Kept": f"epoch {chosen['epoch']}, " + _reason(study),
        "Speed": f"{median(speeds):,.0f} photos per second" if speeds else "no epoch finished",
        "Page made with": ", ".join(f"{package} {version(package)}" for package in ("lookalike", "torch", "timm")),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    settings = escape(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in _remarks(study))
    return f"""<div><h1>{escape(study.run.path.resolve().name)}</h1>
<p class="lead">{escape(config.backbone.name)} trained with {escape(config.loss.name)} on {escape(spec)}</p></div>
{f'<ul class="remarks quiet">{remarks}</ul>' if remarks else ""}
<div class="result">
<div class="card">{_before_and_after(study)}</div>
<div class="card"><dl class="facts">{listed}</dl></div>
</div>
<details><summary>All settings</summary><pre tabindex="0">{settings}</pre></details>"""


def _cached_part(config: TrainingConfig) -> str:
    if not config.cached_views:
        return ""
    return ", only the head" if config.cached_stage is None else f", stages {config.cached_stage}: and the head"


def _reason(study: Study) -> str:
    if study.validated:
        return f"the best {_title(study.config.selection.metric)} on the validation classes"
    return "the newest, for no classes were held out to choose"


def _remarks(study: Study) -> list[str]:
    remarks = list(study.data.remarks)
    if not study.run.is_finished:
        remarks.append(f"The run has not finished: it stands at epoch {study.newest} of {study.config.epochs}.")
    if study.proxies and study.proxies.classes is None:
        remarks.append("The photos to learn from are not those of this run, so its proxies are shown without them.")
    return remarks


def _before_and_after(study: Study) -> str:
    names = [name for name in study.measured if name in study.history[0]]
    columns = [("untrained", study.history[0]), (f"epoch {study.chosen['epoch']}", study.chosen)]
    # The run has measured on its own photos; these may be others, or the run is in the middle of an epoch.
    if any(abs(study.chosen.get(name, -1) - study.measured[name]) > _SAME for name in names):
        columns.append(("for this page", study.measured))
    return html_table(
        ["On classes never trained", *(title for title, _ in columns)],
        [[_title(name), *(_percent(record.get(name)) for _, record in columns)] for name in names],
    )


def _title(name: str) -> str:
    return name.replace("recall", "Recall").replace("map@r", "MAP@R").replace("validation.", "validation ")


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{100 * value:.1f} %"


def _course(study: Study) -> str:
    # The kept epoch may have been measured on the test classes only at the end.
    kept = study.chosen["epoch"]
    history = [study.chosen if record["epoch"] == kept else record for record in study.history]

    def line(field: str, name: str, style: int, *, dashed: bool = False) -> Line:
        points = [(record["epoch"], record[field]) for record in history if field in record]
        return Line(name, points, style, dashed)

    recall = [line(name, _title(name), style) for style, name in ((1, "recall@1"), (2, "map@r"))]
    recall += [
        line(f"validation.{name}", f"{_title(name)}, validation", style, dashed=True)
        for style, name in ((1, "recall@1"), (2, "map@r"))
    ]
    shares = [
        line(name, name.replace("_", " "), place + 1, dashed=name == PAIR_SHARES[-1])
        for place, name in enumerate(PAIR_SHARES)
    ]
    charts = (
        line_chart(
            "Recall and MAP on classes never trained", recall, x_label="epoch", show=as_percent, marks=[(kept, "kept")]
        ),
        line_chart("Shares of pairs in the loss", shares, x_label="epoch", show=as_percent),
        line_chart("Loss", [line("loss", "loss", 4)], x_label="epoch"),
        line_chart("Learning rate of the head", [line("learning_rate", "learning rate", 3)], x_label="epoch"),
        *(
            line_chart(
                title,
                [line(name, text, style + 1) for style, (name, text) in enumerate(names.items())],
                x_label="epoch",
                note=note,
            )
            for title, names, note in LOSS_CHARTS
        ),
    )
    return (
        f'<h2>Course of the training</h2><div class="charts">{"".join(charts)}</div>'
        f"<details><summary>All figures by epoch</summary>{_history_table(history)}</details>"
    )


def _history_table(history: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for record in history for name in record))
    rows = [[f"{record[name]:.4g}" if name in record else _NOTHING for name in names] for record in history]
    table = html_table([_title(name).replace("_", " ") for name in names], rows, "dense")
    return f'<div class="card scroll" tabindex="0" role="group" aria-label="All figures by epoch">{table}</div>'


# --- the space and the state of its classes ---


def _space(study: Study) -> str:
    charts = []
    if study.space:
        note = "t-SNE of photos that were never trained on, a colour a class; rest on a dot to read its class."
        charts.append(point_map("Test photos", study.space.photos, study.space.labels, note=note))
    proxies = study.proxies
    if proxies and proxies.among_photos:
        mapped = proxies.among_photos
        note = f"t-SNE of training photos with the proxies of their classes as stars, after epoch {study.newest}."
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
    charts.append(_heat("Similarity of test classes", study.similarity, "mean cosine of the photos of two classes"))
    if proxies:
        charts.append(_heat("Similarity of proxies", proxies.similarity, "cosine of two proxies"))
    return f'<h2>Embedding space</h2><div class="charts">{"".join(charts)}</div>'


def _heat(title: str, similarity: Similarity, what: str) -> str:
    shown = len(similarity.names)
    some = f"{shown} of {similarity.total:,} rows, evenly drawn; " if shown < similarity.total else ""
    note = f"{some}{what}, similar ones side by side."
    if shown > 1:
        one, other, closest = similarity.closest()
        own, between = float(similarity.matrix.diagonal().mean()), float(similarity.between().mean())
        note += (
            f" Mean {own:.2f} on the diagonal and {between:.2f} beside it; nearest {one} and {other}: {closest:.2f}."
        )
    note = note[0].upper() + note[1:]
    return heat_map(title, similarity.matrix, note=note, told=f"Heat map of {shown} rows. {note}")


def _classes(study: Study) -> str:
    classes = study.classes
    if classes is None:
        return ""
    settings, decay = classes.settings, classes.decay
    curves = [
        Line(name, list(zip(decay.samples, values, strict=True)), style)
        for name, values, style in ((_SIGMA, decay.sigma, 1), (_NU, decay.nu, 2), ("1 / E", decay.inverse, 3))
    ]
    seen, counts = np.unique(classes.seen, return_counts=True)
    now = float(np.median(classes.seen))
    charts = (
        line_chart(
            "Decay functions",
            curves,
            x_label="n, clean samples of a class",
            marks=[(now, f"median class, n = {now:g}")],
            shares=list(zip(seen.tolist(), (counts / counts.max()).tolist(), strict=True)),
            note=f"For V = {settings.volume:g} and {_TAU} = {settings.tau:g}: {_SIGMA} is about half-way down to {_NU} "
            f"after {settings.half_decay_samples():.0f} samples. The bars show where the classes are now.",
        ),
        _informative_range(classes, study.proxies.classes if study.proxies else None),
    )
    return f"""<h2>How far the classes are learned</h2>
<p class="words">State of {escape(study.config.loss.name)} after epoch {study.newest}. A positive between S_outlier and
S_learned of its class is informative; above it is easy, below it an outlier.</p>
<div class="charts">{"".join(charts)}</div>
<div class="card">{_class_table(classes)}</div>"""


def _informative_range(classes: LearnedClasses, names: Sequence[str] | None) -> str:
    order = np.argsort(classes.learned, kind="stable")
    lines = [
        Line(name, [(place + 1, float(values[number])) for place, number in enumerate(order)], style)
        for name, values, style in (("S_learned", classes.learned, 1), ("S_outlier", classes.outlier, 4))
    ]
    note = "The tinted range is informative."
    if names:
        note += f" Hardest: {', '.join(names[number] for number in order[:5])}."
    return line_chart("Thresholds of the classes", lines, x_label="classes, the hardest first", filled=True, note=note)


def _class_table(classes: LearnedClasses) -> str:
    rows = {
        "n, clean samples": (classes.seen, ".0f"),
        "E, effective number": (classes.effective, ".2f"),
        "S_learned": (classes.learned, ".4f"),
        "S_outlier": (classes.outlier, ".4f"),
    }
    return html_table(
        ["Over all classes", "lowest", "median", "highest"],
        [
            [name, *(f"{value:{style}}" for value in np.quantile(values, (0, 0.5, 1)))]
            for name, (values, style) in rows.items()
        ],
    )
