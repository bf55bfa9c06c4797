"""Timing of contenders: the rate of each in turns, and the latency of single queries."""

import random
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from index._util.system import usable_cores

if TYPE_CHECKING:  # not at run time: they import FAISS, which benchmarks of PyTorch do not need
    from _peers import Contender
    from _shop import Case

THREADS = max(2, usable_cores())

Name = TypeVar("Name", bound=Hashable)
Process = subprocess.Popen[str]


def search_turn(
    contender: "Contender", cases: Sequence["Case"], pool: ThreadPoolExecutor | None = None
) -> Callable[[], object]:
    """Returns a function that runs one query after the other, in this thread or in each thread of the pool."""

    def run(part: Sequence["Case"]) -> None:
        for case in part:
            contender.search(case)

    if pool is None:
        return partial(run, cases)
    parts = [cases[start::THREADS] for start in range(THREADS)]
    return lambda: list(pool.map(run, parts))


def rates(turns: Mapping[Name, Callable[[], object]], count: int, rounds: int) -> dict[Name, float]:
    """Returns the median rate of each contender, whose turn processes `count` images or queries; all must be warm."""
    measured: dict[Name, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        # In random order: no contender always runs with the caches that the same other one left.
        for name, turn in random.sample(list(turns.items()), len(turns)):
            begin = time.perf_counter()
            turn()
            measured[name].append(count / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in measured.items()}


def latencies(
    contender: "Contender", cases: Sequence["Case"], during: Process | None = None, *, seconds: float = 0.0
) -> NDArray[np.float64]:
    """Returns the seconds of each search, for some time or while a process runs."""
    measured = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end if during is None else during.poll() is None:
        for case in random.sample(cases, 20):
            begin = time.perf_counter()
            contender.search(case)
            measured.append(time.perf_counter() - begin)
    return np.array(measured)
