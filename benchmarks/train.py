"""Photos per second of the trainer against a plain PyTorch loop, and of cached stages against full fine-tuning.

Both sides train the same network with Proxy-Anchor and AdamW on the same files, with the same batch size, the same
number of decoding processes and all usable cores. They take turns epoch by epoch, each in its own process, and the
medians of all epochs but the first are compared. The plain loop's network alone, on a batch that stays in memory, shows
what photos cost: decoding a 12-MP photo takes about as long as the network.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from _table import Row, make_row, print_table, write_json
from _train_peers import PlainLoopProcess, Plan, plain_loop
from PIL import Image, ImageDraw

from index._util.system import usable_cores
from training.callbacks import Callback
from training.config import TrainingConfig, parse_config
from training.data import DataSet, Photo
from training.data.torch_datasets import decoding_workers
from training.loop import train

MODEL = "tf_efficientnet_lite0"
PEER, NETWORK = "plain PyTorch loop", "the plain loop without photos, one batch in memory"
SMALL_SIZE, LARGE_SIZE = (213, 160), (4000, 3000)
SMALL_SIDE, LARGE_SIDE = 128, 224
BATCH, PHOTOS_PER_CLASS, DISTINCT = 16, 4, 8
GRAIN = 7.5
"""Deviation of the noise, with which a 12-MP JPEG at quality 90 has 3 to 4 MB, as a phone's has."""
CACHED: dict[str, dict[str, Any]] = {
    "head only": {"cached_views": 1},
    "last stage and head": {"cached_views": 1, "cached_stage": -1},
    "last two stages and head": {"cached_views": 1, "cached_stage": -2},
}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    small: int
    """Small photos of an epoch."""
    large: int
    epochs: int
    """Measured epochs, after the first."""
    rounds: int
    """Runs of every cached stage."""


FULL, QUICK = Effort(small=512, large=240, epochs=3, rounds=2), Effort(small=64, large=32, epochs=1, rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer photos and epochs: within a minute on 2 cores")
    parser.add_argument("--photos", type=Path, metavar="DIR", help="JPEGs to use instead of the 12-MP ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="lookalike-bench-") as folder:
        place = Path(folder)
        small = make_data(draw_photos(place / "small", SMALL_SIZE, effort.small), effort.small, place)
        if arguments.photos:
            files, name = sorted(arguments.photos.rglob("*.jp*g")), f"photos of {arguments.photos.name}"
            if not files:
                parser.error(f"--photos {arguments.photos}: no JPEG in this folder")
        else:
            files, name = draw_photos(place / "large", LARGE_SIZE, effort.large), "12-MP JPEGs"
        large = make_data(files, effort.large, place)
        rows = [
            *compare(f"small photos, {SMALL_SIDE} px", small, SMALL_SIDE, effort, place / "run-small", at_least=1.0),
            *compare(f"{name}, {SMALL_SIDE} px", large, SMALL_SIDE, effort, place / "run-middle", at_least=2.0),
            *compare(f"{name}, {LARGE_SIDE} px", large, LARGE_SIDE, effort, place / "run-large", at_least=2.0),
            *compare_cached(small, effort, place / "cached"),
        ]
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def compare(name: str, data: DataSet, side: int, effort: Effort, run: Path, *, at_least: float) -> list[Row]:
    """Compares the trainer with the plain loop on the same photos, and with that loop without photos."""
    config = settings(side, epochs=effort.epochs + 1)
    run.mkdir()
    with plain_loop(plan(config, data), run) as peer:
        turns = Turns(peer)
        train(config, data, run / "ours", "benchmark", turns)
        ours, theirs, network = turns.rate, statistics.median(turns.peer_rates[1:]), peer.run("network")
    report(f"{name}: ours {ours:.1f}, plain loop {theirs:.1f}, without photos {network:.1f} photos per second")
    return [
        make_row(name, ours, PEER, theirs, "photos/s", at_least=at_least),
        make_row(name, ours, NETWORK, network, "photos/s"),
    ]


def compare_cached(data: DataSet, effort: Effort, folder: Path) -> list[Row]:
    """Compares training on cached activations with full fine-tuning; filling the cache is not counted."""
    full = "full fine-tuning"
    modes: dict[str, dict[str, Any]] = {full: {}, **CACHED}
    rates: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(effort.rounds):
        # In random order, so that no mode always runs after the same one.
        for name, overrides in random.sample(list(modes.items()), len(modes)):
            turns = Turns()
            config = settings(SMALL_SIDE, epochs=effort.epochs + 1, **overrides)
            train(config, data, folder / f"{name} {number}", "benchmark", turns)
            rates[name].append(turns.rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    report(", ".join(f"{name} {rate:.0f}" for name, rate in medians.items()) + " photos per second")
    return [
        make_row(f"cached, {name}, {SMALL_SIDE} px", medians[name], f"ours, {full}", medians[full], "photos/s")
        for name in CACHED
    ]


def settings(side: int, *, epochs: int, **others: Any) -> TrainingConfig:
    """Returns the settings of both sides: only what a plain loop has too."""
    return parse_config(
        {
            "backbone": {"name": MODEL, "weights": "none", "batch_norm": "learn"},
            "loss": {"name": "proxy_anchor"},
            "preprocessing": {"resize": side, "input_size": side, "interpolation": "bilinear"},
            "augmentation": {"crop_scale": [0.2, 1.0], "interpolation": "bilinear"},
            "sampling": {"kind": "random", "batch_size": BATCH},
            "optimiser": {"name": "adamw", "clip_value": None},
            "schedule": {"kind": "constant"},
            "selection": {"validation_share": 0},
            "epochs": epochs,
            "test_every": 0,
            "device": "cpu",
            "workers": decoding_workers(None, "cpu"),
            **others,
        }
    )


def plan(config: TrainingConfig, data: DataSet) -> Plan:
    """Returns the plan of the plain loop."""
    rate = config.optimiser.learning_rate
    return Plan(
        files=[str(photo.path) for photo in data.train],
        labels=[photo.label for photo in data.train],
        model=config.backbone.name,
        side=config.preprocessing.input_size,
        crop_scale=list(config.augmentation.crop_scale),
        batch_size=BATCH,
        workers=config.workers or 0,
        threads=usable_cores(),
        embedding_size=config.backbone.embedding_size,
        learning_rate=rate,
        proxy_rate=rate * config.optimiser.proxy_factor,
        weight_decay=config.optimiser.weight_decay,
    )


@dataclass
class Turns(Callback):
    """Callback of a run: collects its speed, and lets the peer train an epoch after each of the run's own."""

    peer: PlainLoopProcess | None = None
    rates: list[float] = field(default_factory=list)
    peer_rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median of the epochs after the first, in which processes start and memory is allocated."""
        return statistics.median(self.rates[1:])

    def on_epoch(self, record: dict[str, Any]) -> None:
        if record["epoch"]:
            self.rates.append(record["photos_per_second"])
            if self.peer:
                self.peer_rates.append(self.peer.run("epoch"))

    def on_message(self, text: str) -> None:
        report(text)


def draw_photos(directory: Path, size: tuple[int, int], count: int) -> list[Path]:
    """Writes JPEGs of coloured shapes with grain: a few distinct ones, linked under `count` names."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    grain = rng.normal(0, GRAIN, (size[1], size[0], 1)).astype(np.float32)
    files = []
    for number in range(count):
        files.append(directory / f"{number:04d}.jpg")
        if number >= DISTINCT:
            os.link(files[number % DISTINCT], files[-1])
            continue
        pixels = np.asarray(draw_shapes(size, rng), np.float32) + np.roll(grain, number * 997)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(files[-1], quality=90)
    mean = statistics.mean(file.stat().st_size for file in files[:DISTINCT])
    report(f"{count} photos of {size[0]} x {size[1]} pixels, {mean / 1e6:.2g} MB each")
    return files


def draw_shapes(size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Returns a background of soft colours with ellipses on it."""
    coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    image = coarse.resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        x, y, across, down = rng.random(4) * (*size, size[0] / 4, size[1] / 4)
        draw.ellipse((x, y, x + across, y + down), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image


def make_data(files: Sequence[Path], count: int, folder: Path) -> DataSet:
    """Returns `count` training photos in classes of a few, and four small test photos."""
    train = tuple(
        Photo(file, f"{number // PHOTOS_PER_CLASS:04d}")
        for number, file in zip(range(count), cycle(files), strict=False)
    )
    measured = sorted((folder / "small").iterdir())[:4]
    return DataSet("benchmark", train, tuple(Photo(file, f"test {n % 2}") for n, file in enumerate(measured)))


def report(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
