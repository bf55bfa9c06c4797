"""Measuring a model on photos of classes that it never learned."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from index import ann, building
from index.bundle import CARD_FILE, Bundle
from index.embedder import Embedder
from index.images import Preprocessing
from index.metrics import KS, Figures, intervals, listed_metrics, means, query_metrics, unit_vectors
from index.ranking import Protocol
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.data.loading import MeasuredPhotos
from training.data.photos import Photo
from training.devices import choose_device, keep_freed_memory

Progress = Callable[[int, int], None]
Embed = Callable[[torch.Tensor], NDArray[np.float32]]

_QUERIES = 1024
"""Searched in the index at a time."""


def torch_embedder(module: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Embed:
    """A PyTorch function of pixels as a function to arrays."""
    if device.type == "cpu":
        keep_freed_memory()

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
    ks: Sequence[int] = KS,
    on_progress: Progress | None = None,
) -> dict[str, float]:
    """Recall@K and MAP@R of the query photos against the gallery photos, by default each against all the others."""
    return _scored(embed_photos(photos, preprocessing, embed, on_progress), photos, ks)


def _scored(vectors: NDArray[np.float32], photos: Sequence[Photo], ks: Sequence[int]) -> dict[str, float]:
    """The figures that a run's records keep."""
    figures = means(query_metrics(vectors, photo_protocol(photos), ks))
    return {name: value for name, value in figures.items() if "@" in name}


def photo_protocol(photos: Sequence[Photo]) -> Protocol:
    """Who searches for what among photos to measure on."""
    return Protocol.of(
        (photo.label for photo in photos),
        [photo.is_query for photo in photos],
        [photo.is_gallery for photo in photos],
    )


def full_report(
    vectors: NDArray[np.float32],
    photos: Sequence[Photo],
    ks: Sequence[int] = KS,
    *,
    rounds: int = 0,
    through_index: bool = False,
) -> dict[str, Any]:
    """All figures with the counts behind them; on wish with intervals from so many bootstrap rounds, and as served."""
    protocol = photo_protocol(photos)
    figures = query_metrics(vectors, protocol, ks)
    report: dict[str, Any] = {
        "queries": len(protocol.queries),
        "queries_without_answer": protocol.unanswerable,
        "gallery": len(protocol.gallery),
        "figures": means(figures),
    }
    if rounds:
        report["intervals"] = intervals(figures, rounds)
    if through_index:
        report["index"] = means(index_metrics(vectors, protocol, ks))
    return report


def index_metrics(vectors: NDArray[np.float32], protocol: Protocol, ks: Sequence[int] = KS) -> Figures:
    """The figures of the queries through a generation of the gallery's vectors: what the service would answer."""
    unit = unit_vectors(vectors)
    depth = min(len(protocol.gallery), max(*ks, int(protocol.relevant.max())) + 1)
    built = building.build(unit[protocol.gallery].astype(np.float16))
    searcher, found = ann.Searcher(built.index, built.plan), protocol.gallery[built.order]
    parts = []
    for start in range(0, len(protocol.queries), _QUERIES):
        chosen = slice(start, start + _QUERIES)
        part = replace(protocol, queries=protocol.queries[chosen], relevant=protocol.relevant[chosen])
        _, nearest = searcher.search(unit[part.queries], depth)
        parts.append(listed_metrics(np.where(nearest < 0, -1, found[nearest]), part, ks))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def versions() -> dict[str, str]:
    """Of the packages that decide the figures."""
    return {name: version(name) for name in ("lookalike", "numpy", "torch", "timm", "onnxruntime", "pillow")}


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
        return _scored(vectors, self._photos, KS)


def is_bundle(path: Path) -> bool:
    """Whether a model's path is an exported bundle, not a training run or a file of one."""
    return (path / CARD_FILE).is_file()


def load_model(path: Path, device: str = "auto") -> tuple[Preprocessing, Embed]:
    """An exported bundle, a training run, or a checkpoint file in a run's folder."""
    if is_bundle(path):
        bundle = Bundle.load(path)
        embedder = Embedder(bundle)
        return bundle.preprocessing, lambda pixels: embedder.embed(pixels.numpy())
    file = path if path.is_file() else None
    run = RunFolder(path.parent if file else path)
    place = choose_device(device)
    return run.config.preprocessing, torch_embedder(run.model(file).to(place), place)
