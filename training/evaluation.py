"""Measures a model on photos of classes that it was not trained on."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from index.embedding.bundle import CARD_FILE, Bundle
from index.embedding.embedder import Embedder
from index.embedding.images import Preprocessing
from index.evaluation.metrics import (
    KS,
    QueryMetrics,
    confidence_intervals,
    mean_metrics,
    metrics_from_results,
    query_metrics,
    unit_vectors,
)
from index.evaluation.ranking import RetrievalProtocol
from index.gallery.vectors.faiss import builder
from index.gallery.vectors.faiss import searcher as ann
from training.backbones import EmbeddingModel
from training.callbacks import Progress
from training.checkpoints import RunFolder
from training.data import Photo
from training.data.feature_cache import FeatureCache, FeatureStore
from training.data.torch_datasets import MeasuredPhotos, decoding_workers
from training.devices import check_device, choose_device, keep_freed_memory, set_precision
from training.distributed import ProcessGroup
from training.errors import TrainingError
from training.gpu_ranking import find_ranker

log = logging.getLogger(__name__)

Embed = Callable[[torch.Tensor], NDArray[np.float32]]

_QUERIES = 1024
"""Queries per search of the index."""
_FEW = 128
"""Photos up to which no worker process is started to decode them."""
_MAX_CACHED = 2 << 30
"""Bytes of activations that are cached."""
_CACHED_BATCH = 256
"""Cached activations per forward pass through the remaining layers."""
_MAX_NAMED = 3
"""Photos without a usable vector that an error names."""


def torch_embedder(
    module: Callable[[torch.Tensor], torch.Tensor], device: torch.device, half: torch.dtype | None = None
) -> Embed:
    """Wraps a PyTorch function of pixels to return arrays, computed in `half` precision if given."""
    if device.type == "cpu":
        keep_freed_memory()

    def embed(pixels: torch.Tensor) -> NDArray[np.float32]:
        with torch.inference_mode(), torch.autocast(device.type, half, enabled=half is not None):
            vectors: NDArray[np.float32] = module(pixels.to(device, non_blocking=True)).float().cpu().numpy()
        return vectors

    return embed


def measuring_embedder(model: nn.Module, side: int, device: torch.device | None = None) -> Embed:
    """Wraps a model for measuring, in 32 bits, on the best device whose vectors are those of the CPU."""
    device = device or choose_device()
    try:
        set_precision(device, cudnn_benchmark=False, tf32=False)
        check_device(model.to(device), side, device, None)
    except (TrainingError, RuntimeError) as error:
        log.warning("photos are embedded on the CPU: %s", error)
        device = torch.device("cpu")
    return torch_embedder(model.to(device).eval(), device)


def embed_photos(
    photos: Sequence[Photo],
    preprocessing: Preprocessing,
    embed: Embed,
    on_progress: Progress | None = None,
    *,
    workers: int | None = None,
) -> NDArray[np.float32]:
    """Returns the vectors of all photos in their order; worker processes decode while the model computes."""
    on_gpu = torch.cuda.is_available()
    workers = decoding_workers(workers, "cuda" if on_gpu else "cpu")
    # Starting a process costs more than decoding a few photos.
    workers = workers if len(photos) > _FEW else 0
    loader = DataLoader(MeasuredPhotos(photos, preprocessing), batch_size=64, num_workers=workers, pin_memory=on_gpu)
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
    """Returns Recall@K and MAP@R of the query photos against the gallery, by default each against all others."""
    return _score(embed_photos(photos, preprocessing, embed, on_progress), photos, ks)


def _score(vectors: NDArray[np.float32], photos: Sequence[Photo], ks: Sequence[int]) -> dict[str, float]:
    """Returns the figures that are kept in a run's records."""
    check_vectors(vectors, photos)
    figures = mean_metrics(query_metrics(vectors, photo_protocol(photos), ks, ranker=find_ranker()))
    return {name: value for name, value in figures.items() if "@" in name}


def check_vectors(vectors: NDArray[np.float32], photos: Sequence[Photo]) -> None:
    """Raises an error that names the photos whose vectors are zero or not finite."""
    lengths = np.linalg.norm(vectors, axis=1)
    invalid = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if not len(invalid):
        return
    named = ", ".join(f"{photos[place].path} (class {photos[place].label})" for place in invalid[:_MAX_NAMED])
    more = f" and {len(invalid) - _MAX_NAMED:,} more" if len(invalid) > _MAX_NAMED else ""
    raise TrainingError(
        f"{len(invalid):,} of {len(photos):,} vectors are zero or not finite: {named}{more}.",
        "Look at these photos; leave them out, or use a larger preprocessing.input_size or another model.",
    )


def photo_protocol(photos: Sequence[Photo]) -> RetrievalProtocol:
    """Returns the queries, the gallery and the correct results among test photos."""
    return RetrievalProtocol.from_labels(
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
    """Returns all figures with counts, optionally with bootstrap intervals and with figures through the index."""
    check_vectors(vectors, photos)
    protocol = photo_protocol(photos)
    figures = query_metrics(vectors, protocol, ks, ranker=find_ranker())
    report: dict[str, Any] = {
        "queries": len(protocol.queries),
        "queries_without_answer": protocol.unanswerable,
        "gallery": len(protocol.gallery),
        "figures": mean_metrics(figures),
    }
    if rounds:
        report["intervals"] = confidence_intervals(figures, rounds)
    if through_index:
        report["index"] = mean_metrics(index_metrics(vectors, protocol, ks))
    return report


def index_metrics(vectors: NDArray[np.float32], protocol: RetrievalProtocol, ks: Sequence[int] = KS) -> QueryMetrics:
    """Returns the figures of the queries through the search index that the service uses."""
    unit = unit_vectors(vectors)
    depth = min(len(protocol.gallery), max(*ks, int(protocol.relevant.max())) + 1)
    built = builder.build(unit[protocol.gallery].astype(np.float16))
    searcher, found = ann.Searcher(built.index, built.plan), protocol.gallery[built.order]
    parts = []
    for start in range(0, len(protocol.queries), _QUERIES):
        chosen = slice(start, start + _QUERIES)
        part = replace(protocol, queries=protocol.queries[chosen], relevant=protocol.relevant[chosen])
        _, nearest = searcher.search(unit[part.queries], depth)
        parts.append(metrics_from_results(np.where(nearest < 0, -1, found[nearest]), part, ks))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect the figures."""
    return {name: version(name) for name in ("lookalike", "numpy", "torch", "timm", "onnxruntime", "pillow")}


@dataclass
class Evaluator:
    """Measures a model repeatedly; every process of a run embeds its part of the photos.

    The activations of frozen stages are computed once and cached on disk, unless they are too large.
    """

    photos: Sequence[Photo]
    preprocessing: Preprocessing
    world: ProcessGroup
    _: KW_ONLY
    half: torch.dtype | None = None
    workers: int | None = None
    store: FeatureStore | None = None
    """The cache of the first stages, if these never change."""
    frozen: int | None = None
    """The number of stages in the cache; None means the whole backbone."""
    on_progress: Progress | None = None

    def __post_init__(self) -> None:
        self._own = self.photos[self.world.rank :: self.world.size]
        self._cache: FeatureCache | None = None

    def measure(self, model: EmbeddingModel, *, untrained: bool = False) -> dict[str, float]:
        """Returns the model's figures, on the first process only; `untrained` measures the backbone's own features."""
        vectors = self.embed(model, untrained=untrained)
        return {} if vectors is None else _score(vectors, self.photos, KS)

    def embed(self, model: EmbeddingModel, *, untrained: bool = False) -> NDArray[np.float32] | None:
        """Returns the vectors of all photos, on the first process only."""
        model.eval()
        own = self._embed(model, untrained) if self._own else None
        parts = self.world.gather(own)
        if not self.world.is_main:
            return None
        embedded = [part for part in parts if part is not None]
        vectors = np.empty((len(self.photos), embedded[0].shape[1]), np.float32)
        for rank, part in enumerate(embedded):
            vectors[rank :: self.world.size] = part
        return vectors

    def _embed(self, model: EmbeddingModel, untrained: bool) -> NDArray[np.float32]:
        if self.store is None or not self._fits(self.store):
            return self._embed_with(model.features if untrained else model)
        if self._cache is None:
            self._cache = self.store.cache_measured(self._own, self.preprocessing, self.on_progress)
        table, places = self._cache.table, self._cache.places[0]
        features = nn.Identity() if self.frozen is None else partial(model.features_from, stage=self.frozen)

        def rest(activations: torch.Tensor) -> torch.Tensor:
            return features(activations) if untrained else model.from_features(features(activations))

        embed = torch_embedder(rest, self.world.device, self.half)
        parts = [places[start : start + _CACHED_BATCH] for start in range(0, len(places), _CACHED_BATCH)]
        return np.concatenate([embed(torch.from_numpy(np.asarray(table[part]))) for part in parts])

    def _fits(self, store: FeatureStore) -> bool:
        side = self.preprocessing.input_size
        blank = torch.zeros((1, side, side, 3), dtype=torch.uint8, device=self.world.device)
        with torch.inference_mode():
            return 4 * store.embed(blank).numel() * len(self._own) <= _MAX_CACHED

    def _embed_with(self, module: Callable[[torch.Tensor], torch.Tensor]) -> NDArray[np.float32]:
        embed = torch_embedder(module, self.world.device, self.half)
        return embed_photos(self._own, self.preprocessing, embed, self.on_progress, workers=self.workers)


def is_bundle(path: Path) -> bool:
    """Returns whether a model's path is an exported bundle, not a training run or a file of one."""
    return (path / CARD_FILE).is_file()


def load_model(path: Path, device: str = "auto") -> tuple[Preprocessing, Embed]:
    """Loads an exported bundle, a training run, or a checkpoint file in a run's folder."""
    if is_bundle(path):
        bundle = Bundle.load(path)
        embedder = Embedder(bundle)
        return bundle.preprocessing, lambda pixels: embedder.embed(pixels.numpy())
    file = path if path.is_file() else None
    run = RunFolder(path.parent if file else path)
    rule = run.config.preprocessing
    return rule, measuring_embedder(run.model(file), rule.input_size, choose_device(device))
