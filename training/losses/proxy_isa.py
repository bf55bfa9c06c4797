"""Proxy-ISA: Proxy-Anchor whose pairs are weighted by how informative they are to their class.

Equation numbers are those of "Informative Sample-Aware Proxy for Deep Metric Learning" (MMAsia 2022);
docs/loss.md holds the formula, the decisions where the paper is silent, and the cost.
"""

from typing import ClassVar, cast

from pydantic import Field
from torch import Tensor

from training.losses.class_state import HardnessSettings
from training.losses.closed_form import Damping, Evaluation, Pairs, add_terms, attract, repel
from training.losses.sample_aware import SampleAwareProxyLoss


class ProxyISASettings(HardnessSettings):
    """Every hyper-parameter of Proxy-ISA."""

    alpha: float = Field(default=32.0, gt=0, description="scale of Proxy-Anchor")
    delta: float = Field(default=0.1, ge=0, description="margin of Proxy-Anchor")


class ProxyISALoss(SampleAwareProxyLoss):
    """`ProxyISALoss(num_classes, embedding_size, settings)`, or `ProxyISASettings` as keyword arguments.

    `loss(embeddings, labels)` is Eq. 13: a pair's weight multiplies its exponent.
    """

    name: ClassVar[str] = "proxy_isa"
    settings_model: ClassVar[type[HardnessSettings]] = ProxyISASettings
    weights_in_exponent: ClassVar[bool] = True

    def weigh(self, pairs: Pairs, positive_weights: Tensor, damping: Damping) -> Evaluation:
        s, inside = cast(ProxyISASettings, self.hardness.settings), self.weights_in_exponent
        attraction = attract(pairs, s.alpha, s.delta, positive_weights, in_exponent=inside)
        return add_terms(pairs, attraction, repel(pairs, s.alpha, s.delta, damping, in_exponent=inside))


class ProxyISAGradientLoss(ProxyISALoss):
    """Proxy-ISA with true gradient weights: they multiply Proxy-Anchor's dL/dS and leave its exponents alone.

    As in Eq. 13 each term is divided by the sum of its classes' mean weights. The value is Proxy-Anchor's class terms,
    averaged by those mean weights. Its derivative is the gradient where the weights of a class agree; where they
    differ, no function has that gradient.
    """

    name: ClassVar[str] = "proxy_isa_gradient"
    weights_in_exponent: ClassVar[bool] = False
