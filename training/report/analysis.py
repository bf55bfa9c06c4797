"""Computes everything that the page of a run shows; each photo is embedded once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.evaluation.metrics import mean_metrics, query_metrics
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.config import TrainingConfig
from training.data import DataSet, Photo
from training.errors import TrainingError
from training.evaluation import embed_photos, measuring_embedder, photo_protocol
from training.gpu_ranking import find_ranker
from training.report.learned import LearnedClasses, learned_classes, proxy_owners, read_proxies
from training.report.neighbors import SearchResults
from training.report.space import Similarity, class_similarity, map_to_plane, proxy_similarity, sample_photos
from training.setup import train_validation_split

Floats = NDArray[np.float32]
ReportProgress = Callable[[int, int, str], None]
"""Progress callback: (done, total, title)."""


@dataclass(frozen=True)
class PlaneMap:
    """Photos in the plane, and the proxies of their classes if the loss has any."""

    photos: Floats
    labels: list[str]
    proxies: Floats | None = None
    proxy_labels: Sequence[str] = ()


@dataclass(frozen=True)
class Proxies:
    """The proxies at the newest checkpoint: alone, and among the photos they were learned from."""

    similarity: Similarity
    classes: Sequence[str] | None = None
    """In the order of the loss; None when the given photos are not of the classes that the run learned."""
    among_photos: PlaneMap | None = None


@dataclass(frozen=True)
class RunAnalysis:
    """What the page of a run shows."""

    run: RunFolder
    config: TrainingConfig
    data: DataSet
    history: list[dict[str, Any]]
    validated: bool
    """Whether classes were held out to choose the epoch."""
    newest: int
    """The last finished epoch, whose proxies and loss state are shown."""
    chosen: dict[str, Any]
    """The record of the epoch whose model is kept."""
    dimension: int
    """Numbers in a vector of the kept model."""
    measured: dict[str, float]
    """The kept model's figures on the given photos."""
    results: SearchResults
    space: PlaneMap | None
    similarity: Similarity
    proxies: Proxies | None
    classes: LearnedClasses | None


def analyse_run(run: RunFolder, data: DataSet, on_progress: ReportProgress) -> RunAnalysis:
    """Embeds the test photos with the kept model, and training photos with the model that the proxies belong to."""
    config, model, checkpoint = run.config, run.model(), run.load_checkpoint()
    if checkpoint is None:
        raise TrainingError(
            f"{run.path} has no checkpoint; a study deletes those of finished runs.",
            "Run the study with --keep-checkpoints, or train the run again with `lookalike train`.",
        )
    progress, loss_state = checkpoint["progress"], checkpoint["work"]["loss"]
    labels = [photo.label for photo in data.test]
    vectors = _embed(model, config, data.test, "Embedding the test photos", on_progress)
    proxies = _proxies(run.model_of(checkpoint["work"]["model"]), config, data, loss_state, on_progress)
    shown = sample_photos(labels)
    on_progress(0, 1, "Mapping the space")
    plane = map_to_plane(vectors[shown])
    history = progress["history"]
    validated = any(name.startswith("validation.") for name in history[0])
    kept = progress["best_epoch" if validated else "epoch"]
    record = next(record for record in history if record["epoch"] == kept)
    return RunAnalysis(
        run=run,
        config=config,
        data=data,
        history=history,
        validated=validated,
        newest=progress["epoch"],
        # Only a finished run is certain to have measured it on the test classes.
        chosen=_figures(run.result()) if run.is_finished else record,
        dimension=vectors.shape[1],
        measured=mean_metrics(query_metrics(vectors, photo_protocol(data.test), ranker=find_ranker())),
        results=SearchResults(vectors, data.test),
        space=None if plane is None else PlaneMap(plane, [labels[place] for place in shown]),
        similarity=class_similarity(vectors, labels),
        proxies=proxies,
        classes=learned_classes(config, loss_state),
    )


def _figures(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of the kept epoch, without what else a result holds."""
    return {name: value for name, value in result.items() if isinstance(value, int | float) and name != "epochs"}


def _proxies(
    model: EmbeddingModel,
    config: TrainingConfig,
    data: DataSet,
    loss_state: dict[str, Any],
    on_progress: ReportProgress,
) -> Proxies | None:
    """Returns the loss's proxies, if it has any; `model` must be of the same checkpoint."""
    vectors = read_proxies(loss_state)
    if vectors is None:
        return None
    photos = train_validation_split(config, data)[0] if data.train else ()
    classes = sorted({photo.label for photo in photos})
    owners = proxy_owners(config, len(vectors), len(classes)) if classes else None
    if owners is None:
        return Proxies(proxy_similarity(vectors, [f"class {number}" for number in range(len(vectors))]))
    names = [classes[owner] for owner in owners]
    among_photos = _map_of_training(model, config, photos, vectors, names, on_progress)
    return Proxies(proxy_similarity(vectors, names), classes, among_photos)


def _map_of_training(
    model: EmbeddingModel,
    config: TrainingConfig,
    photos: Sequence[Photo],
    proxies: Floats,
    owners: Sequence[str],
    on_progress: ReportProgress,
) -> PlaneMap | None:
    sample = [photos[place] for place in sample_photos([photo.label for photo in photos])]
    labels = [photo.label for photo in sample]
    vectors = _embed(model, config, sample, "Embedding training photos", on_progress)
    sampled = set(labels)
    kept = [place for place, owner in enumerate(owners) if owner in sampled]
    on_progress(0, 1, "Mapping photos and proxies")
    plane = map_to_plane(np.concatenate([vectors, proxies[kept]]))
    if plane is None:
        return None
    return PlaneMap(plane[: len(sample)], labels, plane[len(sample) :], [owners[place] for place in kept])


def _embed(
    model: EmbeddingModel, config: TrainingConfig, photos: Sequence[Photo], title: str, on_progress: ReportProgress
) -> Floats:
    embed = measuring_embedder(model, config.preprocessing.input_size)
    vectors = embed_photos(photos, config.preprocessing, embed, lambda done, total: on_progress(done, total, title))
    if not np.isfinite(vectors).all():
        raise TrainingError(
            "The model's vectors are not finite: its training diverged.",
            "Train again with a lower optimiser.learning_rate; metrics.jsonl shows when it happened.",
        )
    return vectors
