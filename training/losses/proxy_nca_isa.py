"""The adaptive weights of Proxy-ISA on Proxy-NCA, as in the supplement's comparison of over-fitting.

The paper gives no formula. As in its Eq. 12 a weight multiplies the pair's logit, and as in Eq. 13 the sum
is divided by the weights of the positives, so that with every weight 1 this is Proxy-NCA.
"""

from typing import ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor

from training.losses.class_state import HardnessSettings
from training.losses.closed_form import Damping, Evaluation, Pairs
from training.losses.sample_aware import SampleAwareProxyLoss


class ProxyNCAISASettings(HardnessSettings):
    """The settings of the adaptive weights, and the scale of Proxy-NCA."""

    softmax_scale: float = Field(
        default=9.0, gt=0, description="multiplies the squared distances of unit vectors; as in proxy_nca"
    )


class ProxyNCAISALoss(SampleAwareProxyLoss):
    """Proxy-NCA on unit vectors, logits weighted by omega."""

    name: ClassVar[str] = "proxy_nca_isa"
    settings_model: ClassVar[type[HardnessSettings]] = ProxyNCAISASettings

    def weigh(self, pairs: Pairs, positive_weights: Tensor, damping: Damping) -> Evaluation:
        # The squared distance of unit vectors is 2 - 2S, and a softmax ignores the constant.
        sharpness = 2 * cast(ProxyNCAISASettings, self.hardness.settings).softmax_scale
        scale = (damping.where * ((damping.factor - 1) * sharpness)[:, None]).add_(sharpness)
        scale.view(-1).index_copy_(0, pairs.own, positive_weights * sharpness)
        log_shares = torch.log_softmax(pairs.similarity * scale, dim=0)
        divisor = positive_weights.sum()
        value = -log_shares.view(-1)[pairs.own].sum() / divisor
        slopes = log_shares.exp_()
        slopes.view(-1).index_add_(0, pairs.own, torch.ones_like(positive_weights), alpha=-1)
        return Evaluation(value, slopes.mul_(scale).mul_(1 / divisor))
