"""The losses that Proxy-ISA is compared with, from pytorch-metric-learning, each with validated settings."""

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field
from pytorch_metric_learning import distances, losses, miners, regularizers
from torch import Tensor, nn
from torch.nn.functional import normalize

from index._util.models import Frozen
from training.losses.base import draw_proxies
from training.losses.validation import check_batch


class PeerLoss(nn.Module):
    """A loss of pytorch-metric-learning, and its miner if it has one, behind `loss(embeddings, labels)`.

    The library recasts a loss's weights in place to the type of the embeddings: one batch under autocast
    would leave them in half precision permanently. Here the embeddings follow the weights instead.
    """

    def __init__(
        self, loss: nn.Module, num_classes: int, embedding_size: int, miner: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner
        self.num_classes, self.embedding_size = num_classes, embedding_size

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        labels = check_batch(embeddings, labels, self.num_classes, self.embedding_size)
        fallback = torch.promote_types(embeddings.dtype, torch.float32)
        dtype = next((parameter.dtype for parameter in self.loss.parameters()), fallback)
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = embeddings.to(dtype)
            mined = self.miner(embeddings, labels) if self.miner is not None else None
            loss: Tensor = self.loss(embeddings, labels, mined)
            return loss.reshape(())


class PeerSettings(Frozen):
    """Settings with the names of the library.

    MLRC in a description: tuned on CUB at batches of 256, for "A Metric Learning Reality Check" (Musgrave et al.,
    ECCV 2020; powerful-benchmarker, branch metric-learning, docs/papers/mlrc.md).
    """


class ProxyNCASettings(PeerSettings):
    softmax_scale: float = Field(
        default=9.0, gt=0, description="multiplies the squared distances; ProxyNCA++ (ECCV 2020): temperature 1/9"
    )


class SoftTripleSettings(PeerSettings):
    """The defaults are those of the authors' release, which trains with Adam's eps at 0.01."""

    centers_per_class: int = Field(default=10, gt=0, description="K")
    la: float = Field(default=20.0, gt=0, description="lambda, scale of the logits")
    gamma: float = Field(default=0.1, gt=0, description="temperature over the centres of a class")
    tau: float = Field(default=0.2, ge=0, description="weight of the regulariser that merges centres; 0 = off")
    margin: float = Field(default=0.01, ge=0, description="delta")


class CosFaceSettings(PeerSettings):
    margin: float = Field(default=0.4144, ge=0, description="MLRC")
    scale: float = Field(default=88.23, gt=0, description="MLRC")


class ArcFaceSettings(PeerSettings):
    margin: float = Field(default=23.14, ge=0, le=180, description="degrees; MLRC")
    scale: float = Field(default=78.86, gt=0, description="MLRC")


class NormalisedSoftmaxSettings(PeerSettings):
    temperature: float = Field(default=0.0707, gt=0, description="MLRC")


class MarginSettings(PeerSettings):
    margin: float = Field(default=0.0674, ge=0, description="MLRC")
    nu: float = Field(default=0.0, ge=0, description="weight of the regulariser of beta; the library's default")
    beta: float = Field(default=0.9762, gt=0, description="initial boundary; MLRC")
    learn_beta: bool = Field(default=True, description="as in MLRC, where its tuned rate was 1e-6: it hardly moved")
    beta_per_class: bool = False
    distance_weighted: bool = Field(
        default=True, description="sample negatives by distance, as in the margin loss's paper"
    )


class MultiSimilaritySettings(PeerSettings):
    alpha: float = Field(default=0.01, gt=0, description="MLRC, at the lower end of its search; the paper has 2")
    beta: float = Field(default=46.85, gt=0, description="MLRC; the paper has 50")
    base: float = Field(default=0.82, description="MLRC")


class MultiSimilarityMinerSettings(MultiSimilaritySettings):
    alpha: float = Field(default=11.63, gt=0, description="MLRC with the miner; the paper has 2")
    beta: float = Field(default=55.20, gt=0, description="MLRC with the miner; the paper has 50")
    base: float = Field(default=0.85, description="MLRC with the miner")
    epsilon: float = Field(default=0.42, ge=0, description="MLRC; the paper has 0.1")


class TripletSettings(PeerSettings):
    margin: float = Field(default=0.1368, ge=0, description="MLRC")
    swap: bool = False
    smooth_loss: bool = False


class ContrastiveSettings(PeerSettings):
    pos_margin: float = Field(default=0.2227, ge=0, description="MLRC")
    neg_margin: float = Field(default=0.7694, gt=0, description="MLRC")


class NPairSettings(PeerSettings):
    normalise: bool = Field(default=False, description="the paper's dot products are of vectors of any length")
    length_penalty: float = Field(
        default=0.001,
        ge=0,
        description="weight of the mean squared length; TensorFlow 1.15's npairs_loss has 0.25 x 0.002 for anchors and"
        " as much for positives",
    )


Builder = Callable[[int, int, Any], nn.Module]


def _proxy_nca(classes: int, size: int, s: ProxyNCASettings) -> nn.Module:
    def fill(proxies: Tensor) -> None:
        proxies.data.copy_(draw_proxies(classes, size))

    return PeerLoss(losses.ProxyNCALoss(classes, size, weight_init_func=fill, **s.model_dump()), classes, size)


def _with_class_weights(loss: Callable[..., nn.Module]) -> Builder:
    return lambda classes, size, s: PeerLoss(
        loss(classes, size, weight_init_func=_fill_columns(classes, size), **s.model_dump()), classes, size
    )


def _fill_columns(classes: int, size: int, per_class: int = 1) -> Callable[[Tensor], None]:
    """Returns the library's hook for the initial values of weights that hold one proxy per column."""

    def fill(weights: Tensor) -> None:
        weights.data.copy_(draw_proxies(classes, size, per_class).T)

    return fill


def _soft_triple(classes: int, size: int, s: SoftTripleSettings) -> nn.Module:
    each = s.centers_per_class
    loss = losses.SoftTripleLoss(
        classes,
        size,
        weight_init_func=_fill_columns(classes, size, each),
        weight_regularizer=CentreRegulariser(each) if s.tau and each > 1 else None,
        weight_reg_weight=s.tau,
        **s.model_dump(exclude={"tau"}),
    )
    return PeerLoss(loss, classes, size)


class CentreRegulariser(nn.Module):
    """SoftTriple's R / (C K (K - 1)): half the mean distance between two centres of a class, which merges centres.

    Equals the library's SparseCentersRegularizer, which compares all C K centres with each other and indexes the
    result with a mask of that size: 13 GB for 11,318 classes of 10 centres. The 1e-5 is the authors', for the
    gradient of centres that coincide.
    """

    def __init__(self, per_class: int) -> None:
        super().__init__()
        self.per_class = per_class

    def forward(self, centres: Tensor) -> Tensor:
        unit = normalize(centres).view(-1, self.per_class, centres.shape[1])
        rows, columns = torch.triu_indices(self.per_class, self.per_class, 1, device=centres.device)
        squared = 2 - 2 * (unit @ unit.mT)[:, rows, columns]
        return (squared + 1e-5).sqrt().mean() / 2


def _on_pairs(loss: Callable[..., nn.Module]) -> Builder:
    return lambda classes, size, s: PeerLoss(loss(**s.model_dump()), classes, size)


def _margin(classes: int, size: int, s: MarginSettings) -> nn.Module:
    own = s.model_dump(exclude={"beta_per_class", "distance_weighted"})
    loss = losses.MarginLoss(num_classes=classes if s.beta_per_class else None, **own)
    return PeerLoss(loss, classes, size, miners.DistanceWeightedMiner() if s.distance_weighted else None)


def _multi_similarity_miner(classes: int, size: int, s: MultiSimilarityMinerSettings) -> nn.Module:
    loss = losses.MultiSimilarityLoss(**s.model_dump(exclude={"epsilon"}))
    return PeerLoss(loss, classes, size, miners.MultiSimilarityMiner(epsilon=s.epsilon))


def _n_pair(classes: int, size: int, s: NPairSettings) -> nn.Module:
    distance = distances.DotProductSimilarity(normalize_embeddings=s.normalise)
    squared_length = regularizers.LpRegularizer(power=2)
    loss = losses.NPairsLoss(
        distance=distance, embedding_regularizer=squared_length, embedding_reg_weight=s.length_penalty
    )
    return PeerLoss(loss, classes, size)


PEERS: dict[str, tuple[type[PeerSettings], Builder]] = {
    "proxy_nca": (ProxyNCASettings, _proxy_nca),
    "soft_triple": (SoftTripleSettings, _soft_triple),
    "cosface": (CosFaceSettings, _with_class_weights(losses.CosFaceLoss)),
    "arcface": (ArcFaceSettings, _with_class_weights(losses.ArcFaceLoss)),
    "normalised_softmax": (NormalisedSoftmaxSettings, _with_class_weights(losses.NormalizedSoftmaxLoss)),
    "margin": (MarginSettings, _margin),
    "multi_similarity": (MultiSimilaritySettings, _on_pairs(losses.MultiSimilarityLoss)),
    "multi_similarity_miner": (MultiSimilarityMinerSettings, _multi_similarity_miner),
    "triplet": (TripletSettings, _on_pairs(losses.TripletMarginLoss)),
    "contrastive": (ContrastiveSettings, _on_pairs(losses.ContrastiveLoss)),
    "n_pair": (NPairSettings, _n_pair),
}

ON_PAIRS = frozenset({"margin", "multi_similarity", "multi_similarity_miner", "triplet", "contrastive", "n_pair"})
"""Losses without proxies: a batch must hold several photos of a class."""
