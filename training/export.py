"""Exports a trained run or a pretrained backbone as bundles, after comparing ONNX Runtime's vectors with PyTorch's."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from index._util.files import atomic_directory
from index.embedding.bundle import CARD_FILE, MODEL_FILE, Bundle, write_card
from index.embedding.embedder import Embedder
from index.embedding.images import Preprocessing
from training.backbones import EmbeddingModel
from training.callbacks import Progress
from training.checkpoints import RunFolder
from training.data import DataSet, Photo
from training.data.registry import display_name
from training.data.torch_datasets import MeasuredPhotos
from training.errors import TrainingError
from training.evaluation import Embed, measure, torch_embedder
from training.metric_names import retrieval_figures
from training.models import load_backbone
from training.quantization import ReducedPrecision, reduce_model
from training.seen_classes import SeenClasses

MIN_COSINE = 0.9999
"""Between a photo's vectors from PyTorch and from ONNX Runtime."""

MAX_RECALL_LOSS = 0.005
"""Loss of Recall@1 by a reduced precision above which the command line warns."""

_CALIBRATION = 256
"""Training photos for the calibration of int8."""


def export_run(run: RunFolder, out: Path, photos: Sequence[Photo], *, min_cosine: float = MIN_COSINE) -> Bundle:
    """Writes the run's model as a bundle, after checking it on real photos; replaces an older bundle atomically."""
    if not photos:
        raise TrainingError("There are no test photos to check the exported model with.", "Give some with --data.")
    config, model, result, seen = run.config, run.model(), run.result(), run.seen_classes()
    trained = bool(result["epoch"])
    details = {
        "backbone": config.backbone.name,
        "loss": config.loss.name if trained else "",
        "loss_settings": config.loss.settings if trained else {},
        "data": display_name(run.data),
        "metrics": retrieval_figures(result),
        "untrained_metrics": result["untrained"],
        "refit": run.is_refit,
        "remark": result.get("remark", ""),
        "seen_classes": None if seen is None else seen.encode(),
    }
    return _export(model, config.preprocessing, out, _load_samples(photos, config.preprocessing), min_cosine, details)


def export_backbone(name: str, out: Path, photos: Sequence[Photo] = ()) -> Bundle:
    """Writes a pretrained backbone, `backbone:NAME`, as a bundle; it is checked on generated images without photos."""
    config, model = load_backbone(name)
    rule = config.preprocessing
    samples = _load_samples(photos, rule) if photos else _generate_samples(rule.input_size)
    details = {"backbone": config.backbone.name, "loss": "", "seen_classes": SeenClasses().encode()}
    return _export(model, rule, out, samples, MIN_COSINE, details)


def _export(
    model: EmbeddingModel,
    preprocessing: Preprocessing,
    out: Path,
    samples: "_Samples",
    min_cosine: float,
    details: dict[str, Any],
) -> Bundle:
    packages = ("lookalike", "torch", "timm", "onnx", "onnxruntime")
    with _new_bundle(out) as temporary:
        _write_onnx(model, preprocessing.input_size, temporary / MODEL_FILE)
        write_card(
            temporary,
            preprocessing=preprocessing,
            dimension=model.dimension,
            versions={name: version(name) for name in packages},
            **details,
        )
        _check_parity(model, Bundle.load(temporary), samples, min_cosine)
    return Bundle.load(out)


def export_reduced(
    bundle: Bundle,
    precisions: Sequence[ReducedPrecision],
    data: DataSet,
    on_progress: Progress | None = None,
    *,
    remark: str = "",
) -> list[Bundle]:
    """Writes bundles of reduced precision next to a bundle, each named after it and with its measured figures.

    All are measured through ONNX Runtime on the test photos. Their vectors differ, so each has an id of its own. The
    remark is about the photos that they were measured on.
    """
    rule = bundle.preprocessing
    exact = measure(data.test, rule, _finite_embedder(bundle), on_progress=on_progress)
    calibration = data.train or data.test
    chosen = np.random.default_rng(0).permutation(len(calibration))[:_CALIBRATION]
    written = []
    for precision in precisions:
        photos = DataLoader(MeasuredPhotos([calibration[place] for place in chosen], rule), batch_size=16)
        out = bundle.directory.with_name(f"{bundle.directory.name}-{precision}")
        with _new_bundle(out) as temporary:
            batches = (pixels.numpy() for pixels in photos)
            reduce_model(bundle.model_path, temporary / MODEL_FILE, precision, batches)
            details = bundle.card.model_dump(exclude={"id", "model_digest", "preprocessing", "schema_version"})
            details |= {"precision": precision, "fp32_metrics": exact}
            details["remark"] = " ".join(filter(None, (bundle.card.remark, remark)))
            write_card(temporary, preprocessing=rule, **details)
            reduced = Bundle.load(temporary)
            details["metrics"] = measure(data.test, rule, _finite_embedder(reduced), on_progress=on_progress)
            write_card(temporary, preprocessing=rule, **details)
        written.append(Bundle.load(out))
    return written


@contextlib.contextmanager
def _new_bundle(out: Path) -> Iterator[Path]:
    """Yields a folder to fill that replaces the bundle at `out` on success."""
    if out.exists() and not (out / CARD_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} exists and is not a bundle.", "Choose another folder with --out.")
    with atomic_directory(out) as temporary:
        yield temporary
        with (temporary / MODEL_FILE).open("rb+") as model:
            os.fsync(model.fileno())


def _write_onnx(model: EmbeddingModel, side: int, path: Path) -> None:
    """Writes the ONNX file; the exporter's prints and warnings are suppressed, its errors are exceptions."""
    example = torch.zeros((2, side, side, 3), dtype=torch.uint8)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.cpu().eval(),
            (example,),
            path,
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            input_names=["pixels"],
            output_names=["vectors"],
            external_data=False,
            verbose=False,
        )


def _finite_embedder(bundle: Bundle) -> Embed:
    """Returns the bundle's model as a function that refuses vectors which are not finite."""
    embedder = Embedder(bundle)

    def embed(pixels: torch.Tensor) -> NDArray[np.float32]:
        vectors = embedder.embed(pixels.numpy())
        if not np.isfinite(vectors).all():
            raise TrainingError(
                f"The model overflows at {bundle.card.precision}: a photo's vector is not finite.",
                "No bundle of this precision was written; leave it out of --precision.",
            )
        return vectors

    return embed


class _Samples(NamedTuple):
    """Images that the exported model is compared on, as pixels, with their names."""

    pixels: torch.Tensor
    names: Sequence[str]


def _load_samples(photos: Sequence[Photo], preprocessing: Preprocessing) -> _Samples:
    pixels = MeasuredPhotos(photos, preprocessing)
    return _Samples(torch.stack([pixels[place] for place in range(len(photos))]), [str(p.path) for p in photos])


def _generate_samples(side: int) -> _Samples:
    """Returns images of coloured squares, for a model that is exported before there are photos."""
    squares = np.random.default_rng(0).integers(0, 256, (8, side // 16 + 1, side // 16 + 1, 3), np.uint8)
    pixels = squares.repeat(16, axis=1).repeat(16, axis=2)[:, :side, :side]
    return _Samples(torch.from_numpy(np.ascontiguousarray(pixels)), [f"generated image {n}" for n in range(8)])


def _check_parity(model: EmbeddingModel, bundle: Bundle, samples: _Samples, min_cosine: float) -> None:
    batches = torch.split(samples.pixels, 16)
    expected, got = (
        np.concatenate([embed(batch) for batch in batches])
        for embed in (torch_embedder(model, torch.device("cpu")), _finite_embedder(bundle))
    )
    cosine = np.sum(expected * got, axis=1)
    if not cosine.min() >= min_cosine:
        raise TrainingError(
            f"The exported model differs from PyTorch: cosine {cosine.min():.6f} on "
            f"{samples.names[int(cosine.argmin())]}, at least {min_cosine} is required.",
            "No bundle was written; try the versions of constraints.txt.",
        )
