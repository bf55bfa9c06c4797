"""Backbones: pretrained networks with a linear head, from uint8 pixels to unit vectors."""

from training.backbones.embedding_model import EmbeddingModel

__all__ = ["EmbeddingModel"]
