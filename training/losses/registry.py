"""The registry of losses by name."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from torch import nn

from training.errors import TrainingError
from training.losses.baselines import ON_PAIRS, PEERS, Builder
from training.losses.proxy_anchor import ProxyAnchorLoss, ProxyAnchorSettings
from training.losses.proxy_gml import ProxyGMLLoss, ProxyGMLSettings
from training.losses.proxy_isa import ProxyISAGradientLoss, ProxyISALoss, ProxyISASettings
from training.losses.proxy_nca_isa import ProxyNCAISALoss, ProxyNCAISASettings
from training.losses.validation import parse_settings

_LOSSES: dict[str, tuple[type[BaseModel], Builder]] = {
    "proxy_isa": (ProxyISASettings, ProxyISALoss),
    "proxy_isa_gradient": (ProxyISASettings, ProxyISAGradientLoss),
    "proxy_anchor": (ProxyAnchorSettings, ProxyAnchorLoss),
    "proxy_nca_isa": (ProxyNCAISASettings, ProxyNCAISALoss),
    "proxy_gml": (ProxyGMLSettings, ProxyGMLLoss),
    **PEERS,
}


def loss_names() -> list[str]:
    """Returns every name that `make_loss` accepts."""
    return list(_LOSSES)


def learns_from_pairs(name: str) -> bool:
    """Returns whether loss `name` compares the embeddings of a batch with each other and so needs several per class."""
    _entry(name)
    return name in ON_PAIRS


def setting_names(name: str) -> list[str]:
    """Returns every setting of loss `name`."""
    return list(_entry(name)[0].model_fields)


def parse_loss_settings(name: str, settings: Mapping[str, Any]) -> BaseModel:
    """Validates the settings of loss `name`."""
    return parse_settings(_entry(name)[0], name, None, settings)


def make_loss(name: str, num_classes: int, embedding_size: int, settings: Mapping[str, Any]) -> nn.Module:
    """Makes the loss `name`, called as `loss(embeddings, labels)`; its learnable parts are its `parameters()`."""
    model, build = _entry(name)
    return build(num_classes, embedding_size, parse_settings(model, name, None, settings))


def _entry(name: str) -> tuple[type[BaseModel], Builder]:
    if name not in _LOSSES:
        raise TrainingError(f"No loss is called {name!r}.", f"Known losses: {', '.join(_LOSSES)}.")
    return _LOSSES[name]
