"""Images per second of a bundle against PyTorch, Lite0 with ImageNet weights, by default at 224 pixels, on all cores.

All contenders take turns in one process and their medians are compared, so that a busy machine slows all alike. The
photos are those of the sample shop; the large ones are collages of them, and single ones enlarged with noise. The
recall that int8 costs is measured on the model that the demo trains, with all photos of products that it never saw.
"""

import argparse
import io
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from _table import Row, make_row, print_table, write_json
from _timing import Name, rates
from numpy.typing import NDArray
from PIL import Image

from index._util.system import usable_cores
from index.embedding.embedder import Embedder
from index.embedding.images import decode, load_pixels
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.config import TrainingConfig, load_config
from training.console import TrainingProgressBar
from training.data import DataSet, default_shop, shop_data
from training.data.sample_shop import write_shop
from training.export import MAX_RECALL_LOSS, export_reduced, export_run
from training.loop import train

LARGE = (3412, 2560)
"""The smallest size that is decoded at an eighth: its short side keeps 1.25 times the pixels that are needed."""
EAGER, COMPILED = "PyTorch eager", "torch.compile"
COMPILED_BATCHES = (1, 8)
Turn = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller shop, fewer turns, no torch.compile, no recall")
    parser.add_argument("--input-size", type=int, default=224, metavar="PX", help="side of the images (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    torch.manual_seed(0)
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as folder:
        rows = compare(Path(folder), arguments.input_size, quick=arguments.quick)
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def compare(folder: Path, side: int, *, quick: bool) -> list[Row]:
    if quick:
        data = shop_data(write_shop(folder / "shop", products_per_family=3, photos_per_product=4))
    else:
        data = shop_data(write_shop(default_shop()))
    config = load_config(None, [f"preprocessing={{resize: {side * 8 // 7}, input_size: {side}}}"])
    model = EmbeddingModel(config.backbone, input_size=config.preprocessing.input_size).eval()
    fp32 = export_run(untrained_run(folder / "run", config, model), folder / "bundle", data.test[:16])
    [int8] = export_reduced(fp32, ["int8"], data)
    sizes, count, turns = ((1, 4), 16, 3) if quick else ((1, 2, 4, 8, 16, 32), 32, 15)
    files = [photo.path for photo in (*data.train, *data.test)][:count]
    pixels = np.stack([load_pixels(file.read_bytes(), fp32.preprocessing) for file in files])
    embedders = {"ONNX fp32": Embedder(fp32), "ONNX int8": Embedder(int8)}

    speeds = measure(speed_turns(model, embedders, pixels, sizes, compiled=not quick), count, turns)
    return [
        *speed_rows(speeds),
        *([] if quick else [recall_row(folder, data)]),
        *decoding_rows(data, embedders["ONNX fp32"], photos=1 if quick else 8, turns=turns),
    ]


def untrained_run(folder: Path, config: TrainingConfig, model: EmbeddingModel) -> RunFolder:
    """Returns a run that ended before its first step: pretrained weights and a random head."""
    run = RunFolder(folder)
    run.start(config, "sample", resume=False)
    run.save_best(model.state_dict())
    run.write_result({"epoch": 0, "untrained": {}})
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
    """Returns a turn for every contender and batch size, each over the same images."""
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
    """Returns the median images per second of each contender, after a warm-up turn."""
    for turn in turns.values():
        turn()
    return rates(turns, images, rounds)


def speed_rows(speeds: dict[tuple[str, int], float]) -> list[Row]:
    def rate_of(contender: str, batch: str) -> tuple[str, float]:
        by_size = {size: rate for (name, size), rate in speeds.items() if name == contender}
        size = 1 if batch == "batch 1" else max(by_size, key=by_size.__getitem__)
        return f"{contender}, batch {size}", by_size[size]

    rows = []
    for batch in ("batch 1", "best batch"):
        name, ours = rate_of("ONNX fp32", batch)
        rows.append(make_row(name, ours, *rate_of(EAGER, batch), "images/s", at_least=2))
        if (COMPILED, 1) in speeds:
            rows.append(make_row(name, ours, *rate_of(COMPILED, batch), "images/s"))
        name, reduced = rate_of("ONNX int8", batch)
        rows.append(make_row(name, reduced, *rate_of("ONNX fp32", batch), "images/s", at_least=1.5))
    return rows


def recall_row(folder: Path, data: DataSet) -> Row:
    """Measures the recall of a trained model at int8: nobody serves the untrained head of the other rows."""
    config = load_config(None, [], presets=["sample"])
    with TrainingProgressBar(config) as callback:
        train(config, data, folder / "trained", "sample", callback)
    fp32 = export_run(RunFolder(folder / "trained"), folder / "trained-bundle", data.test[:64])
    [int8] = export_reduced(fp32, ["int8"], data)
    reduced, exact = (100 * metrics["recall@1"] for metrics in (int8.card.metrics, int8.card.fp32_metrics))
    min_ratio = 1 - 100 * MAX_RECALL_LOSS / exact
    name = f"Recall@1 of ONNX int8, trained, {len(data.test)} photos"
    return make_row(name, reduced, "ONNX fp32", exact, "%", at_least=min_ratio)


def decoding_rows(data: DataSet, embedder: Embedder, *, photos: int, turns: int) -> list[Row]:
    """Measures decoding large JPEGs at a reduced scale: the speed-up, and the change of their vectors."""
    rule = embedder.bundle.preprocessing
    large = [jpeg for number in range(photos) for jpeg in (collage(data, number), enlarged(data, number))]
    reduced = np.stack([load_pixels(jpeg, rule) for jpeg in large])
    full = np.stack([rule.apply(decode(jpeg)) for jpeg in large])
    cosines = np.sum(embedder.embed(reduced) * embedder.embed(full), axis=1)
    speeds = measure(
        {"reduced": lambda: load_pixels(large[0], rule), "full": lambda: rule.apply(decode(large[0]))}, 1, turns
    )
    peer = "decoded whole"
    return [
        make_row(f"decoding a JPEG of {LARGE[0]} x {LARGE[1]}", speeds["reduced"], peer, speeds["full"], "images/s"),
        make_row("vector of a large JPEG, mean", float(cosines.mean()), peer, 1.0, "cosine", at_least=0.995),
        make_row("vector of a large JPEG, lowest", float(cosines.min()), peer, 1.0, "cosine", at_least=0.99),
    ]


def collage(data: DataSet, number: int) -> bytes:
    """Returns a large JPEG of photos at their own scale: as much detail as a large photo can have."""
    rng = np.random.default_rng(number)
    sheet = Image.new("RGB", LARGE)
    for left, top in product(range(0, LARGE[0], 256), range(0, LARGE[1], 256)):
        chosen = data.train[int(rng.integers(len(data.train)))]
        sheet.paste(decode(chosen.path.read_bytes()).resize((256, 256)), (left, top))
    return jpeg_of(sheet)


def enlarged(data: DataSet, number: int) -> bytes:
    """Returns one photo of a test product, enlarged, with camera noise."""
    rng = np.random.default_rng(number)
    photo = decode(data.test[number].path.read_bytes()).resize(LARGE, Image.Resampling.BICUBIC)
    noise = rng.normal(0, 8, (LARGE[1], LARGE[0], 1)).astype(np.float32)
    return jpeg_of(Image.fromarray(np.clip(np.asarray(photo) + noise, 0, 255).astype(np.uint8)))


def jpeg_of(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90)
    return out.getvalue()


if __name__ == "__main__":
    main()
