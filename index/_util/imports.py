"""The two engines that an extra brings, imported late so that a missing one is told in one line."""

from importlib import import_module
from typing import Any

from index.errors import LookalikeError

_REMEDY = 'Install one of the engine extras: pip install "lookalike[cpu]" (or "lookalike[gpu]").'


class EngineMissing(LookalikeError):
    """Neither of the extras `cpu` and `gpu` is installed."""

    kind = "engine-missing"


def onnxruntime() -> Any:
    """ONNX Runtime, for the CPU or the GPU, whichever is installed."""
    try:
        import onnxruntime as runtime
    except ImportError as error:
        raise EngineMissing(f"ONNX Runtime cannot be imported ({error}).", _REMEDY) from None
    return runtime


def faiss() -> Any:
    """FAISS, for the CPU or the GPU, whichever is installed."""
    try:
        import faiss as library
    except ImportError as error:
        raise EngineMissing(f"FAISS cannot be imported ({error}).", _REMEDY) from None
    return library


def require(module: str, *, extra: str) -> Any:
    """Imports a module that an optional extra of the package installs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise LookalikeError(
            f"{module} cannot be imported ({error}).", f'Run: pip install "lookalike[{extra}]"'
        ) from None
