"""A training loop written the usual way: torchvision's transforms, a DataLoader and pytorch-metric-learning's loss."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import timm
import torch
from _train_peers import Plan
from PIL import Image
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NETWORK_STEPS = 5


class PhotoFiles(Dataset[tuple[Tensor, int]]):
    """Photos opened with Pillow and handed to torchvision's transforms."""

    def __init__(self, plan: Plan) -> None:
        self.classes = sorted(set(plan.labels))
        self._plan = plan
        self._transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(plan.side, scale=plan.crop_scale),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self._plan.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self._plan.files[index]) as image:
            return self._transform(image.convert("RGB")), self.classes.index(self._plan.labels[index])


class PlainLoop:
    """The loop with its network, loss and optimiser."""

    def __init__(self, plan: Plan) -> None:
        self._batch_size = plan.batch_size
        self._dataset = dataset = PhotoFiles(plan)
        self._loader = DataLoader(
            dataset,
            batch_size=plan.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=plan.workers,
            persistent_workers=plan.workers > 0,
        )
        backbone: Any = timm.create_model(plan.model, num_classes=0)
        self._model = nn.Sequential(backbone, nn.Linear(backbone.num_features, plan.embedding_size)).train()
        self._loss = ProxyAnchorLoss(len(dataset.classes), plan.embedding_size)
        groups = [{"params": self._model.parameters()}, {"params": self._loss.parameters(), "lr": plan.proxy_rate}]
        self._optimiser = torch.optim.AdamW(groups, lr=plan.learning_rate, weight_decay=plan.weight_decay)

    def run_epoch(self) -> float:
        """Trains an epoch and returns its photos per second."""
        begin, photos = time.perf_counter(), 0
        for images, labels in self._loader:
            self._step(images, labels)
            photos += len(labels)
        return photos / (time.perf_counter() - begin)

    def run_network(self) -> float:
        """Returns the photos per second of the network alone, on one batch that stays in memory."""
        # Not from the loader, whose processes would keep decoding in the background.
        images, labels = default_collate([self._dataset[index] for index in range(self._batch_size)])
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


def _serve(file: Path) -> None:
    plan = Plan(**json.loads(file.read_text(encoding="utf-8")))
    torch.set_num_threads(plan.threads)
    torch.manual_seed(0)
    loop = PlainLoop(plan)
    for line in sys.stdin:
        print(loop.run_epoch() if line.strip() == "epoch" else loop.run_network(), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
