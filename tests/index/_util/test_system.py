"""Tests of cores and memory under container limits, of locks and of process checks."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from index._util.system import (
    LockError,
    exclusive_lock,
    exclusive_lock_if_free,
    is_running,
    memory_limit,
    usable_cores,
)

MEMORY = 2**34
PAGE = 4096


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the root of the file system of a machine with 16 cores and 16 GiB of memory."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": PAGE, "SC_PHYS_PAGES": MEMORY // PAGE}.__getitem__)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
          "sys/fs/cgroup/pod/cpu.max": "400000 100000\n"}, 4),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
    ],
    ids=["none", "unlimited", "3.5 cores", "half a core", "a parent's limit", "version 1", "version 1, unlimited"],
)  # fmt: skip
def test_cpu_quota_limits_the_usable_cores(machine: Path, files: dict[str, str], cores: int) -> None:
    write(machine, files)
    assert usable_cores(machine) == cores


def test_cpu_affinity_limits_the_usable_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    assert usable_cores(machine) == 2


def test_this_process_may_use_at_least_one_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, MEMORY),
        ({"sys/fs/cgroup/memory.max": "max\n"}, MEMORY),
        ({"sys/fs/cgroup/memory.max": "134217728\n"}, 2**27),
        ({"sys/fs/cgroup/memory.max": f"{2**40}\n"}, MEMORY),
        ({"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/memory.max": "max\n",
          "sys/fs/cgroup/pod/memory.max": f"{2**30}\n"}, 2**30),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**28}\n"}, 2**28),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, MEMORY),
        ({"proc/self/cgroup": "7:memory:/shop/box\n3:cpu,cpuacct:/\n0::/\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/shop/box/memory.limit_in_bytes": f"{2**29}\n"}, 2**29),
        ({"proc/self/cgroup": "7:memory:/docker/abc\n",
          "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**28}\n"}, 2**28),
    ],
    ids=["none", "unlimited", "128 MiB", "more than the machine has", "a parent's limit", "version 1",
         "version 1, unlimited", "version 1, a group", "version 1, within a container"],
)  # fmt: skip
def test_memory_limit_is_that_of_the_container_or_the_machine(machine: Path, files: dict[str, str], limit: int) -> None:
    write(machine, files)
    assert memory_limit(machine) == limit


def test_memory_limit_of_this_process_is_plausible() -> None:
    assert 2**28 < memory_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_second_holder_of_a_lock_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        with exclusive_lock(tmp_path):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive_lock(tmp_path):
        thread.start()
        assert waiting.wait(10)
        thread.join(0.1)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from index._util.system import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "locked\n"
    process.kill()
    process.wait()
    process.stdout.close()
    with exclusive_lock(tmp_path):
        assert not is_running(process.pid)


def test_locks_that_do_not_work_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = exclusive_lock(tmp_path / "missing" / "file")
    with pytest.raises(LockError, match=r"file cannot be opened: No such file .* Make its folder"), missing:
        pass

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = exclusive_lock_if_free(tmp_path / "file")
    with pytest.raises(LockError, match=r"file cannot be locked: No locks available\. Use a local disk"), lock:
        pass


def test_a_lock_that_another_holds_is_not_waited_for(tmp_path: Path) -> None:
    with exclusive_lock_if_free(tmp_path / "file") as first, exclusive_lock_if_free(tmp_path / "file") as second:
        assert (first, second) == (True, False)


def raises(error: type[OSError]) -> Callable[[int, int], None]:
    def kill(process: int, signal: int) -> None:
        raise error

    return kill


def test_process_exists_whoever_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_running(os.getpid())
    monkeypatch.setattr(os, "kill", raises(PermissionError))
    assert is_running(1)
    monkeypatch.setattr(os, "kill", raises(ProcessLookupError))
    assert not is_running(1)
