"""Stages: run to a boundary and from it, frozen, and each with its own parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_backbones import random_pixels, untrained
from training.backbones import EmbeddingModel
from training.errors import TrainingError

SMALL = {
    "test_efficientnet": tuple(f"blocks.{number}" for number in range(5)),
    "mobilenetv3_small_050": tuple(f"blocks.{number}" for number in range(6)),
    "test_resnet": ("layer1", "layer2", "layer3", "layer4"),
    "test_convnext": ("stages.0", "stages.1", "stages.2", "stages.3"),
    "test_vit": tuple(f"blocks.{number}" for number in range(6)),
    "test_vit3": tuple(f"blocks.{number}" for number in range(9)),
    "bn_inception": ("inception_3", "inception_4", "inception_5"),
}
"""A model of every family that differs in its stages, with their names."""
OTHERS = (
    "efficientnet_lite0",
    "resnet18d",
    "convnextv2_atto",
    "test_vit4",
    "deit_tiny_distilled_patch16_224",
    "vit_tiny_patch16_dinov3_qkvb",
    "vit_small_patch16_rope_mixed_224",
    "eva02_tiny_patch14_224",
)
"""More models of the families: other stems, tokens, ways to pool and rotary positions."""


def side_of(name: str) -> int:
    return 70 if "patch14" in name else 64


def flat_parameters(model: EmbeddingModel) -> list[int]:
    return [id(parameter) for stage in model.stage_parameters() for parameter in stage]


@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_every_boundary_leads_to_the_same_features(name: str) -> None:
    model = untrained(name, input_size=side_of(name)).eval()
    pixels = random_pixels(2, side_of(name))
    with torch.inference_mode():
        wanted = model.features(pixels)
        for stage in range(len(model.stage_names()) + 1):
            assert torch.equal(model.features_from(model.activations(pixels, stage), stage), wanted), stage
    assert wanted.std() > 0


@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_all_stages_compute_what_the_network_calls_its_features(name: str) -> None:
    model = untrained(name, input_size=side_of(name)).eval()
    pixels = random_pixels(2, side_of(name))
    planes = (pixels.permute(0, 3, 1, 2).float() - model.mean) / model.std
    with torch.inference_mode():
        got = model.activations(pixels, len(model.stage_names()))
        assert torch.equal(got, model.backbone.forward_features(planes))


@pytest.mark.parametrize("name", [*SMALL, *OTHERS])
def test_every_parameter_belongs_to_one_stage(name: str) -> None:
    model = untrained(name, input_size=side_of(name))
    assert sorted(flat_parameters(model)) == sorted(id(parameter) for parameter in model.backbone.parameters())
    assert all(model.stage_parameters())


@pytest.mark.parametrize("name", SMALL)
def test_stages_have_the_names_of_the_architecture(name: str) -> None:
    assert untrained(name, input_size=64).stage_names() == SMALL[name]


def test_the_stem_is_in_the_first_stage_and_the_head_in_the_last() -> None:
    def numbers(name: str, *parameters: str) -> list[int]:
        model = untrained(name, input_size=64)
        named = {id(parameter): number for number, stage in enumerate(model.stage_parameters()) for parameter in stage}
        return [named[id(model.backbone.get_parameter(parameter))] for parameter in parameters]

    assert numbers("test_efficientnet", "conv_stem.weight", "bn1.bias", "conv_head.weight", "bn2.bias") == [0, 0, 4, 4]
    assert numbers("mobilenetv3_small_050", "conv_stem.weight", "conv_head.weight") == [0, 5]
    assert numbers("test_resnet", "conv1.0.weight", "layer3.0.conv1.weight") == [0, 2]
    assert numbers("test_convnext", "stem.0.weight", "head.norm.weight") == [0, 3]
    assert numbers("test_vit", "cls_token", "pos_embed", "patch_embed.proj.weight", "norm.weight") == [0, 0, 0, 5]
    assert numbers("test_vit3", "attn_pool.q.weight", "blocks.3.attn.qkv.weight") == [8, 3]
    assert numbers("bn_inception", "conv1_7x7_s2.weight", "inception_4a_1x1.bias") == [0, 1]


@pytest.mark.parametrize("pooling", ["avg", "avg+max"])
def test_the_pooling_of_the_settings_ends_a_boundary_too(pooling: str) -> None:
    model = untrained("test_efficientnet", input_size=64, pooling=pooling).eval()
    pixels = random_pixels(2, 64)
    with torch.inference_mode():
        assert torch.equal(model.features_from(model.activations(pixels, -2), -2), model.features(pixels))


def test_a_negative_number_counts_from_the_end_as_in_a_slice() -> None:
    model = untrained("test_resnet", input_size=32)
    assert [model.stage_index(stage) for stage in (0, 2, 4, -1, -4)] == [0, 2, 4, 3, 0]
    for stage in (5, -5):
        with pytest.raises(
            TrainingError, match=rf"Stage {stage} .*4 stages \(layer1, layer2, layer3, layer4\).*-4 to 4"
        ):
            model.stage_index(stage)


@pytest.mark.parametrize("count", [2, -2])
def test_frozen_stages_stay_as_they_are_while_the_rest_learns(count: int) -> None:
    model = untrained("test_resnet", input_size=32, batch_norm="learn")
    model.freeze_stages(count)
    model.train()
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    optimiser = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    (model(random_pixels(4, 32)) * torch.arange(8)).sum().backward()
    optimiser.step()
    changed = {name for name, value in model.backbone.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in changed} == {"layer3", "layer4"}
    assert any("running_mean" in name for name in changed)


def test_frozen_stages_drop_nothing_at_random() -> None:
    model = untrained("test_vit", input_size=32)
    for module in model.backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    model.freeze_stages(2)
    model.train()
    pixels = random_pixels(2, 32)
    with torch.no_grad():
        assert torch.equal(model.activations(pixels, 2), model.activations(pixels, 2))
        assert not torch.equal(model.activations(pixels, 3), model.activations(pixels, 3))
    assert not any(parameter.requires_grad for parameter in (model.backbone.cls_token, model.backbone.pos_embed))


def test_all_stages_can_be_frozen_and_freezing_twice_keeps_the_larger_count() -> None:
    model = untrained("mobilenetv4_conv_small_050", input_size=32, batch_norm="learn")
    model.freeze_stages(len(model.stage_names()))
    model.freeze_stages(1)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {"head.weight", "head.bias"}
    layers = [module for module in model.train().backbone.modules() if not list(module.children())]
    assert not any(layer.training for layer in layers)


def test_a_copy_runs_its_own_stages() -> None:
    model = untrained("test_vit", input_size=32).eval()
    pixels = random_pixels(2, 32)
    with torch.inference_mode():
        wanted = model.activations(pixels, 3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.backbone.cls_token.add_(1)
        assert not torch.equal(other.activations(pixels, 3), wanted)
        assert torch.equal(model.activations(pixels, 3), wanted)


def test_other_architectures_work_without_stages() -> None:
    model = untrained("mixer_s32_224", input_size=224)
    model.freeze_stages(0)
    with pytest.raises(TrainingError, match=r"mixer_s32_224 cannot be split into stages\. .*cached_stage.*ResNet.*ViT"):
        model.stage_names()


class Unused(nn.Module):
    """A ResNet with a layer whose output nothing reads."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.pretrained_cfg = network, network.pretrained_cfg
        self.idle = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.idle(x.new_zeros(1, 2))
        features: torch.Tensor = self.network(x)
        return features


def gradients_of(model: EmbeddingModel) -> dict[str, list[float]]:
    named = model.named_parameters()
    return {name: weight.grad.flatten().tolist() for name, weight in named if weight.grad is not None}


def test_parameters_without_influence_are_found_and_frozen_and_nothing_else_changes() -> None:
    model = untrained("test_resnet", input_size=32, batch_norm="learn")
    model.backbone = Unused(model.backbone)
    model.train()
    model(random_pixels(2, 32)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = gradients_of(model)
    random = torch.get_rng_state()
    assert model.freeze_unused() == ["idle.weight", "idle.bias"]
    assert not any(weight.requires_grad for weight in model.backbone.idle.parameters())
    assert all(weight.requires_grad for weight in model.backbone.network.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert gradients_of(model) == gradients
    assert torch.equal(torch.get_rng_state(), random) and model.training and model.backbone.network.training


def test_a_backbone_that_uses_everything_is_left_as_it_is() -> None:
    model = untrained("test_efficientnet", input_size=32)
    assert model.freeze_unused() == []
    assert all(weight.requires_grad for weight in model.parameters())
    model.freeze_backbone()
    assert model.freeze_unused() == []
