"""The device that training runs on, and the precision that suits it."""

import copy
import ctypes
import sys

import torch
from torch import nn

from training.errors import TrainingError

MIN_COSINE = 0.98
"""Between vectors of one picture on the device and on the CPU; bfloat16 keeps about 0.999."""


def choose_device(wanted: str = "auto") -> torch.device:
    """Returns the best device of this machine, or the given one if it is available."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, there in available.items() if there))
    if not available[wanted]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise TrainingError(f"The device {wanted} is not available here.", f"Available: {there}; or use auto.")
    return torch.device(wanted)


def half_precision(device: torch.device) -> torch.dtype | None:
    """Returns bfloat16 where the GPU computes it natively, since it needs no scaling; else float16, on a CPU None.

    Older GPUs (T4, V100) only emulate bfloat16, slower than float32.
    """
    if device.type != "cuda":
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def set_precision(device: torch.device, *, cudnn_benchmark: bool, tf32: bool) -> None:
    """Sets how CUDA computes in 32 bits and whether cuDNN times its algorithms."""
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


@torch.no_grad()
def check_device(model: nn.Module, side: int, device: torch.device, half: torch.dtype | None) -> None:
    """Compares a device's vectors of random pixels with the CPU's before a long run."""
    if device.type == "cpu":
        return
    was_training = model.training
    model.eval()
    pixels = torch.randint(0, 256, (2, side, side, 3), dtype=torch.uint8)
    with torch.autocast(device.type, half, enabled=half is not None):
        found = model(pixels.to(device)).float().cpu()
    expected = copy.deepcopy(model).cpu()(pixels)
    model.train(was_training)
    check_vectors(found, expected, device)


def check_vectors(found: torch.Tensor, expected: torch.Tensor, device: torch.device) -> None:
    """Refuses a device whose vectors differ from the CPU's by more than its precision explains."""
    lowest = nn.functional.cosine_similarity(found, expected).min().item()
    if not lowest >= MIN_COSINE:
        raise TrainingError(
            f"The device {device} computes different vectors than the CPU (cosine {lowest:.4f}).",
            "Set device=cpu or mixed_precision=false, and check the driver and the installed PyTorch.",
        )


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next step instead of returning it to the system each time.

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
