"""The losses that Proxy-ISA is compared with, from pytorch-metric-learning, each with validated settings."""

from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from pytorch_metric_learning import distances, losses, miners
from torch import Tensor, nn

from training.losses.inputs import check_batch


class PeerLoss(nn.Module):
    """A loss of pytorch-metric-learning, and its miner if it has one, behind `loss(embeddings, labels)`.

    The library recasts a loss's weights in place to the type of the embeddings: one batch under autocast
    would leave them in half precision for good. Here the embeddings follow the weights instead.
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


class PeerSettings(BaseModel):
    """Named as in the library; its defaults unless a description says why not."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProxyAnchorSettings(PeerSettings):
    margin: float = Field(default=0.1, ge=0)
    alpha: float = Field(default=32.0, gt=0)


class ProxyNCASettings(PeerSettings):
    softmax_scale: float = Field(default=8.0, gt=0, description="sharpness over distances; the library has 1")


class SoftTripleSettings(PeerSettings):
    centers_per_class: int = Field(default=10, gt=0)
    la: float = Field(default=20.0, gt=0)
    gamma: float = Field(default=0.1, gt=0)
    margin: float = Field(default=0.01, ge=0)


class CosFaceSettings(PeerSettings):
    margin: float = Field(default=0.35, ge=0)
    scale: float = Field(default=64.0, gt=0)


class ArcFaceSettings(PeerSettings):
    margin: float = Field(default=28.6, ge=0, le=180, description="degrees")
    scale: float = Field(default=64.0, gt=0)


class NormalisedSoftmaxSettings(PeerSettings):
    temperature: float = Field(default=0.05, gt=0)


class MarginSettings(PeerSettings):
    margin: float = Field(default=0.2, ge=0)
    nu: float = Field(default=0.0, ge=0)
    beta: float = Field(default=1.2, gt=0)
    learn_beta: bool = True
    beta_per_class: bool = False
    distance_weighted: bool = Field(
        default=True, description="sample negatives by distance, as in the margin loss's paper"
    )


class MultiSimilaritySettings(PeerSettings):
    alpha: float = Field(default=2.0, gt=0)
    beta: float = Field(default=50.0, gt=0)
    base: float = 0.5


class MultiSimilarityMinerSettings(MultiSimilaritySettings):
    epsilon: float = Field(default=0.1, ge=0)


class TripletSettings(PeerSettings):
    margin: float = Field(default=0.05, ge=0)
    swap: bool = False
    smooth_loss: bool = False


class ContrastiveSettings(PeerSettings):
    pos_margin: float = Field(default=0.0, ge=0)
    neg_margin: float = Field(default=1.0, gt=0)


class NPairSettings(PeerSettings):
    normalise: bool = Field(default=False, description="the paper's dot products are of vectors of any length")


Builder = Callable[[int, int, Any], nn.Module]


def _with_class_weights(loss: Callable[..., nn.Module]) -> Builder:
    return lambda classes, size, s: PeerLoss(loss(classes, size, **s.model_dump()), classes, size)


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
    return PeerLoss(losses.NPairsLoss(distance=distance), classes, size)


PEERS: dict[str, tuple[type[PeerSettings], Builder]] = {
    "proxy_anchor": (ProxyAnchorSettings, _with_class_weights(losses.ProxyAnchorLoss)),
    "proxy_nca": (ProxyNCASettings, _with_class_weights(losses.ProxyNCALoss)),
    "soft_triple": (SoftTripleSettings, _with_class_weights(losses.SoftTripleLoss)),
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
