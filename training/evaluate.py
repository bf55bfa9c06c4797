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
from training.backbones import EmbeddingModel
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
    """Recall@K and MAP@R of the query photos against the gallery photos, by default each against all the others."""
    return _scored(embed_photos(photos, preprocessing, embed, on_progress), photos, ks)


def _scored(vectors: NDArray[np.float32], photos: Sequence[Photo], ks: Sequence[int]) -> dict[str, float]:
    return retrieval_metrics(
        vectors,
        [photo.label for photo in photos],
        ks,
        is_query=[photo.is_query for photo in photos],
        is_gallery=[photo.is_gallery for photo in photos],
    )


class Examiner:
    """Measures a model in training again and again; behind a frozen backbone it embeds the photos only once."""

    def __init__(
        self, photos: Sequence[Photo], preprocessing: Preprocessing, device: torch.device, *, frozen_backbone: bool
    ) -> None:
        self._photos = photos
        self._preprocessing = preprocessing
        self._device = device
        self._frozen = frozen_backbone
        self._features: NDArray[np.float32] | None = None

    def measure(self, model: EmbeddingModel, *, untrained: bool = False) -> dict[str, float]:
        """Figures of the model as it is; `untrained` measures the pretrained backbone's own features."""
        model.eval()
        if not self._frozen:
            embed = torch_embedder(model.features if untrained else model, self._device)
            return measure(self._photos, self._preprocessing, embed)
        if self._features is None:
            embed = torch_embedder(model.features, self._device)
            self._features = embed_photos(self._photos, self._preprocessing, embed)
        head = torch_embedder(model.from_features, self._device)
        vectors = self._features if untrained else head(torch.from_numpy(self._features))
        return _scored(vectors, self._photos, (1, 2, 4, 8))


def load_model(path: Path, device: str = "auto") -> tuple[Preprocessing, Embed]:
    """A training run or an exported bundle, told apart by what the folder holds."""
    if (path / "bundle.json").is_file():
        bundle = Bundle.load(path)
        embedder = Embedder(bundle)
        return bundle.preprocessing, lambda pixels: embedder.embed(pixels.numpy())
    run = RunFolder(path)
    place = choose_device(device)
    return run.config.preprocessing, torch_embedder(run.model().to(place), place)
