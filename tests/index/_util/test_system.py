"""The cores of a process are those it may use, not those of the machine."""

import os
from pathlib import Path

import pytest

from index._util.system import usable_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system's root, on a machine of 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
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
def test_a_quota_bounds_the_cores(machine: Path, files: dict[str, str], cores: int) -> None:
    write(machine, files)
    assert usable_cores(machine) == cores


def test_the_affinity_bounds_the_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    assert usable_cores(machine) == 2


def test_this_process_may_use_at_least_one() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
