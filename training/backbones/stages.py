"""A backbone as a sequence of stages that run, learn or are frozen separately.

A stage is what the architecture calls one: a group of blocks that share a resolution, or one block of a transformer.
The first also holds the stem or the embedding of patches, the last everything after the blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from timm.models.convnext import ConvNeXt
from timm.models.efficientnet import EfficientNet
from timm.models.eva import Eva
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.resnet import ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from training.backbones.bn_inception import GROUPS, BNInception
from training.errors import TrainingError

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stage:
    """A part of a backbone: what it computes, the modules that belong to it, and parameters outside of these."""

    name: str
    steps: tuple[Step, ...]
    modules: tuple[nn.Module, ...]
    loose: tuple[nn.Parameter, ...]

    def parameters(self) -> list[nn.Parameter]:
        """Returns every parameter once."""
        return list(dict.fromkeys([*self.loose, *(weight for part in self.modules for weight in part.parameters())]))

    def run(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class _Part(NamedTuple):
    """A stage as its architecture describes it."""

    name: str
    steps: Sequence[Step]
    modules: Sequence[nn.Module]


def split_stages(backbone: nn.Module, name: str) -> list[Stage]:
    """Returns the stages of `backbone`, called `name` in the settings; in turn they compute its `forward_features`."""
    # By the function and not by the class: a subclass that computes something else is not split wrongly.
    split = _FAMILIES.get(getattr(type(backbone), "forward_features", None))
    if split is None:
        raise TrainingError(
            f"{name} cannot be split into stages.",
            "Leave cached_stage, backbone.frozen_stages and optimiser.layer_decay at their defaults, or use an"
            " EfficientNet, MobileNet, ResNet, ConvNeXt, ViT, DeiT, DINO, EVA or bn_inception.",
        )
    return _complete(backbone, split(backbone))


def _complete(backbone: nn.Module, parts: list[_Part]) -> list[Stage]:
    """Gives the first stage the backbone's own parameters (tokens, positions) and the last all that is left."""
    claimed = {id(module) for part in parts for module in part.modules}
    # A child is a part of a stage, or a container of such parts.
    rest = [child for child in backbone.children() if claimed.isdisjoint(map(id, (child, *child.children())))]
    own = tuple(backbone.parameters(recurse=False))
    return [
        Stage(
            part.name,
            tuple(part.steps),
            (*part.modules, *(rest if part is parts[-1] else ())),
            own if part is parts[0] else (),
        )
        for part in parts
    ]


def _chain(
    names: Sequence[str],
    blocks: Sequence[nn.Module],
    *,
    before: Sequence[Step] = (),
    after: Sequence[Step] = (),
    helpers: Sequence[nn.Module | None] = (),
    steps: Sequence[Step] | None = None,
) -> list[_Part]:
    """Makes one part per block.

    `helpers` are modules that functions in `before` use. `steps` run the blocks that take more than their input.
    """
    parts = []
    runners: Sequence[Step] = steps or blocks
    for number, (name, block, step) in enumerate(zip(names, blocks, runners, strict=True)):
        first, last = number == 0, number == len(blocks) - 1
        run: list[Step] = [*(before if first else ()), step, *(after if last else ())]
        modules: list[object] = [block, *(helpers if first else ()), *run]
        parts.append(_Part(name, run, [module for module in modules if isinstance(module, nn.Module)]))
    return parts


def _block_names(prefix: str, blocks: Sequence[nn.Module]) -> list[str]:
    return [f"{prefix}.{number}" for number in range(len(blocks))]


def _split_efficientnet(network: Any) -> list[_Part]:
    before, after = [network.conv_stem, network.bn1], [network.conv_head, network.bn2]
    return _chain(_block_names("blocks", network.blocks), network.blocks, before=before, after=after)


def _split_mobilenet(network: Any) -> list[_Part]:
    return _chain(_block_names("blocks", network.blocks), network.blocks, before=[network.conv_stem, network.bn1])


def _split_resnet(network: Any) -> list[_Part]:
    names = [f"layer{number}" for number in range(1, 5)]
    before = [network.conv1, network.bn1, network.act1, network.maxpool]
    return _chain(names, [getattr(network, name) for name in names], before=before)


def _split_convnext(network: Any) -> list[_Part]:
    names = _block_names("stages", network.stages)
    return _chain(names, network.stages, before=[network.stem], after=[network.norm_pre])


def _split_transformer(network: Any) -> list[_Part]:
    before = [network.patch_embed, network._pos_embed, network.patch_drop, network.norm_pre]
    names = _block_names("blocks", network.blocks)
    return _chain(names, network.blocks, before=before, after=[network.norm], helpers=[network.pos_drop])


def _split_eva(network: Any) -> list[_Part]:
    """Splits EVA, whose blocks rotate queries and keys by the positions of the patches."""

    def embed_places(x: Tensor) -> Tensor:
        tokens: Tensor = network._pos_embed(x)[0]
        return tokens

    def run_block(number: int, x: Tensor) -> Tensor:
        rotation = None if network.rope is None else network.rope.get_embed(shape=network.patch_embed.grid_size)
        if rotation is not None and network.rope_mixed:  # a rotation per block
            rotation = rotation[number]
        out: Tensor = network.blocks[number](x, rope=rotation)
        return out

    return _chain(
        _block_names("blocks", network.blocks),
        network.blocks,
        before=[network.patch_embed, embed_places, network.norm_pre],
        after=[network.norm],
        helpers=[network.pos_drop, network.patch_drop, network.rope],
        steps=[partial(run_block, number) for number in range(len(network.blocks))],
    )


def _split_bn_inception(network: BNInception) -> list[_Part]:
    return [
        _Part(f"inception_{group}", [partial(network.run_group, group)], network.group_modules(group))
        for group in GROUPS
    ]


_FAMILIES: dict[Any, Callable[[Any], list[_Part]]] = {
    EfficientNet.forward_features: _split_efficientnet,
    MobileNetV3.forward_features: _split_mobilenet,
    ResNet.forward_features: _split_resnet,
    ConvNeXt.forward_features: _split_convnext,
    VisionTransformer.forward_features: _split_transformer,
    Eva.forward_features: _split_eva,
    BNInception.forward_features: _split_bn_inception,
}
