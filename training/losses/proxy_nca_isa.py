"""The adaptive weights of Proxy-ISA on Proxy-NCA, as in the supplement's comparison of over-fitting.

The paper gives no formula. As in its Eq. 12 a weight multiplies the pair's logit, and as in Eq. 13 the sum
is divided by the weights of the positives, so that with every weight 1 this is Proxy-NCA.
"""

from typing import ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from training.losses.hardness import HardnessSettings, Thresholds
from training.losses.sample_aware import Outcome, SampleAwareProxyLoss


class ProxyNCAISASettings(HardnessSettings):
    """The settings of the adaptive weights, and the scale of Proxy-NCA."""

    softmax_scale: float = Field(default=8.0, gt=0, description="multiplies the squared distances of unit vectors")


class ProxyNCAISALoss(SampleAwareProxyLoss):
    """Proxy-NCA on unit vectors, logits weighted by omega."""

    name: ClassVar[str] = "proxy_nca_isa"
    settings_model: ClassVar[type[HardnessSettings]] = ProxyNCAISASettings

    def weigh(self, embeddings: Tensor, labels: Tensor, at: Thresholds) -> Outcome:
        settings = cast(ProxyNCAISASettings, self.hardness.settings)
        inputs, proxies = normalize(embeddings), normalize(self.proxies)
        similarity = proxies @ inputs.T
        with torch.no_grad():
            own = (labels, torch.arange(len(labels), device=labels.device))
            positives = similarity[own]
            damped = (similarity < at.outlier[:, None]).to(similarity.dtype)
            damped[own] = 0
            weights = 1 + (self.hardness.negative_damping(at) - 1)[:, None] * damped
            weights[own] = self.hardness.positive_weights(positives, labels, at)
            inverse_norms = torch.linalg.vector_norm(self.proxies, dim=1, keepdim=True).reciprocal_()
        # The squared distance of unit vectors is 2 - 2S, and a softmax ignores the constant.
        logits = (2 * settings.softmax_scale) * weights * similarity
        loss = cross_entropy(logits.T, labels, reduction="sum") / weights[own].sum()
        return Outcome(loss, inputs.detach(), inverse_norms, positives, damped)
