"""Untrained models that are quick to build, and pixels for them."""

import torch

from training.backbones import EmbeddingModel
from training.config import BackboneSettings


def random_pixels(count: int, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)


def untrained(name: str, *, input_size: int, **settings: object) -> EmbeddingModel:
    torch.manual_seed(0)
    chosen = BackboneSettings.model_validate({"name": name, "weights": "none", "embedding_size": 8, **settings})
    return EmbeddingModel(chosen, input_size=input_size)
