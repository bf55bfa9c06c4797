"""Proxy-ISA written again, pair by pair in plain loops, straight from the paper: what the fast one must equal."""

import math
from collections import deque

import torch
from torch import Tensor

from training.losses.proxy_isa import ProxyISASettings


class SlowProxyISA:
    """Float64 loops over classes and samples; the queue is a Python deque that is scanned."""

    def __init__(self, proxies: Tensor, settings: ProxyISASettings) -> None:
        self.proxies = proxies.detach().double().clone().requires_grad_(True)
        self.settings, self.step = settings, 0
        self.n = [0] * len(proxies)
        self.learned = [settings.initial_similarity] * len(proxies)
        self.queue: deque[tuple[int, Tensor]] = deque()

    def effective(self, c: int) -> float:
        beta = (self.settings.volume - 1) / self.settings.volume
        return float((1 - beta ** self.n[c]) / (1 - beta))

    def nu(self, c: int) -> float:
        return 1 / (1 + math.log(1 + self.effective(c)))

    def outlier(self, c: int) -> float:
        s = self.settings
        eta = (1 + s.hardness_sensitivity * (1 - self.learned[c])) * self.nu(c) + s.search_margin
        return self.learned[c] - eta

    def positive_weight(self, similarity: float, c: int) -> float:
        s = self.settings
        if self.step < s.first_filter_step or s.positive_penalty == "none":
            return 1.0
        sigma = 1 + (1 + math.exp(-s.tau)) * (self.nu(c) - 1) / (1 + math.exp(s.volume - self.effective(c) - s.tau))
        penalty = {"sigma": sigma, "nu": self.nu(c), "inverse": 1 / max(1.0, self.effective(c))}[s.positive_penalty]
        informative = self.outlier(c) <= similarity <= self.learned[c]
        return 1 + penalty if informative else penalty

    def negative_weight(self, similarity: float, c: int) -> float:
        if self.settings.negative_penalty == "inverse" and similarity < self.outlier(c):
            return 1 / max(1.0, self.effective(c))
        return 1.0

    def loss(self, embeddings: Tensor, labels: list[int]) -> Tensor:
        """Eq. 13, then the rest of the training iteration in the supplement's Algorithm 1."""
        s = self.settings
        unit = [x / x.norm() for x in embeddings]
        cosine = [[x @ (p / p.norm()) for p in self.proxies] for x in unit]
        positive_sum, positive_weights = torch.zeros((), dtype=torch.double), 0.0
        for c in sorted(set(labels)):
            total, weights = torch.ones((), dtype=torch.double), []
            for i, label in enumerate(labels):
                if label == c:
                    weights.append(self.positive_weight(cosine[i][c].item(), c))
                    total = total + torch.exp(weights[-1] * s.alpha * (s.delta - cosine[i][c]))
            positive_sum, positive_weights = positive_sum + total.log(), positive_weights + sum(weights) / len(weights)
        negative_sum, negative_weights = torch.zeros((), dtype=torch.double), 0.0
        for c in range(len(self.proxies)):
            total, weights = torch.ones((), dtype=torch.double), []
            for i, label in enumerate(labels):
                if label != c:
                    weights.append(self.negative_weight(cosine[i][c].item(), c))
                    total = total + torch.exp(weights[-1] * s.alpha * (s.delta + cosine[i][c]))
            mean = sum(weights) / len(weights) if weights else 1.0
            negative_sum, negative_weights = negative_sum + total.log(), negative_weights + mean
        self._update([x.detach() for x in unit], labels, [cosine[i][c].item() for i, c in enumerate(labels)])
        return positive_sum / positive_weights + negative_sum / negative_weights

    def _update(self, unit: list[Tensor], labels: list[int], positives: list[float]) -> None:
        s = self.settings
        filtering = self.step >= s.first_filter_step
        outlier = [self.outlier(c) for c in labels]
        clean = [i for i in range(len(labels)) if not filtering or positives[i] >= outlier[i]]
        for i in clean:
            self.n[labels[i]] += 1
        if self.step >= s.first_queue_step:
            self.queue.extend((labels[i], unit[i]) for i in clean)
            while len(self.queue) > s.queue_capacity:
                self.queue.popleft()
            for c in set(labels):
                proxy = self.proxies[c].detach() / self.proxies[c].detach().norm()
                similarities = [float(x @ proxy) for label, x in self.queue if label == c]
                if similarities:
                    self.learned[c] = s.hardness_scale * sum(similarities) / len(similarities)
        self.step += 1
