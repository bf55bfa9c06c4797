"""The commands `evaluate` and `compare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from training.cli import SeenClassesOption, check_data, read_data, require_train_extra
from training.errors import TrainingError
from training.metric_names import metric_title

if TYPE_CHECKING:
    from training.data import DataSet
    from training.seen_classes import UnseenCheck

DataOption = Annotated[str | None, typer.Option(help="A data set, as for `train`: its test classes are measured.")]
QueriesOption = Annotated[
    str | None, typer.Option(help="Instead of --data: labelled photos to search with, a folder or a table.")
]
GalleryOption = Annotated[
    str | None, typer.Option(help="With --queries: the photos to find, a folder or a table with the same labels.")
]


def evaluate(
    model: Annotated[str, typer.Option(help="A training run, a checkpoint file in one, a bundle, or backbone:NAME.")],
    data: DataOption = None,
    queries: QueriesOption = None,
    gallery: GalleryOption = None,
    k: Annotated[str, typer.Option(help="The Ks of Recall@K.")] = "1,2,4,8",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
    bootstrap: Annotated[int, typer.Option(help="Bootstrap rounds of 95 % confidence intervals; 0: none.", min=0)] = 0,
    index: Annotated[bool, typer.Option("--index", help="Also measure through the search index.")] = False,
    seen_classes: SeenClassesOption = "refuse",
) -> None:
    """Measure recall and precision on the test classes of a data set, or of your photos against your catalogue.

    Example: lookalike evaluate --model bundle --data sample --k 1,10 --bootstrap 1000

    Example: lookalike evaluate --model bundle --queries labelled.csv --gallery catalogue.csv
    """
    require_train_extra()
    from index.cli.progress import progress_bar
    from training.evaluation import embed_photos, full_report, versions
    from training.models import open_model
    from training.seen_classes import check_unseen

    ks, source = _parse_ks(k), _parse_source(data, queries, gallery)
    opened = open_model(model)
    check = check_unseen(_read_measured(source), {model: opened.seen}, seen_classes)
    photos = _print_remarks(check).test
    with progress_bar("Embedding") as on_progress:
        vectors = embed_photos(photos, opened.preprocessing, opened.embed, on_progress)
    report = full_report(vectors, photos, ks, rounds=bootstrap, through_index=index)
    _print_report(report)
    card = opened.bundle.card if opened.bundle else None
    about = {"bundle": card.id if card else None, "refit": card.refit if card else False}
    _write_json(
        json_file,
        {"model": model, **about, **source, "seen_classes": check.record(), **report, "versions": versions()},
    )


def compare(
    models: Annotated[
        list[str], typer.Argument(help="Runs, checkpoint files, bundles, backbone:NAME; the first is the baseline.")
    ],
    data: DataOption = None,
    queries: QueriesOption = None,
    gallery: GalleryOption = None,
    k: Annotated[str, typer.Option(help="The Ks of Recall@K.")] = "1,8",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
    bootstrap: Annotated[int, typer.Option(help="Bootstrap rounds of the 95 % confidence intervals.", min=1)] = 1000,
    seen_classes: SeenClassesOption = "refuse",
) -> None:
    """Compare models on the same photos, with paired differences to the first; runs that differ in the seed are one.

    Example: lookalike compare backbone:efficientnet_lite0 runs/seed-0 runs/seed-1 bundle --data folder:photos
    """
    require_train_extra()
    from index.cli.progress import progress_bar
    from training.comparison import compare_models, format_comparison
    from training.evaluation import versions
    from training.models import open_model
    from training.seen_classes import check_unseen

    ks, source = _parse_ks(k), _parse_source(data, queries, gallery)
    if repeated := {name for name in models if models.count(name) > 1}:
        raise TrainingError(f"{min(repeated)} is given twice.", "Give each model once.")
    opened = [open_model(name) for name in models]
    check = check_unseen(_read_measured(source), {model.name: model.seen for model in opened}, seen_classes)
    photos = _print_remarks(check).test
    with progress_bar("Embedding") as on_progress:
        comparison = compare_models(opened, photos, ks, rounds=bootstrap, on_progress=on_progress)
    typer.echo(format_comparison(comparison))
    record = {**source, "seen_classes": check.record(), **comparison.record(), "versions": versions()}
    _write_json(json_file, record)


def _parse_source(data: str | None, queries: str | None, gallery: str | None) -> dict[str, str | None]:
    """Returns where the photos come from, as written to JSON files."""
    if bool(data) == bool(queries or gallery) or bool(queries) != bool(gallery):
        raise TrainingError("The photos to measure on are not clear.", "Give --data, or --queries and --gallery.")
    return {"data": data, "query_photos": queries, "gallery_photos": gallery}


def _read_measured(source: dict[str, str | None]) -> "DataSet":
    """Reads and checks the photos to measure on; those to learn from are not checked."""
    from dataclasses import replace

    from training.data import load_search

    data, queries, gallery = source.values()
    if data:
        return check_data(replace(read_data(data), train=()))
    return check_data(load_search(str(queries), str(gallery)))


def _print_remarks(check: "UnseenCheck") -> "DataSet":
    for remark in check.data.remarks:
        typer.echo(remark, err=True)
    return check.data


def _print_report(report: dict[str, Any]) -> None:
    typer.echo(f"{report['queries']:,} queries against {report['gallery']:,} gallery photos")
    if missing := report["queries_without_answer"]:
        typer.echo(f"{missing:,} more queries have no photo of their class in the gallery and are left out")
    for name, value in report["figures"].items():
        line = f"{metric_title(name):11} {100 * value:6.2f} %"
        if "intervals" in report:
            low, high = report["intervals"][name]
            line += f"  [{100 * low:6.2f}, {100 * high:6.2f}]"
        if name in report.get("index", {}):
            served = report["index"][name]
            line += f"  through the index {100 * served:6.2f} % ({100 * (served - value):+.2f})"
        typer.echo(line)


def _write_json(file: Path | None, record: dict[str, Any]) -> None:
    from index._util.files import atomic_write_text

    if file:
        atomic_write_text(file, json.dumps(record, indent=2) + "\n")


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise TrainingError(f"--k {text!r} is not a list of positive numbers.", "Write it as 1,2,4,8.")
    return ks
