"""Proxy-Anchor, from "Proxy Anchor Loss for Deep Metric Learning" (CVPR 2020), with controls for its positive term.

Proxy-ISA's weights shift the balance towards attraction and soften its temperature. The controls do only that, so that
a comparison can separate it from the weights' dependence on the sample.
"""

from typing import Any

import torch
from pydantic import Field

from index._util.models import Frozen
from training.losses.base import ProxyLoss
from training.losses.closed_form import Evaluation, Pairs, add_terms, attract, repel
from training.losses.validation import parse_settings


class ProxyAnchorSettings(Frozen):
    """Every hyper-parameter of Proxy-Anchor; the defaults are the paper's."""

    margin: float = Field(default=0.1, ge=0, description="delta")
    alpha: float = Field(default=32.0, gt=0)
    positive_scale: float = Field(default=1.0, gt=0, description="control: multiplies the positive term")
    positive_alpha: float | None = Field(
        default=None, gt=0, description="control: alpha of the positive term; by default alpha"
    )


class ProxyAnchorLoss(ProxyLoss):
    """`ProxyAnchorLoss(num_classes, embedding_size, settings)`, or `ProxyAnchorSettings` as keyword arguments."""

    def __init__(
        self, num_classes: int, embedding_size: int, settings: ProxyAnchorSettings | None = None, **changes: Any
    ) -> None:
        self.settings = parse_settings(ProxyAnchorSettings, "proxy_anchor", settings, changes)
        super().__init__(num_classes, embedding_size)

    def evaluate(self, pairs: Pairs) -> Evaluation:
        s = self.settings
        attraction = attract(pairs, s.positive_alpha or s.alpha, s.margin, torch.ones_like(pairs.positives))
        scaled = Evaluation(attraction.value * s.positive_scale, attraction.slopes * s.positive_scale)
        return add_terms(pairs, scaled, repel(pairs, s.alpha, s.margin))
