"""The device that training runs on."""

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
