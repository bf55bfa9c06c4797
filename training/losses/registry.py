"""Losses by name: what a configuration file may ask for."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from torch import nn

from training.errors import TrainingError
from training.losses import peers
from training.losses.inputs import parse_settings
from training.losses.proxy_gml import ProxyGMLLoss, ProxyGMLSettings
from training.losses.proxy_isa import ProxyISALoss, ProxyISASettings
from training.losses.proxy_nca_isa import ProxyNCAISALoss, ProxyNCAISASettings

_LOSSES: dict[str, tuple[type[BaseModel], Callable[[int, int, Any], nn.Module]]] = {
    "proxy_isa": (ProxyISASettings, ProxyISALoss),
    "proxy_anchor": (peers.ProxyAnchorSettings, peers.proxy_anchor),
    "proxy_nca": (peers.ProxyNCASettings, peers.proxy_nca),
    "proxy_nca_isa": (ProxyNCAISASettings, ProxyNCAISALoss),
    "soft_triple": (peers.SoftTripleSettings, peers.soft_triple),
    "proxy_gml": (ProxyGMLSettings, ProxyGMLLoss),
    "cosface": (peers.CosFaceSettings, peers.cosface),
    "arcface": (peers.ArcFaceSettings, peers.arcface),
    "normalised_softmax": (peers.NormalisedSoftmaxSettings, peers.normalised_softmax),
    "margin": (peers.MarginSettings, peers.margin),
    "multi_similarity": (peers.MultiSimilaritySettings, peers.multi_similarity),
    "multi_similarity_miner": (peers.MultiSimilarityMinerSettings, peers.multi_similarity_miner),
    "triplet": (peers.TripletSettings, peers.triplet),
    "contrastive": (peers.ContrastiveSettings, peers.contrastive),
    "n_pair": (peers.NPairSettings, peers.n_pair),
}


def loss_names() -> list[str]:
    """Every name that `make_loss` accepts."""
    return list(_LOSSES)


def setting_names(name: str) -> list[str]:
    """Every setting of loss `name`."""
    return list(_entry(name)[0].model_fields)


def make_loss(name: str, num_classes: int, embedding_size: int, settings: Mapping[str, Any]) -> nn.Module:
    """The loss `name`, called as `loss(embeddings, labels)`; its learnable parts are its `parameters()`."""
    model, build = _entry(name)
    return build(num_classes, embedding_size, parse_settings(model, name, None, settings))


def _entry(name: str) -> tuple[type[BaseModel], Callable[[int, int, Any], nn.Module]]:
    if name not in _LOSSES:
        raise TrainingError(f"No loss is called {name!r}.", f"Known losses: {', '.join(_LOSSES)}.")
    return _LOSSES[name]
