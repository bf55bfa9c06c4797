"""Optional dependencies, imported late so that a missing one is reported in one line with the command to install it."""

from importlib import import_module
from typing import Any

from index.errors import LookalikeError


class DependencyMissing(LookalikeError):
    """An optional package that the requested function needs is not installed."""

    kind = "dependency-missing"


def require(module: str, extra: str) -> Any:
    """Imports an optional module, or raises an error that names the extra of Lookalike to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DependencyMissing(f"{module} cannot be imported ({error}).", _install_command(extra)) from None


def onnxruntime() -> Any:
    """Returns ONNX Runtime, for the CPU or the GPU, whichever is installed."""
    return require("onnxruntime", "cpu")


def faiss() -> Any:
    """Returns FAISS, for the CPU or the GPU, whichever is installed."""
    # Called several times per search: faster than importlib. It waits while another thread imports the module.
    try:
        import faiss as module
    except ImportError:
        return require("faiss", "cpu")
    return module


def _install_command(extra: str) -> str:
    alternative = ', or "lookalike[gpu]" for an NVIDIA GPU' if extra == "cpu" else ""
    return f'Run: pip install "lookalike[{extra}]"{alternative}'
