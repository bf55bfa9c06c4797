"""A training loop written the usual way: torchvision's transforms, a DataLoader and pytorch-metric-learning's loss."""

import time
from collections.abc import Sequence
from typing import Any

import timm
import torch
from PIL import Image
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from training.config import TrainingConfig
from training.data.photos import Photo

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NETWORK_STEPS = 5


class PhotoFiles(Dataset[tuple[Tensor, int]]):
    """Photos opened with Pillow and handed to torchvision's transforms."""

    def __init__(self, photos: Sequence[Photo], config: TrainingConfig) -> None:
        self.classes = sorted({photo.label for photo in photos})
        self._photos = photos
        self._transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(config.preprocessing.input_size, scale=config.augmentation.crop_scale),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self._photos)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        photo = self._photos[index]
        with Image.open(photo.path) as image:
            return self._transform(image.convert("RGB")), self.classes.index(photo.label)


class PlainLoop:
    """The loop, with the network, input size, batch size and number of workers of a training configuration."""

    def __init__(self, photos: Sequence[Photo], config: TrainingConfig) -> None:
        workers = config.workers or 0
        dataset = PhotoFiles(photos, config)
        self._loader = DataLoader(
            dataset,
            batch_size=config.sampling.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        size = config.backbone.embedding_size
        backbone: Any = timm.create_model(config.backbone.name, num_classes=0)
        self._model = nn.Sequential(backbone, nn.Linear(backbone.num_features, size)).train()
        self._loss = ProxyAnchorLoss(len(dataset.classes), size)
        rate = config.optimiser.learning_rate
        groups = [
            {"params": self._model.parameters()},
            {"params": self._loss.parameters(), "lr": rate * config.optimiser.proxy_factor},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=rate, weight_decay=config.optimiser.weight_decay)

    def run_epoch(self) -> float:
        """Trains an epoch and returns its photos per second."""
        begin, photos = time.perf_counter(), 0
        for images, labels in self._loader:
            self._step(images, labels)
            photos += len(labels)
        return photos / (time.perf_counter() - begin)

    def run_network(self) -> float:
        """Returns the photos per second of the network alone, on one batch that stays in memory."""
        images, labels = next(iter(self._loader))
        begin = time.perf_counter()
        for _ in range(NETWORK_STEPS):
            self._step(images, labels)
        return NETWORK_STEPS * len(labels) / (time.perf_counter() - begin)

    def _step(self, images: Tensor, labels: Tensor) -> float:
        loss = self._loss(self._model(images), labels)
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()
        value: float = loss.item()
        return value
