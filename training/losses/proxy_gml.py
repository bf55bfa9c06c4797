"""ProxyGML, from "Fewer is More: A Deep Graph Metric Learning Perspective Using Fewer Proxies" (NeurIPS 2020)."""

import math

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from index._util.models import Frozen
from training.errors import TrainingError
from training.losses.base import draw_proxies
from training.losses.validation import check_batch


class ProxyGMLSettings(Frozen):
    """The defaults are the authors' for CUB and Cars; for thousands of classes they use 1, 0.05 and 0.

    They train with Adam's eps at 0.01 (`optimiser.eps`).
    """

    proxies_per_class: int = Field(default=12, gt=0, description="N")
    subgraph_share: float = Field(default=0.05, gt=0, le=1, description="r, the share of all proxies near a sample")
    proxy_regularisation: float = Field(default=0.3, ge=0, description="lambda, weight of classifying the proxies")


class ProxyGMLLoss(nn.Module):
    """Classifies each sample by the proxies of its subgraph, and each proxy by all proxies.

    A sample's subgraph holds all proxies of its class and the nearest others, K = ceil(r C N) together.
    The score of a class is the sum of similarities to its proxies in the subgraph (reverse label
    propagation); classes that are not in the subgraph take no part in the softmax.
    """

    def __init__(self, num_classes: int, embedding_size: int, settings: ProxyGMLSettings) -> None:
        super().__init__()
        self.settings, self.num_classes = settings, num_classes
        self.subgraph_size = math.ceil(settings.subgraph_share * num_classes * settings.proxies_per_class)
        if self.subgraph_size <= settings.proxies_per_class:
            raise TrainingError(
                f"With {num_classes} classes a ProxyGML subgraph of share {settings.subgraph_share:g} holds no proxy"
                " of another class, so nothing can be learned.",
                f"Set subgraph_share above {1 / num_classes:.3g}.",
            )
        self.proxies = nn.Parameter(draw_proxies(num_classes, embedding_size, settings.proxies_per_class))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        labels = check_batch(embeddings, labels, self.num_classes, self.proxies.shape[1])
        with torch.autocast(embeddings.device.type, enabled=False):
            inputs, proxies = normalize(embeddings.to(self.proxies.dtype)), normalize(self.proxies)
            by_class = (len(labels), self.num_classes, self.settings.proxies_per_class)
            similarity = (inputs @ proxies.T).view(by_class)
            subgraph = self._subgraph(similarity.detach(), labels)
            scores = (similarity * subgraph).sum(2)
            scores = scores.masked_fill(~subgraph.any(2), -torch.inf)
            return cross_entropy(scores, labels) + self._regularisation(proxies)

    def _subgraph(self, similarity: Tensor, labels: Tensor) -> Tensor:
        own = (torch.arange(len(labels), device=labels.device), labels)
        ranked = similarity.clone()
        ranked[own] = torch.inf
        ranked = ranked.flatten(1)
        nearest = ranked.topk(self.subgraph_size, dim=1).indices
        return torch.zeros_like(ranked, dtype=torch.bool).scatter_(1, nearest, True).view_as(similarity)

    def _regularisation(self, proxies: Tensor) -> Tensor:
        if self.settings.proxy_regularisation == 0:
            return proxies.new_zeros(())
        # Summing similarities over the proxies of a class is one product with the class's summed proxies.
        classes = proxies.view(self.num_classes, self.settings.proxies_per_class, -1).sum(1)
        own = torch.arange(self.num_classes, device=proxies.device)
        labels = own.repeat_interleave(self.settings.proxies_per_class)
        return self.settings.proxy_regularisation * cross_entropy(proxies @ classes.T, labels)
