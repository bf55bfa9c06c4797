"""The machine: usable processor cores, other processes, and locks between them."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """The cores of the process's affinity (taskset, cpusets), as far as its control group's quota pays for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_quota(root))))


def _quota(root: Path) -> float:
    """The tightest quota from the process's control group up to the root, of version 2 or else of version 1."""
    groups = root / "sys/fs/cgroup"
    own = next((line[4:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::/")), "")
    folder = groups / own
    limits = [_text(place / "cpu.max") for place in (folder, *folder.parents) if place.is_relative_to(groups)]
    limits.append(" ".join(_text(groups / f"cpu/cpu.cfs_{part}_us") for part in ("quota", "period")))
    pairs = [limit.split() for limit in limits if limit.strip() and not limit.startswith(("max", "-1"))]
    shares = [int(quota) / int(period) for quota, period in pairs]
    return min(shares, default=float(os.cpu_count() or 1))


def _text(path: Path) -> str:
    """A file of the kernel's, or nothing where the kernel has none."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time is within: the others wait. A process that ends or is killed lets it go."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_running(process: int) -> bool:
    """Whether there is a process of this number, ours or somebody else's."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
