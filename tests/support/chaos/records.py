"""What a run measured, as JSON lines."""

import statistics
from collections import Counter

import numpy as np

from .expectations import Json
from .world import World


def make_start_record(world: World, capacity: float, rate: float) -> Json:
    """Returns the state before the first request of the mix, with the searches per second that it can and will get."""
    options = world.options
    return {
        "record": "start",
        "seed": options.seed,
        "workers": options.workers,
        "memory": world.service.memory()[0],
        "max_memory": options.max_memory,
        "open_files": world.service.open_files(),
        "capacity": round(capacity, 1),
        "rate": round(rate, 1),
    }


def make_end_record(world: World, *, memory: int, open_files: int, faults: int) -> Json:
    """Returns the state after the last request; `faults` is what the verification of the gallery found."""
    return {
        "record": "end",
        "memory": memory,
        "peak_memory": world.peak_memory,
        "open_files": open_files,
        "faults": faults,
        "acknowledged": world.expectations.acknowledged,
        "unknown": world.expectations.unknown,
        "violations": dict(world.violations),
        "examples": world.examples,
    }


def make_record(world: World, seconds: float) -> Json:
    """Returns what was measured since the last record."""
    stats = world.take_stats()
    kinds: dict[str, Counter[str]] = {}
    for (kind, status), count in stats.requests.items():
        kinds.setdefault(kind, Counter())[_status_class(status)] += count
    searches: Counter[int] = Counter()
    for (kind, status), count in stats.requests.items():
        if kind in ("load", "search"):
            searches[status] += count
    return {
        "record": "interval",
        "seconds": round(seconds, 1),
        "requests": {kind: dict(counts) for kind, counts in sorted(kinds.items())},
        "p50": _percentile(stats.latencies, 50),
        "p99": _percentile(stats.latencies, 99),
        "accepted": searches[200],
        "refused": searches[503],
        "faults": dict(stats.faults),
        "recoveries": [round(one, 2) for one in stats.recoveries],
        "health": max(stats.health, default=None),
        "acknowledged": world.expectations.acknowledged,
        "unknown": world.expectations.unknown,
        "violations": dict(world.violations),
        "examples": world.examples,
        "memory": int(statistics.median(stats.memory)) if stats.memory else None,
        "peak_memory": world.peak_memory,
    }


def _status_class(status: int) -> str:
    """Returns the class of a status; refusals and a full disk are not counted as failures of the service."""
    if status in (503, 507):
        return str(status)
    return f"{status // 100}xx" if status else "no answer"


def _percentile(values: list[float], share: float) -> float | None:
    return round(1000 * float(np.percentile(values, share)), 1) if values else None
