"""A handler as in tutorials, to compare with: FastAPI, PyTorch and a flat FAISS index in one function."""

import io
import os
import sys
from pathlib import Path

import faiss
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, UploadFile
from PIL import Image
from torchvision import transforms

from training.backbones import EmbeddingModel
from training.config import TrainingConfig


def main(vectors: Path, port: int) -> None:
    config = TrainingConfig()
    model = EmbeddingModel(config.backbone, input_size=config.preprocessing.input_size).eval()
    prepare = transforms.Compose(
        [
            transforms.Resize(config.preprocessing.resize, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(config.preprocessing.input_size),
        ]
    )
    stored = np.load(vectors)
    index = faiss.IndexFlatIP(stored.shape[1])
    index.add(stored)
    app = FastAPI()

    @app.post("/search")
    async def search(image: UploadFile) -> dict[str, list[float]]:
        picture = prepare(Image.open(io.BytesIO(await image.read())).convert("RGB"))
        with torch.inference_mode():
            vector = model(torch.from_numpy(np.asarray(picture)[np.newaxis].copy()))
        scores, places = index.search(vector.numpy(), 12)
        return {"ids": places[0].tolist(), "scores": scores[0].tolist()}

    uvicorn.run(app, port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    main(Path(sys.argv[1]), int(sys.argv[2]))
