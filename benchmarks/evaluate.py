"""Time and memory of exact retrieval metrics, against the bare product of all scores, FAISS and a calculator.

As many photos and classes as the test split of Stanford Online Products, as clustered unit vectors. All contenders
take turns in one process, and the shortest times are compared; memory is measured in a process of its own.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torch
from _table import Row, make_row, print_table, write_json
from numpy.typing import NDArray
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from index.evaluation.metrics import retrieval_metrics

SIZE = 512
FULL, QUICK, SMALL = (60_502, 11_316), (12_000, 2_244), (4_000, 748)
"""Photos and classes; the calculator's default ranks all neighbours of all photos, so it gets few photos."""
BLOCK = 1024
NAMES = ("precision_at_1", "mean_average_precision_at_r", "r_precision")
BARE, FLAT = "all scores, bare blocks (numpy)", "FAISS IndexFlatIP search"
BEST, DEFAULT = "AccuracyCalculator, k='max_bin_count'", "AccuracyCalculator, default k"

Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer photos: within a minute on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--memory", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory(*arguments.memory))
        return
    photos, classes = QUICK if arguments.quick else FULL
    times = measure(photos, classes, contenders(), rounds=2 if arguments.quick else 1)
    few = measure(*SMALL, {name: run for name, run in contenders().items() if name in ("ours", DEFAULT)}, rounds=1)
    rows = table(times, few, photos)
    command = [sys.executable, __file__, "--memory", str(photos), str(classes)]
    above = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rows.append(make_row("memory above the inputs", above, "limit", 1.5, "GiB", at_most=1))
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def table(times: dict[str, float], few: dict[str, float], photos: int) -> list[Row]:
    name, ours = f"all figures, {photos:,} photos", times["ours"]
    return [
        make_row(name, ours, BARE, times[BARE], "s", at_most=1.15),
        make_row(name, ours, FLAT, times[FLAT], "s"),
        make_row(name, ours, BEST, times[BEST], "s", at_most=1),
        make_row(f"all figures, {SMALL[0]:,} photos", few["ours"], DEFAULT, few[DEFAULT], "s", at_most=1),
    ]


def clustered_vectors(photos: int, classes: int) -> tuple[Vectors, Labels]:
    """Returns unit vectors around the centres of their classes, two or more photos per class, sorted by class."""
    rng = np.random.default_rng(0)
    extra = rng.integers(classes, size=photos - 2 * classes)
    labels = np.sort(np.concatenate([np.arange(classes), np.arange(classes), extra]))
    vectors = rng.standard_normal((classes, SIZE), np.float32)[labels]
    for start in range(0, photos, BLOCK):  # in blocks, so that making the inputs needs no more memory than they do
        part = vectors[start : start + BLOCK]
        part += 2.5 * rng.standard_normal(part.shape, np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return vectors, labels


def contenders() -> dict[str, Callable[[Vectors, Labels], object]]:
    def ours(vectors: Vectors, labels: Labels) -> object:
        return retrieval_metrics(vectors, labels)

    def bare(vectors: Vectors, labels: Labels) -> object:
        scores = np.empty((BLOCK, len(vectors)), np.float32)
        for start in range(0, len(vectors), BLOCK):
            rows = vectors[start : start + BLOCK].copy()
            np.matmul(rows, vectors.T, out=scores[: len(rows)])
        return scores

    def flat(vectors: Vectors, labels: Labels) -> object:
        index = faiss.IndexFlatIP(SIZE)
        index.add(vectors)
        return index.search(vectors, max(8, int(np.bincount(labels).max())) + 1)

    def calculator(k: str | None) -> Callable[[Vectors, Labels], object]:
        def run(vectors: Vectors, labels: Labels) -> object:
            sides = torch.from_numpy(vectors), torch.from_numpy(labels)
            return AccuracyCalculator(include=NAMES, k=k).get_accuracy(*sides)

        return run

    return {"ours": ours, BARE: bare, FLAT: flat, BEST: calculator("max_bin_count"), DEFAULT: calculator(None)}


def measure(
    photos: int, classes: int, runs: dict[str, Callable[[Vectors, Labels], object]], rounds: int
) -> dict[str, float]:
    """Returns the shortest time of each contender in seconds."""
    vectors, labels = clustered_vectors(photos, classes)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if name == DEFAULT and photos > SMALL[0]:
                continue
            begin = time.perf_counter()
            run(vectors, labels)
            times[name].append(time.perf_counter() - begin)
            print(f"{photos:,} photos, {name}: {times[name][-1]:.2f} s", file=sys.stderr)
    return {name: min(values) for name, values in times.items() if values}


def memory(photos: int, classes: int) -> float:
    """Returns the peak memory of the process above its memory with the inputs, in GiB."""
    vectors, labels = clustered_vectors(photos, classes)
    held = status("VmRSS")
    retrieval_metrics(vectors, labels)
    return (status("VmHWM") - held) / 2**20


def status(name: str) -> int:
    """Returns a value of /proc/self/status in KiB; getrusage would inherit the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
