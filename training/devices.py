"""The device that training runs on."""

import ctypes
import sys

import torch

from training.errors import TrainingError


def choose_device(wanted: str = "auto") -> torch.device:
    """The best device of this machine, or the one asked for if it is there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, there in available.items() if there))
    if not available[wanted]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise TrainingError(f"The device {wanted} is not available here.", f"Available: {there}; or use auto.")
    return torch.device(wanted)


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed for the next step instead of giving it back to the system each time.

    A step on a CPU allocates and frees hundreds of large tensors; handing their pages back and forth cost a fifth of
    the time. Other C libraries and systems are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 2**31 - 1)
