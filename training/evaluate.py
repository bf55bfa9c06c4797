"""Measuring a model on photos of classes that it never learned."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from index.bundle import Bundle
from index.embedder import Embedder
from index.images import Preprocessing
from index.metrics import retrieval_metrics
from training.checkpoints import RunFolder
from training.data.loading import MeasuredPhotos
from training.data.photos import Photo
from training.devices import choose_device

Progress = Callable[[int, int], None]
Embed = Callable[[torch.Tensor], NDArray[np.float32]]


def torch_embedder(module: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Embed:
    """A PyTorch function of pixels as a function to arrays."""

    def embed(pixels: torch.Tensor) -> NDArray[np.float32]:
        with torch.inference_mode():
            vectors: NDArray[np.float32] = module(pixels.to(device)).float().cpu().numpy()
        return vectors

    return embed


def embed_photos(
    photos: Sequence[Photo], preprocessing: Preprocessing, embed: Embed, on_progress: Progress | None = None
) -> NDArray[np.float32]:
    """Vectors of all photos, in their order."""
    loader = DataLoader(MeasuredPhotos(photos, preprocessing), batch_size=64)
    vectors = []
    for pixels in loader:
        vectors.append(embed(pixels))
        if on_progress:
            on_progress(sum(map(len, vectors)), len(photos))
    return np.concatenate(vectors)


def measure(
    photos: Sequence[Photo],
    preprocessing: Preprocessing,
    embed: Embed,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    on_progress: Progress | None = None,
) -> dict[str, float]:
    """Recall@K and MAP@R of photos against one another."""
    vectors = embed_photos(photos, preprocessing, embed, on_progress)
    return retrieval_metrics(vectors, [photo.label for photo in photos], ks)


def load_model(path: Path, device: str = "auto") -> tuple[Preprocessing, Embed]:
    """A training run or an exported bundle, told apart by what the folder holds."""
    if (path / "bundle.json").is_file():
        bundle = Bundle.load(path)
        embedder = Embedder(bundle)
        return bundle.preprocessing, lambda pixels: embedder.embed(pixels.numpy())
    run = RunFolder(path)
    place = choose_device(device)
    return run.config.preprocessing, torch_embedder(run.model().to(place), place)
