"""Checks of what a caller hands to a loss: settings when it is made, a batch when it is called."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from training.errors import TrainingError

Settings = TypeVar("Settings", bound=BaseModel)


def parse_settings(
    model: type[Settings], name: str, settings: Settings | None, changes: Mapping[str, Any]
) -> Settings:
    """The validated settings of loss `name`: a settings object, keyword changes to it, or both."""
    given = settings.model_dump() if settings is not None else {}
    try:
        return model(**{**given, **changes})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        known = ", ".join(model.model_fields) or "none"
        if first["type"] == "extra_forbidden":
            problem = f"The loss {name} has no setting {where!r}."
        else:
            reason = first["msg"].removeprefix("Value error, ")
            problem = f"Bad setting of the loss {name}: {where} = {first['input']!r}: {reason}." if where else (
                f"Bad settings of the loss {name}: {reason}."
            )
        raise TrainingError(problem, f"Known settings: {known}.") from error


def check_batch(embeddings: Tensor, labels: Tensor, num_classes: int, embedding_size: int) -> Tensor:
    """The labels on the embeddings' device, after checks of shapes, types and range."""
    if embeddings.dim() != 2 or embeddings.shape[1] != embedding_size or len(embeddings) == 0:
        raise TrainingError(
            f"The loss expects embeddings of shape [batch, {embedding_size}], got {list(embeddings.shape)}.",
            "Make it with the embedding_size of the model, and skip empty batches.",
        )
    if labels.shape != embeddings.shape[:1]:
        raise TrainingError(
            f"The loss expects one label for each of {len(embeddings)} embeddings, got shape {list(labels.shape)}."
        )
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise TrainingError(f"Labels must be whole numbers, got {labels.dtype}.", "Number the classes from 0.")
    labels = labels.long()
    in_range = ((labels >= 0) & (labels < num_classes)).all()
    if labels.device.type != "cpu":
        # Reading the answer would stall the device every step, so the device itself stops the run.
        torch._assert_async(in_range, f"a label lies outside 0..{num_classes - 1}")
    elif not in_range:
        outside = labels[(labels < 0) | (labels >= num_classes)][0].item()
        raise TrainingError(
            f"Label {outside} lies outside 0..{num_classes - 1}.",
            "Number the training classes from 0 and make the loss with their number as num_classes.",
        )
    return labels.to(embeddings.device)
