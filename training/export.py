"""Export: a trained run as a bundle, refused unless ONNX Runtime repeats what PyTorch says."""

import contextlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from index.bundle import CARD_FILE, MODEL_FILE, Bundle, write_card
from index.embedder import Embedder
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.data.photos import Photo
from training.errors import TrainingError
from training.evaluate import embed_photos, torch_embedder

LOWEST_COSINE = 0.9999
"""Between a photo's vectors from PyTorch and from ONNX Runtime."""


def export_run(run: RunFolder, out: Path, photos: Sequence[Photo]) -> Bundle:
    """Writes the run's model as a bundle, after checking it on real photos; replaces an older bundle whole."""
    if out.exists() and not (out / CARD_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} exists and is not a bundle.", "Choose another folder with --out.")
    config, model = run.config, run.model()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_onnx(model, config.preprocessing.input_size, temporary / MODEL_FILE)
        write_card(
            temporary,
            preprocessing=config.preprocessing,
            dimension=config.backbone.embedding_size,
            backbone=config.backbone.name,
            loss=config.loss.name,
            loss_settings=config.loss.settings,
            data=run.data.partition(":")[0],
            metrics=_shares(run.result()),
            untrained_metrics=_shares(run.history()[0]),
            versions={name: version(name) for name in ("lookalike", "torch", "timm", "onnx", "onnxruntime")},
        )
        _check_parity(model, Bundle.load(temporary), photos)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Bundle.load(out)


def _shares(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name.startswith(("recall@", "map@"))}


def _write_onnx(model: EmbeddingModel, side: int, path: Path) -> None:
    """The exporter chats on every channel there is; its errors come as exceptions, the rest is of no use here."""
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


def _check_parity(model: EmbeddingModel, bundle: Bundle, photos: Sequence[Photo]) -> None:
    embedder = Embedder(bundle)
    expected = embed_photos(photos, bundle.preprocessing, torch_embedder(model, torch.device("cpu")))
    got = embed_photos(photos, bundle.preprocessing, lambda pixels: embedder.embed(pixels.numpy()))
    cosine = np.sum(expected * got, axis=1)
    if not cosine.min() >= LOWEST_COSINE:
        worst = photos[int(cosine.argmin())].path
        raise TrainingError(
            f"The exported model strays from PyTorch: cosine {cosine.min():.6f} on {worst}, "
            f"at least {LOWEST_COSINE} is required.",
            "No bundle was written; try the versions of constraints.txt.",
        )
