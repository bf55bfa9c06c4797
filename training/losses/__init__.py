"""Metric-learning losses: Proxy-ISA and its peers; `training.losses.registry` makes them by name."""

from training.losses.proxy_anchor import ProxyAnchorLoss, ProxyAnchorSettings
from training.losses.proxy_isa import ProxyISAGradientLoss, ProxyISALoss, ProxyISASettings

__all__ = ["ProxyAnchorLoss", "ProxyAnchorSettings", "ProxyISAGradientLoss", "ProxyISALoss", "ProxyISASettings"]
