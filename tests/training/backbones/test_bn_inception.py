"""Inception-BN is the published network: its names, its sizes and its Caffe habits."""

from pathlib import Path

import pytest
import torch

from training.backbones import EmbeddingModel
from training.backbones.bn_inception import BNInception
from training.config import BackboneSettings
from training.errors import TrainingError


@pytest.fixture(scope="module")
def network() -> BNInception:
    torch.manual_seed(0)
    return BNInception().eval()


def test_its_tensors_are_named_and_shaped_as_in_the_converted_caffe_weights(network: BNInception) -> None:
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    known = {
        "conv1_7x7_s2.weight": (64, 3, 7, 7),
        "conv1_7x7_s2_bn.running_mean": (64,),
        "conv2_3x3_reduce.bias": (64,),
        "conv2_3x3.weight": (192, 64, 3, 3),
        "inception_3a_1x1.weight": (64, 192, 1, 1),
        "inception_3a_double_3x3_reduce_bn.running_var": (64,),
        "inception_3b_pool_proj.weight": (64, 256, 1, 1),
        "inception_3c_3x3.weight": (160, 128, 3, 3),
        "inception_4a_1x1.weight": (224, 576, 1, 1),
        "inception_4d_double_3x3_2.weight": (192, 192, 3, 3),
        "inception_4e_double_3x3_1.weight": (256, 192, 3, 3),
        "inception_5a_1x1.weight": (352, 1056, 1, 1),
        "inception_5b_pool_proj_bn.weight": (128,),
    }
    assert {name: shapes.get(name) for name in known} == known
    assert "inception_3c_1x1.weight" not in shapes and "inception_4e_pool_proj.weight" not in shapes
    assert len(shapes) == 483 and sum(p.numel() for p in network.parameters()) == 10_270_240


@pytest.mark.parametrize(("side", "map_side"), [(224, 7), (227, 7), (96, 3)])
def test_pooling_rounds_sizes_up_as_caffe_does(network: BNInception, side: int, map_side: int) -> None:
    with torch.inference_mode():
        assert network.forward_features(torch.zeros((1, 3, side, side))).shape == (1, 1024, map_side, map_side)


def test_a_side_whose_halves_do_not_meet_is_refused() -> None:
    with pytest.raises(
        TrainingError, match=r"bn_inception cannot take images of 80 .* preprocessing\.input_size to 224"
    ):
        EmbeddingModel(BackboneSettings(name="bn_inception", weights="none"), input_size=80)


def test_its_first_layer_sees_blue_green_red_less_caffes_means() -> None:
    model = EmbeddingModel(BackboneSettings(name="bn_inception", weights="none"), input_size=32).eval()
    seen: list[torch.Tensor] = []
    model.backbone["conv1_7x7_s2"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    red, green, blue = 255, 100, 7
    with torch.inference_mode():
        model(torch.tensor([red, green, blue], dtype=torch.uint8).expand(1, 32, 32, 3))
    torch.testing.assert_close(seen[0][0, :, 5, 5], torch.tensor([blue - 104.0, green - 117.0, red - 128.0]))


def test_a_file_of_old_caffe_habits_loads(network: BNInception, tmp_path: Path) -> None:
    """Batch norm as (1, channels), no batch counters, a classifier, and the format of early PyTorch."""
    for layer in network.values():
        if isinstance(layer, torch.nn.BatchNorm2d) and layer.running_mean is not None:
            layer.running_mean.uniform_(-0.1, 0.1)
    state = {
        name: value[None] if "_bn." in name else value
        for name, value in network.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    state |= {"last_linear.weight": torch.zeros((1000, 1024)), "last_linear.bias": torch.zeros(1000)}
    path = tmp_path / "bn_inception-52deb4733.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    model = EmbeddingModel(BackboneSettings(name="bn_inception", weights=str(path)), input_size=64)
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in model.backbone.state_dict().items())


def test_without_a_file_of_weights_it_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"No hub holds weights of bn_inception\. Use backbone\.weights=FILE"):
        EmbeddingModel(BackboneSettings(name="bn_inception"))
