"""The import rules: training -> index <- service, PyTorch only in training, no engine in the client, lazy names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lookalike

ROOT = Path(__file__).parent.parent
TORCH = {"torch", "torchvision", "timm", "pytorch_metric_learning", "onnx", "onnxscript"}
FORBIDDEN = {
    "index": {"training", "service", "lookalike"} | TORCH,
    "service": {"training", "lookalike"} | TORCH,
    "training": {"service", "lookalike"},
}


def imported_names(file: Path) -> set[str]:
    """Returns the top-level names of everything that a file imports, including inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_no_package_above_it(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    violations = {
        str(file.relative_to(ROOT)): names for file in files if (names := imported_names(file) & FORBIDDEN[package])
    }
    assert violations == {}


def loaded_modules(statement: str) -> set[str]:
    """Returns the modules that a statement loads in a fresh process."""
    probe = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    return set(subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.split())


def test_the_client_loads_neither_an_engine_nor_the_web_framework() -> None:
    loaded = loaded_modules("from lookalike import AsyncClient, Client")
    heavy = {"fastapi", "starlette", "uvicorn", "typer", "numpy", "PIL", "faiss", "onnxruntime", "sqlite3", *TORCH}
    assert loaded & heavy == set()
    shared = {"index", "index._util", "index._util.models", "index.dates", "index.errors", "index.items", "index.jobs"}
    shared |= {"index._util.addresses", "index._util.validation", "index.ingest", "index.ingest.options"}
    shared |= {"index.rankings", "service"}
    ours = {name for name in loaded if name.partition(".")[0] in FORBIDDEN}
    assert {name for name in ours - shared if not name.startswith(("service.client", "service.schemas"))} == set()


def test_importing_lookalike_loads_none_of_its_packages() -> None:
    loaded = {name.partition(".")[0] for name in loaded_modules("import lookalike")}
    assert loaded & {*FORBIDDEN, *TORCH, "typer", "pydantic", "httpx", "numpy"} == set()


def test_the_public_names_are_these() -> None:
    assert lookalike.__all__ == [
        *("AsyncClient", "Bundle", "Client", "Embedder", "Example", "Filter", "Gallery", "Item"),
        *("LookalikeError", "ProxyISALoss", "Ranking", "open_gallery"),
    ]
    for name in lookalike.__all__:
        assert getattr(lookalike, name).__name__ == name
    assert set(lookalike.__all__) <= set(dir(lookalike))
    with pytest.raises(AttributeError, match="module 'lookalike' has no attribute 'Clients'"):
        lookalike.Clients  # type: ignore[attr-defined]  # noqa: B018
