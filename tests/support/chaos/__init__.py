"""Chaos: real clients, kills, full disks and attacks against a real service, with a model of what must hold."""

from .engine import Report, run_chaos
from .world import ChaosOptions

__all__ = ["ChaosOptions", "Report", "run_chaos"]
