"""A disk that can be filled and freed while processes use it."""

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

DISK_BYTES = 64 * 1024 * 1024


class Disk(Protocol):
    """Where the gallery is."""

    folder: Path

    def fill(self) -> None:
        """Leaves no space."""
        ...

    def free(self) -> None:
        """Undoes `fill`."""
        ...


class SmallFileSystem:
    """A file system in memory that a ballast file fills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            size = 1 << 20
            while size >= 512:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


class LimitedFiles:
    """Limits the size of the files that the running service may write, where no file system can be mounted."""

    def __init__(self, folder: Path, processes: Callable[[], list[int]]) -> None:
        self.folder = folder
        self._processes = processes

    def fill(self) -> None:
        largest = max((path.stat().st_size for path in self.folder.rglob("*.sqlite*")), default=0)
        self._limit(max(1 << 16, largest // 2))

    def free(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        for process in self._processes():
            _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (size, hard))


@contextmanager
def small_file_system(folder: Path, size: int = DISK_BYTES) -> Iterator[SmallFileSystem | None]:
    """Mounts a file system in memory for as long as the context; yields None where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield SmallFileSystem(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
