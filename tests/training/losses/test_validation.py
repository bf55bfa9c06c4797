"""Checks of batches and settings of a loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from index.errors import LookalikeError
from training.losses.proxy_isa import ProxyISALoss, ProxyISASettings

CLASSES, SIZE, BATCH = 6, 5, 10


def settings(**changes: Any) -> ProxyISASettings:
    """Returns a schedule and a volume small enough that every rule acts within a few dozen steps."""
    return ProxyISASettings(**{"queue_start": 3, "filter_start": 6, "queue_size": 37, "volume": 12.0, **changes})


@pytest.mark.parametrize(
    ("embeddings", "labels", "problem"),
    [
        (torch.zeros(4, SIZE), torch.tensor([0, 1, 2, CLASSES]), f"Label {CLASSES} is outside 0..{CLASSES - 1}"),
        (torch.zeros(4, SIZE), torch.tensor([0, -1, 2, 3]), "Label -1 is outside"),
        (torch.zeros(4, SIZE), torch.zeros(3, dtype=torch.long), "one label for each of 4 embeddings"),
        (torch.zeros(4, SIZE), torch.zeros(4, 1, dtype=torch.long), r"got shape \[4, 1\]"),
        (torch.zeros(4, SIZE), torch.zeros(4), "integers, got torch.float32"),
        (torch.zeros(4, SIZE + 1), torch.zeros(4, dtype=torch.long), r"shape \[batch, 5\], got \[4, 6\]"),
        (torch.zeros(0, SIZE), torch.zeros(0, dtype=torch.long), "skip empty batches"),
    ],
)
def test_a_bad_batch_is_refused_with_the_offending_value(embeddings: Tensor, labels: Tensor, problem: str) -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings())
    with pytest.raises(LookalikeError, match=problem):
        loss(embeddings, labels)
    assert loss.hardness.steps == 0


def test_half_precision_proxies_are_refused() -> None:
    loss = ProxyISALoss(CLASSES, SIZE, settings()).half()
    with pytest.raises(LookalikeError, match=r"proxies in torch.float16"):
        loss(torch.ones(2, SIZE), torch.tensor([0, 1]))
