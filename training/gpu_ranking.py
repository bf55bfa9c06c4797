"""Ranks of relevant results on a GPU, with the rules and the figures of `index.evaluation.ranking`."""

import logging
from functools import cache

import numpy as np
import torch

from index.evaluation.ranking import Duplicates, Floats, Ints, Ranker, RetrievalProtocol, relevant_ranks

log = logging.getLogger(__name__)

_MAX_SCORES = 2**24
"""Scores on the GPU at a time; sorting them takes about 400 MB."""


@cache
def find_ranker() -> Ranker:
    """Returns what ranks in this process: the GPU if there is one, and it ranks as the CPU does."""
    if not torch.cuda.is_available():
        return relevant_ranks
    device = torch.device("cuda")
    return CheckedRanker(lambda unit, protocol: torch_ranks(unit, protocol, device))


class CheckedRanker:
    """Ranks on a GPU, and on the CPU if a small job differs there or the GPU fails."""

    def __init__(self, on_gpu: Ranker) -> None:
        self._on_gpu: Ranker | None = on_gpu
        sample = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
        sample[:8] = sample[8:16]
        protocol = RetrievalProtocol.from_labels(np.arange(len(sample)) % 9)
        if not np.array_equal(self(sample, protocol), relevant_ranks(sample, protocol)):
            self._give_up("the GPU ranks a small job differently than the CPU")

    def __call__(self, unit: Floats, protocol: RetrievalProtocol) -> Ints:
        if self._on_gpu:
            try:
                return self._on_gpu(unit, protocol)
            except RuntimeError as error:  # PyTorch's, also when the memory is not sufficient
                self._give_up(str(error))
        return relevant_ranks(unit, protocol)

    def _give_up(self, reason: str) -> None:
        self._on_gpu = None
        log.warning("figures are computed on the CPU: %s", reason)


@torch.inference_mode()
def torch_ranks(unit: Floats, protocol: RetrievalProtocol, device: torch.device, max_scores: int = _MAX_SCORES) -> Ints:
    """Returns what `relevant_ranks` returns, by sorting the scores of some queries at a time on a device."""
    gallery = protocol.gallery
    positions = np.full(len(protocol.classes), -1)
    positions[gallery] = np.arange(len(gallery))
    copies, originals = (torch.from_numpy(part).to(device) for part in Duplicates.find(unit[gallery]))
    searched = torch.from_numpy(unit[gallery]).to(device)
    classes = torch.from_numpy(protocol.classes[gallery]).to(device)
    height = max(1, max_scores // len(gallery))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        ranks = []
        for start in range(0, len(protocol.queries), height):
            queries = protocol.queries[start : start + height]
            scores = torch.from_numpy(unit[queries]).to(device) @ searched.T + 0.0  # -0 becomes 0
            scores[:, copies] = scores[:, originals]
            own = torch.from_numpy(positions[queries]).to(device)[:, None]
            is_own = torch.arange(len(gallery), device=device) == own
            scores[is_own] = -torch.inf  # a query never finds itself
            order = scores.argsort(dim=1, descending=True, stable=True)
            wanted = torch.from_numpy(protocol.classes[queries]).to(device)[:, None]
            is_relevant = (classes[order] == wanted) & (order != own)
            ranks.append(is_relevant.nonzero()[:, 1].cpu().numpy() + 1)
    finally:
        torch.set_float32_matmul_precision(precision)
    return np.concatenate(ranks)
