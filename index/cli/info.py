"""The command `lookalike info`: what is installed, what the machine has, and which engine does what."""

import json
import logging
import platform
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from index._util.cuda import Gpus

_PACKAGES = (
    *("lookalike", "numpy", "pillow", "faiss-cpu", "faiss-gpu", "onnxruntime", "onnxruntime-gpu", "torch", "timm"),
    *("psycopg", "qdrant-client", "ray"),
)
_EXCLUSIVE = (("faiss-cpu", "faiss-gpu"), ("onnxruntime", "onnxruntime-gpu"))
_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8"),
    *("asimddp", "i8mm", "sve"),
)
"""Processor features that the engines use, as Linux names them on x86 and ARM."""


def info(
    bundle: Annotated[
        Path | None, typer.Option(help="Folder of a bundle: starts its model, and checks it on a GPU.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, processor, memory, GPUs and which engine does what: paste it into a bug report.

    Example: lookalike info --json
    """
    logging.getLogger("index").setLevel(logging.ERROR)  # the reasons of warnings are part of what is printed
    found = collect(bundle)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for title, section in found.items():
        typer.echo(f"{title}:")
        for name, value in section.items():
            typer.echo(f"  {name:<20}{', '.join(value) if isinstance(value, list) else value}")


def collect(bundle: Path | None = None, root: Path = Path("/")) -> dict[str, dict[str, Any]]:
    """Returns the sections; what cannot be found out is described by its error."""
    from index._util.cuda import find_gpus

    gpus = find_gpus()
    return {
        "versions": {**_versions(), "python": platform.python_version(), "system": platform.platform()},
        "machine": _machine(root),
        "gpus": _gpus(gpus),
        "engines": {
            "FAISS": _attempt(_faiss),
            "ONNX Runtime": _attempt(_providers),
            "model": _attempt(lambda: _model(bundle, gpus)),
            "search": _attempt(_search),
            "graphs": _attempt(_graphs),
            "training": _attempt(lambda: _training(gpus)),
        },
    }


def _attempt(describe: Callable[[], Any]) -> Any:
    try:
        return describe()
    except Exception as error:  # a report of what is broken must not break
        return f"{type(error).__name__}: {error}"


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    both = [f"{one} and {other}" for one, other in _EXCLUSIVE if one in found and other in found]
    return {**found, **({"problem": f"uninstall one of {'; '.join(both)}"} if both else {})}


def _machine(root: Path) -> dict[str, Any]:
    from index._util.system import memory_limit, usable_cores

    def read_processor() -> dict[str, str]:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        first = text.partition("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}

    processor = _attempt(read_processor)
    if isinstance(processor, str):
        processor = {"model name": processor}
    flags = processor.get("flags", processor.get("Features", "")).split()
    return {
        "processor": processor.get("model name", platform.machine()),
        "features": [feature for feature in _FEATURES if feature in flags],
        "cores": _attempt(lambda: usable_cores(root)),
        "memory limit": _attempt(lambda: _size(memory_limit(root))),
    }


def _gpus(gpus: "Gpus") -> dict[str, Any]:
    named = {
        f"GPU {number}": f"{gpu.name}, {_size(gpu.total)}, {_size(gpu.free)} free"
        for number, gpu in enumerate(gpus.found)
    }
    about = {"driver": gpus.driver, "CUDA": gpus.cuda, "problem": gpus.problem}
    return {**named, **{name: text for name, text in about.items() if text}}


def _faiss() -> str:
    from index._util.imports import faiss

    return f"compiled with {faiss().get_compile_options().strip()}"


def _providers() -> list[str]:
    from index._util.imports import onnxruntime

    return list(onnxruntime().get_available_providers())


def _model(bundle: Path | None, gpus: "Gpus") -> str:
    from index.embedding.bundle import Bundle
    from index.embedding.embedder import Embedder
    from index.embedding.gpu_sessions import CPU, CUDA

    if bundle:
        embedder = Embedder(Bundle.load(bundle))
        return f"{CPU}: {embedder.gpu_problem}" if embedder.gpu_problem else f"{embedder.provider}, equal to the CPU"
    if CUDA not in _providers():
        return f"{CPU}: the installed ONNX Runtime is for CPUs"
    return f"{CPU}: {gpus.problem}" if gpus.problem else f"{CUDA}, not checked: use --bundle"


def _search() -> str:
    from index.gallery.vectors.faiss.gpu import POOL

    if device := POOL.device():
        return f"{device.name}, equal to the CPU"
    return f"cpu: {POOL.problem or 'the installed FAISS is for CPUs'}"


def _graphs() -> str:
    from index._util.imports import faiss
    from index.gallery.vectors.faiss.gpu import POOL

    if not hasattr(faiss(), "GpuIndexCagra"):
        return "cpu: the installed FAISS has no CAGRA"
    return "CAGRA on the GPU" if POOL.device() else f"cpu: {POOL.problem}"


def _training(gpus: "Gpus") -> str:
    if find_spec("torch") is None:
        return "PyTorch is not installed"
    if gpus.problem:  # importing PyTorch takes seconds
        return f"cpu: {gpus.problem}"
    torch = import_module("torch")
    return "cuda" if torch.cuda.is_available() else f"cpu: PyTorch {torch.__version__} finds no GPU"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
