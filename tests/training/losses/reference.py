"""Proxy-ISA written again, pair by pair in plain loops, straight from the paper: what the fast one must equal."""

import math
from collections import deque

import torch
from torch import Tensor

from training.losses.proxy_isa import ProxyISASettings

WeightedLogit = tuple[float, Tensor]
ZERO = torch.zeros((), dtype=torch.double)


def mean_weight(pairs: list[WeightedLogit]) -> float:
    return sum(weight for weight, _ in pairs) / len(pairs) if pairs else 1.0


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
        positive: list[list[WeightedLogit]] = []
        for c in sorted(set(labels)):
            own = [cosine[i][c] for i, label in enumerate(labels) if label == c]
            positive.append([(self.positive_weight(x.item(), c), s.alpha * (s.delta - x)) for x in own])
        negative: list[list[WeightedLogit]] = []
        for c in range(len(self.proxies)):
            others = [cosine[i][c] for i, label in enumerate(labels) if label != c]
            negative.append([(self.negative_weight(x.item(), c), s.alpha * (s.delta + x)) for x in others])
        self._update([x.detach() for x in unit], labels, [cosine[i][c].item() for i, c in enumerate(labels)])
        return self.term(positive) + self.term(negative)

    def term(self, classes: list[list[WeightedLogit]]) -> Tensor:
        """Weights in the exponents, and the sum of the classes' mean weights as the divisor."""
        total = ZERO
        for pairs in classes:
            total = total + torch.log(1 + sum((torch.exp(weight * logit) for weight, logit in pairs), ZERO))
        return total / sum(mean_weight(pairs) for pairs in classes)

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


class SlowProxyISAGradient(SlowProxyISA):
    """Proxy-Anchor's own derivatives by each cosine, taken by autograd, times the weights."""

    def term(self, classes: list[list[WeightedLogit]]) -> Tensor:
        total = ZERO
        for pairs in classes:
            leaves = [logit.detach().requires_grad_() for _, logit in pairs]
            value = torch.log(1 + sum((torch.exp(leaf) for leaf in leaves), ZERO))
            total = total + mean_weight(pairs) * value.detach()
            slopes = torch.autograd.grad(value, leaves) if leaves else ()
            for (weight, logit), slope in zip(pairs, slopes, strict=True):
                total = total + weight * slope * (logit - logit.detach())
        return total / sum(mean_weight(pairs) for pairs in classes)
