"""The machine: usable cores and memory, processes, and locks between them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from index._util.deadline import seconds_left
from index.errors import LookalikeError


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that the process may use: its CPU affinity, limited by its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_cpu_quota(root))))


def memory_limit(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that the process may use: the machine's, limited by its control groups."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [*_group_values(root, "memory.max"), *_group_values(root, "memory.limit_in_bytes", "memory")]
    return min([machine, *(int(limit) for limit in limits if limit.strip() not in ("", "max"))])


def _cpu_quota(root: Path) -> float:
    """Returns the tightest CPU quota from the process's control group (version 2 or 1) up to the root, in cores."""
    limits = _group_values(root, "cpu.max")
    limits.append(" ".join(_text(root / f"sys/fs/cgroup/cpu/cpu.cfs_{part}_us") for part in ("quota", "period")))
    pairs = [limit.split() for limit in limits if limit.strip() and not limit.startswith(("max", "-1"))]
    shares = [int(quota) / int(period) for quota, period in pairs]
    return min(shares, default=float(os.cpu_count() or 1))


def _group_values(root: Path, name: str, controller: str = "") -> list[str]:
    """Returns a setting of the process's control group and of each parent group, empty where not set.

    With a controller the groups are those of version 1, which has a tree for each.
    """
    groups, own = root / "sys/fs/cgroup" / controller, ""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":/")
        if controller in controllers.split(","):
            own = path
    folder = groups / own
    return [_text(place / name) for place in (folder, *folder.parents) if place.is_relative_to(groups)]


def _text(path: Path) -> str:
    """Returns the contents of a kernel file, or an empty string where it does not exist."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


class LockError(LookalikeError):
    """A lock between processes cannot be taken: another one holds it, or locks do not work here."""

    kind = "lock"


@contextmanager
def exclusive_lock(path: Path, timeout: float = 60.0) -> Iterator[None]:
    """Holds the exclusive lock of a folder or a file, which is created.

    Others wait up to `timeout` seconds, and not beyond their deadline.

    The lock ends with its process.
    """
    with _open_lock(path) as descriptor:
        seconds = seconds_left(timeout)
        end = time.monotonic() + seconds
        while not try_lock(descriptor, path):
            if time.monotonic() > end:
                raise LockError(
                    f"{path.name} has been locked by another process for {seconds:.0f} s.",
                    "Wait until it ends, or stop it.",
                )
            time.sleep(0.02)
        yield


@contextmanager
def exclusive_lock_if_free(path: Path) -> Iterator[bool]:
    """Holds the same lock, or yields false when another process has it."""
    with _open_lock(path) as descriptor:
        yield try_lock(descriptor, path)


@contextmanager
def _open_lock(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise LockError(
            f"The lock {path.name} cannot be opened: {error.strerror}.",
            "Make its folder writable; check the free space and the limit of open files (ulimit -n).",
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Locks an open file until it is closed; returns false if another process holds the lock."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LockError(
            f"{path.name} cannot be locked: {error.strerror}.", "Use a local disk: network file systems have no locks."
        ) from None
    return True


def is_running(process: int) -> bool:
    """Returns whether a process with this id exists, whoever owns it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
