"""Checks the arguments of a loss: settings when it is made, a batch when it is called."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from index._util.validation import explain_errors
from training.errors import TrainingError

Settings = TypeVar("Settings", bound=BaseModel)


def parse_settings(model: type[Settings], loss: str, settings: Settings | None, changes: Mapping[str, Any]) -> Settings:
    """Validates the settings of a loss: a settings object, changes to it by name, or both."""
    base = settings.model_dump() if settings is not None else {}
    try:
        return model(**{**base, **changes})
    except ValidationError as error:
        problems = explain_errors(error.errors(), model)
        known = ", ".join(model.model_fields) or "none"
        raise TrainingError(
            f"Bad settings of the loss {loss}: {'; '.join(problems)}.", f"Known settings: {known}."
        ) from None


def check_batch(embeddings: Tensor, labels: Tensor, num_classes: int, embedding_size: int) -> Tensor:
    """Checks shapes, types and range, and returns the labels as int64 on the embeddings' device."""
    if embeddings.dim() != 2 or embeddings.shape[1] != embedding_size or len(embeddings) == 0:
        raise TrainingError(
            f"The loss expects embeddings of shape [batch, {embedding_size}], got {list(embeddings.shape)}.",
            "Make it with the embedding_size of the model, and skip empty batches.",
        )
    if labels.shape != embeddings.shape[:1]:
        raise TrainingError(
            f"The loss expects one label for each of {len(embeddings)} embeddings, got shape {list(labels.shape)}.",
            "Pass labels as a vector.",
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TrainingError(f"Labels must be integers, got {labels.dtype}.", "Number the classes from 0.")
    labels = labels.long()
    inside = (labels >= 0) & (labels < num_classes)
    if labels.device.type == "cuda":
        # Reading the result would stall the GPU at every step: let the GPU stop the run.
        torch._assert_async(inside.all(), f"a label is outside 0..{num_classes - 1}")
    elif not inside.all():
        raise TrainingError(
            f"Label {labels[~inside][0].item()} is outside 0..{num_classes - 1}.",
            "Number the training classes from 0 and make the loss with their number as num_classes.",
        )
    return labels.to(embeddings.device)
