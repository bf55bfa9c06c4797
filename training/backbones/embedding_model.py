"""The model that is trained and exported: scaling, backbone, pooling, head and normalisation in one module."""

import difflib
from typing import Any

import timm
import torch
from torch import nn

from index._util.plugins import load_plugin
from training.backbones.bn_inception import BNInception
from training.backbones.stages import Stage, split_stages
from training.backbones.weights import load_pretrained
from training.config import BackboneSettings
from training.errors import TrainingError

_ALIASES = {
    **{f"efficientnet_lite{size}": f"tf_efficientnet_lite{size}" for size in range(5)},
    "vit_small_patch16": "vit_small_patch16_224",
}


class EmbeddingModel(nn.Module):
    """Maps uint8 NHWC pixels to L2-normalised vectors; scaling is part of the model."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        settings: BackboneSettings,
        *,
        input_size: int | None = None,
        pretrained: bool = True,
        head: bool = True,
    ) -> None:
        """`input_size` defaults to the backbone's own; without `pretrained` a checkpoint must fill the weights.

        Without `head` the vectors are the normalised features: the untrained model.
        """
        super().__init__()
        plugin = _plugin(settings.name)
        backbone: Any = plugin or _network(settings.name)
        if pretrained and not (plugin and settings.weights == "auto"):  # a plug-in comes with its own weights
            load_pretrained(backbone, settings.name, settings.weights)
        self.backbone = backbone
        for part in ("mean", "std"):
            scale = torch.tensor(backbone.pretrained_cfg[part]) * 255
            self.register_buffer(part, scale.view(1, 3, 1, 1), persistent=False)
        self._settings = settings
        self._frozen_backbone = False
        self._frozen_stages = 0
        if settings.batch_norm == "frozen":
            for module in _batch_norms(backbone):
                module.requires_grad_(False)
        self._side = input_size or backbone.pretrained_cfg["input_size"][1]
        width = self._fit()
        self.dimension = settings.embedding_size if head else width
        """Numbers in a vector."""
        layer_norm = head and settings.layer_norm
        self.norm = nn.LayerNorm(width, elementwise_affine=False) if layer_norm else nn.Identity()
        self.head: Any = nn.Identity()
        if head:
            self.head = nn.Linear(width, settings.embedding_size)
            nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
            nn.init.zeros_(self.head.bias)
        self.train()

    @property
    def input_size(self) -> int:
        """The side of the images, in pixels."""
        return int(self._side)

    def _fit(self) -> int:
        """Sets a transformer to the input size and returns the width of the features, both tried on a blank image."""
        side, own_size = self._side, self.backbone.pretrained_cfg["input_size"][1]
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
        """Returns the pooled output of the backbone, which the head takes."""
        planes = self._scale(pixels)
        if self._settings.pooling == "default":
            own: torch.Tensor = self.backbone(planes)
            return own
        return self._pool(self.backbone.forward_features(planes))

    def activations(self, pixels: torch.Tensor, stage: int) -> torch.Tensor:
        """Returns the output of `stages[:stage]` for uint8 NHWC pixels."""
        x = self._scale(pixels)
        for part in self._stages()[: self.stage_index(stage)]:
            x = part.run(x)
        return x

    def features_from(self, activations: torch.Tensor, stage: int) -> torch.Tensor:
        """Continues from `activations` of the same stage, of any float type, to the features."""
        # NHWC in memory, the order in which `features` computes because pixels arrive in it.
        order = torch.channels_last if activations.ndim == 4 else torch.contiguous_format
        x = activations.to(torch.float32, memory_format=order)
        for part in self._stages()[self.stage_index(stage) :]:
            x = part.run(x)
        return self._pool(x)

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        """Returns vectors that are not normalised, in float32 also under autocast: losses compare small differences."""
        features = features.float()
        if not torch.is_autocast_enabled(features.device.type):
            return self._project(features)
        with torch.autocast(features.device.type, enabled=False):
            return self._project(features)

    def from_features(self, features: torch.Tensor) -> torch.Tensor:
        """Returns normalised vectors of features, which may come from a cache."""
        return nn.functional.normalize(self.embed(features), dim=1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.from_features(self.features(pixels))

    def _scale(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.permute(0, 3, 1, 2).float() - self.mean) / self.std

    def _pool(self, x: torch.Tensor) -> torch.Tensor:
        if self._settings.pooling == "default":
            own: torch.Tensor = self.backbone.forward_head(x)
            return own
        if x.ndim != 4 or x.shape[1] != self.backbone.num_features:
            raise TrainingError(
                f"{self._settings.name} has no feature map for backbone.pooling={self._settings.pooling}.",
                "Use backbone.pooling=default: a transformer pools its tokens itself.",
            )
        return pool(x, self._settings.pooling)

    def _project(self, features: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.head(self.norm(features))
        return vectors

    def _stages(self) -> list[Stage]:
        return split_stages(self.backbone, self._settings.name)  # cheap, and right also for a copy of the model

    def stage_names(self) -> tuple[str, ...]:
        """Returns the names of the stages, first one first."""
        return tuple(stage.name for stage in self._stages())

    def stage_index(self, stage: int) -> int:
        """Resolves the boundary before a stage as a slice does: -1 stands before the last stage."""
        names = self.stage_names()
        if not -len(names) <= stage <= len(names):
            raise TrainingError(
                f"Stage {stage} does not exist: {self._settings.name} has {len(names)} stages ({', '.join(names)}).",
                f"Use a number from {-len(names)} to {len(names)}.",
            )
        return stage % len(names) if stage < 0 else stage

    def stage_parameters(self) -> list[list[nn.Parameter]]:
        """Returns the parameters of the backbone by stage, first stage first; each parameter appears once."""
        return [stage.parameters() for stage in self._stages()]

    def freeze_stages(self, count: int) -> None:
        """Freezes `stages[:count]` permanently: weights, batch norm's statistics, dropout and drop path."""
        if not count:  # works for backbones without stages too
            return
        self._frozen_stages = max(self._frozen_stages, self.stage_index(count))
        for stage in self._stages()[: self._frozen_stages]:
            for parameter in stage.parameters():
                parameter.requires_grad_(False)
        self.train(self.training)

    def freeze_backbone(self) -> None:
        """Freezes the backbone permanently, so that the features of a photo never change."""
        self.backbone.requires_grad_(False)
        self._frozen_backbone = True
        self.train(self.training)

    def freeze_unused(self) -> list[str]:
        """Freezes parameters that the features do not depend on and returns their names.

        DistributedDataParallel waits for the gradient of every parameter that learns.
        """
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (2, self._side, self._side, 3), dtype=torch.uint8, generator=generator)
        learning = {name: value for name, value in self.backbone.named_parameters() if value.requires_grad}
        if not learning:
            return []
        mode = self.training
        self.eval()  # statistics stay and nothing is drawn at random
        with torch.enable_grad():
            total = self.features(pixels.to(self.mean.device)).sum()
            gradients = torch.autograd.grad(total, list(learning.values()), allow_unused=True)
        self.train(mode)
        unused = [name for name, gradient in zip(learning, gradients, strict=True) if gradient is None]
        for name in unused:
            learning[name].requires_grad_(False)
        return unused

    def train(self, mode: bool = True) -> "EmbeddingModel":
        """Keeps frozen parts in evaluation mode, and batch norm unless it learns: small batches spoil statistics."""
        super().train(mode)
        if self._frozen_backbone:
            self.backbone.eval()
        for stage in self._stages()[: self._frozen_stages] if self._frozen_stages else ():
            for module in stage.modules:
                module.eval()
        if self._settings.batch_norm != "learn":
            for module in _batch_norms(self.backbone):
                module.eval()
        return self


def _batch_norms(module: nn.Module) -> list[nn.Module]:
    """Returns every kind of batch norm, timm's own included."""
    return [inner for inner in module.modules() if isinstance(inner, nn.modules.batchnorm._BatchNorm)]


def pool(feature_map: torch.Tensor, pooling: str) -> torch.Tensor:
    """Pools a feature map (N, C, H, W) by its mean, its maximum or the sum of both."""
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


def _plugin(name: str) -> nn.Module | None:
    """Returns the network of a plug-in; None if the name is not one."""
    make = load_plugin("lookalike.backbones", name)
    if make is None:
        return None
    network = make()
    described = getattr(network, "pretrained_cfg", None)
    missing = [key for key in ("mean", "std", "input_size") if not isinstance(described, dict) or key not in described]
    if not isinstance(network, nn.Module) or missing:
        raise TrainingError(
            f"The backbone {name} is not a torch module with {', '.join(missing) or 'features'}.",
            "Return a module with pretrained_cfg = {'mean': ..., 'std': ..., 'input_size': (3, height, width)}.",
        )
    return network
