"""Asking contenders: how much they recall, how many queries a second they answer, and how long each query takes."""

import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from _peers import LADDER, Contender, Peer
from _shop import Case, recall
from numpy.typing import NDArray

from index._util.system import usable_cores

THREADS = max(2, usable_cores())

Process = subprocess.Popen[str]


def recall_of(contender: Contender, cases: Sequence[Case]) -> float:
    return recall([contender.rows(contender.ask(case)) for case in cases], cases)


def tuned(peer: Peer, cases: Sequence[Case], wanted: float) -> str:
    """Sets the least effort that reaches a recall, or the largest, and says what it is."""
    for effort in LADDER:
        peer.tune(effort)
        reached = recall_of(peer, cases)
        if reached >= wanted:
            break
    return f"ef {effort}, recall {reached:.4f}"


def search_turn(
    contender: Contender, cases: Sequence[Case], pool: ThreadPoolExecutor | None = None
) -> Callable[[], object]:
    """One query after the other, in this thread or in each of the pool's."""

    def run(part: Sequence[Case]) -> None:
        for case in part:
            contender.ask(case)

    if pool is None:
        return partial(run, cases)
    parts = [cases[start::THREADS] for start in range(THREADS)]
    return lambda: list(pool.map(run, parts))


def rates(turns: Mapping[str, Callable[[], object]], queries: int, rounds: int) -> dict[str, float]:
    """The median of each contender's queries a second; their recall was measured before, so all are warm."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        # In any order: nobody always runs in the caches that the same neighbour left.
        for name, turn in random.sample(list(turns.items()), len(turns)):
            begin = time.perf_counter()
            turn()
            found[name].append(queries / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in found.items()}


def latencies(
    contender: Contender, cases: Sequence[Case], beside: Process | None = None, *, seconds: float = 0.0
) -> NDArray[np.float64]:
    """Seconds of each search, for some time or until a process ends."""
    found = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end if beside is None else beside.poll() is None:
        for case in random.sample(cases, 20):
            begin = time.perf_counter()
            contender.ask(case)
            found.append(time.perf_counter() - begin)
    return np.array(found)
