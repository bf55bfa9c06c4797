"""Images per second of a bundle against PyTorch, Lite0 at 224 pixels with ImageNet weights, on all usable cores.

All contenders take turns in one process, and the medians are compared, so that a busy machine slows all alike. The
photos are those of the sample shop; the large ones are collages of them, and single ones enlarged, with grain. What 8
bits cost in recall is measured on the model that the demo trains, with all photos of the products it never saw.
"""

import argparse
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from _table import Row, make_row, print_table, write_json
from numpy.typing import NDArray
from PIL import Image

from index._util.system import usable_cores
from index.embedding.embedder import Embedder
from index.embedding.images import decode, load_pixels
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.cli import TrainingProgressBar
from training.config import TrainingConfig, load_config
from training.data import DataSet, default_shop, shop_data
from training.data.sample_shop import write_shop
from training.export import MAX_RECALL_LOSS, export_reduced, export_run
from training.loop import train

LARGE = (3412, 2560)
"""The least that is decoded at an eighth, so that its short side is left with 1.25 times the pixels that are needed."""
EAGER, COMPILED = "PyTorch eager", "torch.compile"
COMPILED_BATCHES = (1, 8)
Turn = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller shop, fewer turns, no torch.compile, no recall")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    torch.manual_seed(0)
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as folder:
        rows = compare(Path(folder), quick=arguments.quick)
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def compare(folder: Path, *, quick: bool) -> list[Row]:
    if quick:
        data = shop_data(write_shop(folder / "shop", products_per_family=3, photos_per_product=4))
    else:
        data = shop_data(write_shop(default_shop()))
    config = TrainingConfig()
    model = EmbeddingModel(config.backbone, input_size=config.preprocessing.input_size).eval()
    fp32 = export_run(untrained_run(folder / "run", config, model), folder / "bundle", data.test[:16])
    [int8] = export_reduced(fp32, ["int8"], data)
    sizes, count, turns = ((1, 4), 16, 3) if quick else ((1, 2, 4, 8, 16, 32), 32, 15)
    files = [photo.path for photo in (*data.train, *data.test)][: 4 * count]
    pixels = np.stack([load_pixels(file.read_bytes(), fp32.preprocessing) for file in files])
    embedders = {"ONNX fp32": Embedder(fp32), "ONNX int8": Embedder(int8)}

    rates = measure(speed_turns(model, embedders, pixels[:count], sizes, compiled=not quick), count, turns)
    bulk = measure(
        {
            "bulk": lambda: list(embedders["ONNX fp32"].embed_images(files)),
            "memory": lambda: embedders["ONNX fp32"].embed(pixels),
        },
        len(files),
        turns,
    )
    return [
        *speed_rows(rates),
        *([] if quick else [recall_row(folder, data)]),
        make_row(
            "bulk path from JPEG files", bulk["bulk"], "the session fed from memory", bulk["memory"], "images/s",
            at_least=0.9,
        ),
        *decoding_rows(data, embedders["ONNX fp32"], photos=1 if quick else 8, turns=turns),
    ]  # fmt: skip


def untrained_run(folder: Path, config: TrainingConfig, model: EmbeddingModel) -> RunFolder:
    """A run that ended before its first step: pretrained weights, a random head."""
    run = RunFolder(folder)
    run.start(config, "sample", resume=False)
    run.save_best(model.state_dict())
    run.write_result({"epoch": 0})
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 0}) + "\n", encoding="utf-8")
    return run


def speed_turns(
    model: EmbeddingModel,
    embedders: dict[str, Embedder],
    pixels: NDArray[np.uint8],
    sizes: Sequence[int],
    *,
    compiled: bool,
) -> dict[tuple[str, int], Turn]:
    """Every contender at every size of batch, each over the same images."""
    tensor = torch.from_numpy(pixels)
    eager = model.to(memory_format=torch.channels_last)

    def torch_turn(module: Callable[[torch.Tensor], torch.Tensor], size: int) -> Turn:
        def turn() -> None:
            with torch.inference_mode():
                for batch in torch.split(tensor, size):
                    module(batch)

        return turn

    def onnx_turn(embedder: Embedder, size: int) -> Turn:
        return lambda: [embedder.embed(pixels[start : start + size]) for start in range(0, len(pixels), size)]

    turns = {(EAGER, size): torch_turn(eager, size) for size in sizes}
    for name, embedder in embedders.items():
        turns |= {(name, size): onnx_turn(embedder, size) for size in sizes}
    if compiled:
        fast = torch.compile(eager)
        turns |= {(COMPILED, size): torch_turn(fast, size) for size in COMPILED_BATCHES}
    return turns


def measure(turns: Mapping[Name, Turn], images: int, rounds: int) -> dict[Name, float]:
    """The median of each contender's images per second, after a first turn that does not count."""
    rates: dict[Name, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    for _ in range(rounds):
        # In any order: nobody always runs in the caches that the same neighbour left.
        for name, turn in random.sample(list(turns.items()), len(turns)):
            begin = time.perf_counter()
            turn()
            rates[name].append(images / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in rates.items()}


def speed_rows(rates: dict[tuple[str, int], float]) -> list[Row]:
    def at(contender: str, batch: str) -> tuple[str, float]:
        of = {size: rate for (name, size), rate in rates.items() if name == contender}
        size = 1 if batch == "batch 1" else max(of, key=of.__getitem__)
        return f"{contender}, batch {size}", of[size]

    rows = []
    for batch in ("batch 1", "best batch"):
        name, ours = at("ONNX fp32", batch)
        rows.append(make_row(name, ours, *at(EAGER, batch), "images/s", at_least=2))
        if (COMPILED, 1) in rates:
            rows.append(make_row(name, ours, *at(COMPILED, batch), "images/s"))
        name, reduced = at("ONNX int8", batch)
        rows.append(make_row(name, reduced, *at("ONNX fp32", batch), "images/s", at_least=1.5))
    return rows


def recall_row(folder: Path, data: DataSet) -> Row:
    """What 8 bits do to a trained model: the backbone behind an untrained head is not what anyone serves."""
    config = load_config(None, [], presets=["sample"])
    with TrainingProgressBar(config) as callback:
        train(config, data, folder / "trained", "sample", callback)
    fp32 = export_run(RunFolder(folder / "trained"), folder / "trained-bundle", data.test[:64])
    [int8] = export_reduced(fp32, ["int8"], data)
    own, exact = (100 * figures["recall@1"] for figures in (int8.card.metrics, int8.card.fp32_metrics))
    lowest = 1 - 100 * MAX_RECALL_LOSS / exact
    name = f"Recall@1 of ONNX int8, trained, {len(data.test)} photos"
    return make_row(name, own, "ONNX fp32", exact, "%", at_least=lowest)


def decoding_rows(data: DataSet, embedder: Embedder, *, photos: int, turns: int) -> list[Row]:
    """What decoding large JPEGs at a reduced scale gains, and what it does to their vectors."""
    rule = embedder.bundle.preprocessing
    large = [jpeg for number in range(photos) for jpeg in (collage(data, number), enlarged(data, number))]
    reduced = np.stack([load_pixels(jpeg, rule) for jpeg in large])
    whole = np.stack([rule.apply(decode(jpeg)) for jpeg in large])
    cosines = np.sum(embedder.embed(reduced) * embedder.embed(whole), axis=1)
    rates = measure(
        {"reduced": lambda: load_pixels(large[0], rule), "whole": lambda: rule.apply(decode(large[0]))}, 1, turns
    )
    peer = "decoded whole"
    return [
        make_row(f"decoding a JPEG of {LARGE[0]} x {LARGE[1]}", rates["reduced"], peer, rates["whole"], "images/s"),
        make_row("vector of a large JPEG, mean", float(cosines.mean()), peer, 1.0, "cosine", at_least=0.995),
        make_row("vector of a large JPEG, lowest", float(cosines.min()), peer, 1.0, "cosine", at_least=0.99),
    ]


def collage(data: DataSet, number: int) -> bytes:
    """Photos at their own scale: as much detail as a large photo can have."""
    rng = np.random.default_rng(number)
    sheet = Image.new("RGB", LARGE)
    for left, top in product(range(0, LARGE[0], 256), range(0, LARGE[1], 256)):
        chosen = data.train[int(rng.integers(len(data.train)))]
        sheet.paste(decode(chosen.path.read_bytes()).resize((256, 256)), (left, top))
    return jpeg_of(sheet)


def enlarged(data: DataSet, number: int) -> bytes:
    """One photo of a test product, with the grain of a camera."""
    rng = np.random.default_rng(number)
    photo = decode(data.test[number].path.read_bytes()).resize(LARGE, Image.Resampling.BICUBIC)
    grain = rng.normal(0, 8, (LARGE[1], LARGE[0], 1)).astype(np.float32)
    return jpeg_of(Image.fromarray(np.clip(np.asarray(photo) + grain, 0, 255).astype(np.uint8)))


def jpeg_of(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90)
    return out.getvalue()


if __name__ == "__main__":
    main()
