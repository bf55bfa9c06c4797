"""Inception with batch normalisation (Ioffe and Szegedy, 2015), which timm lacks and the metric-learning papers use.

The layers are named as in the weights that were converted from Caffe, so that those load by name.
"""

from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu


class _Block(NamedTuple):
    """Output channels of an Inception block's branches; a block without 1x1 and projection halves the map."""

    name: str
    direct: int
    reduced: tuple[int, int]
    double: tuple[int, int]
    pool: Literal["avg", "max"]
    projected: int

    @property
    def stride(self) -> int:
        return 1 if self.projected else 2


_BLOCKS = (
    _Block("3a", 64, (64, 64), (64, 96), "avg", 32),
    _Block("3b", 64, (64, 96), (64, 96), "avg", 64),
    _Block("3c", 0, (128, 160), (64, 96), "max", 0),
    _Block("4a", 224, (64, 96), (96, 128), "avg", 128),
    _Block("4b", 192, (96, 128), (96, 128), "avg", 128),
    _Block("4c", 160, (128, 160), (128, 160), "avg", 128),
    _Block("4d", 96, (128, 192), (160, 192), "avg", 128),
    _Block("4e", 0, (128, 192), (192, 256), "max", 0),
    _Block("5a", 352, (192, 320), (160, 224), "avg", 128),
    _Block("5b", 352, (192, 320), (192, 224), "max", 128),
)

GROUPS = ("3", "4", "5")
"""Blocks that share a resolution, by the first character of their names; the stem belongs to the first group."""


class BNInception(nn.ModuleDict):
    """The network without its classifier, with the interface of a timm model; it takes RGB less the means, 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_cfg = {
            "input_size": (3, 224, 224),
            "mean": (128 / 255, 117 / 255, 104 / 255),
            "std": (1 / 255, 1 / 255, 1 / 255),
            "classifier": "last_linear",
        }
        self._add("conv1_7x7_s2", 3, 64, side=7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64)
        self._add("conv2_3x3", 64, 192, side=3)
        channels = 192
        for block in _BLOCKS:
            channels = self._add_block(block, channels)
        self.num_features = channels

    def _add(self, name: str, channels: int, out: int, *, side: int = 1, stride: int = 1) -> None:
        self[name] = nn.Conv2d(channels, out, side, stride, padding=side // 2)
        self[f"{name}_bn"] = nn.BatchNorm2d(out)

    def _add_block(self, block: _Block, channels: int) -> int:
        prefix = f"inception_{block.name}"
        if block.direct:
            self._add(f"{prefix}_1x1", channels, block.direct)
        self._add(f"{prefix}_3x3_reduce", channels, block.reduced[0])
        self._add(f"{prefix}_3x3", *block.reduced, side=3, stride=block.stride)
        self._add(f"{prefix}_double_3x3_reduce", channels, block.double[0])
        self._add(f"{prefix}_double_3x3_1", *block.double, side=3)
        self._add(f"{prefix}_double_3x3_2", block.double[1], block.double[1], side=3, stride=block.stride)
        if block.projected:
            self._add(f"{prefix}_pool_proj", channels, block.projected)
        return block.direct + block.reduced[1] + block.double[1] + (block.projected or channels)

    def _apply_layers(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        for name in names:
            x = relu(self[f"{name}_bn"](self[name](x)))
        return x

    def _apply_block(self, block: _Block, x: torch.Tensor) -> torch.Tensor:
        prefix = f"inception_{block.name}"
        branches = [self._apply_layers(x, f"{prefix}_1x1")] if block.direct else []
        branches.append(self._apply_layers(x, f"{prefix}_3x3_reduce", f"{prefix}_3x3"))
        double = ("double_3x3_reduce", "double_3x3_1", "double_3x3_2")
        branches.append(self._apply_layers(x, *(f"{prefix}_{name}" for name in double)))
        if not block.projected:
            branches.append(_halve(x))
        else:
            pool = avg_pool2d if block.pool == "avg" else max_pool2d
            branches.append(self._apply_layers(pool(x, 3, stride=1, padding=1), f"{prefix}_pool_proj"))
        return torch.cat(branches, dim=1)

    def group_modules(self, group: str) -> list[nn.Module]:
        """Returns the layers of a group of `GROUPS`."""
        prefixes = (f"inception_{group}", "conv") if group == GROUPS[0] else (f"inception_{group}",)
        return [layer for name, layer in self.items() if name.startswith(prefixes)]

    def run_group(self, group: str, x: torch.Tensor) -> torch.Tensor:
        """Runs a group on the output of the one before; the first takes pixels."""
        if group == GROUPS[0]:
            x = x.flip(1)  # Caffe learned on BGR
            x = _halve(self._apply_layers(x, "conv1_7x7_s2"))
            x = _halve(self._apply_layers(x, "conv2_3x3_reduce", "conv2_3x3"))
        for block in _BLOCKS:
            if block.name.startswith(group):
                x = self._apply_block(block, x)
        return x

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the last feature map, 7x7 of 224x224: only sides whose maps stay even until the last halving fit."""
        for group in GROUPS:
            x = self.run_group(group, x)
        return x

    def forward_head(self, x: torch.Tensor) -> torch.Tensor:
        """Pools the last feature map."""
        return x.mean(dim=(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def _halve(x: torch.Tensor) -> torch.Tensor:
    """Halves the resolution, rounded up as in Caffe."""
    return max_pool2d(x, 3, stride=2, ceil_mode=True)
