"""The model that is trained and exported: scaling, backbone, pooling, head and normalisation in one module."""

import difflib
from typing import Any

import timm
import torch
from torch import nn

from training.backbones.bn_inception import BNInception
from training.backbones.weights import load_pretrained
from training.config import BackboneSettings
from training.errors import TrainingError

_ALIASES = {
    **{f"efficientnet_lite{size}": f"tf_efficientnet_lite{size}" for size in range(5)},
    "vit_small_patch16": "vit_small_patch16_224",
}


class EmbeddingModel(nn.Module):
    """uint8 NHWC pixels to L2-normalised vectors; scaling is inside, so that no caller can get it wrong."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, settings: BackboneSettings, *, input_size: int | None = None, pretrained: bool = True) -> None:
        """Without an `input_size` the backbone's own; without `pretrained` for a checkpoint to fill it."""
        super().__init__()
        backbone: Any = _network(settings.name)
        if pretrained:
            load_pretrained(backbone, settings.name, settings.weights)
        self.backbone = backbone
        for part in ("mean", "std"):
            scale = torch.tensor(backbone.pretrained_cfg[part]) * 255
            self.register_buffer(part, scale.view(1, 3, 1, 1), persistent=False)
        self._settings = settings
        self._frozen_backbone = False
        width = self._fit(input_size)
        self.norm = nn.LayerNorm(width, elementwise_affine=False) if settings.layer_norm else nn.Identity()
        self.head = nn.Linear(width, settings.embedding_size)
        nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
        nn.init.zeros_(self.head.bias)
        self.train()

    def _fit(self, input_size: int | None) -> int:
        """Sets a transformer to the size and answers the features' width, both tried on a blank image."""
        own_size = self.backbone.pretrained_cfg["input_size"][1]
        side = input_size or own_size
        blank = torch.zeros((1, side, side, 3), dtype=torch.uint8)
        try:
            if side != own_size and hasattr(self.backbone, "set_input_size"):
                self.backbone.set_input_size(img_size=(side, side))
            with torch.no_grad():
                return self.eval().features(blank).shape[1]
        except (RuntimeError, AssertionError, ValueError) as error:
            raise TrainingError(
                f"{self._settings.name} cannot take images of {side} pixels ({str(error).rstrip('.')}).",
                f"Set preprocessing.input_size to {own_size}, which it was made for.",
            ) from error

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """The backbone's pooled features, which the head has not touched."""
        planes = (pixels.permute(0, 3, 1, 2).float() - self.mean) / self.std
        if self._settings.pooling == "default":
            own: torch.Tensor = self.backbone(planes)
            return own
        feature_map: torch.Tensor = self.backbone.forward_features(planes)
        if feature_map.ndim != 4 or feature_map.shape[1] != self.backbone.num_features:
            raise TrainingError(
                f"{self._settings.name} has no feature map for backbone.pooling={self._settings.pooling}.",
                "Use backbone.pooling=default: a transformer pools its tokens itself.",
            )
        return pool(feature_map, self._settings.pooling)

    def from_features(self, features: torch.Tensor) -> torch.Tensor:
        """Vectors from features, which may have been kept from before."""
        return nn.functional.normalize(self.head(self.norm(features)), dim=1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.from_features(self.features(pixels))

    def freeze_backbone(self) -> None:
        """From now on only the head learns, so that a photo's features stay what they are."""
        self.backbone.requires_grad_(False).eval()
        self._frozen_backbone = True

    def train(self, mode: bool = True) -> "EmbeddingModel":
        """Batch norm keeps its ImageNet statistics: a small batch of few products would spoil them."""
        super().train(mode)
        if self._frozen_backbone:
            self.backbone.eval()
        if self._settings.batch_norm != "learn":
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self


def pool(feature_map: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector of a feature map (N, C, H, W) by its mean, its maximum or the sum of both."""
    places = feature_map.flatten(2)
    if pooling == "avg":
        return places.mean(dim=2)
    highest = places.max(dim=2).values
    return highest if pooling == "max" else highest + places.mean(dim=2)


def _network(name: str) -> nn.Module:
    if name == "bn_inception":
        return BNInception()
    known = {*timm.list_models(), *timm.list_pretrained()}
    timm_name = _ALIASES.get(name, name)
    if timm_name not in known:
        close = difflib.get_close_matches(name, sorted({*known, *_ALIASES, "bn_inception"}), n=4)
        raise TrainingError(
            f"Unknown backbone {name!r}.",
            f"Did you mean {', '.join(close)}?" if close else "See docs/backbones.md, or use a name that timm lists.",
        )
    network: nn.Module = timm.create_model(timm_name, num_classes=0)
    return network
