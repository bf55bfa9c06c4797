"""The import rule: training -> index <- service, and PyTorch only in training."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH = {"torch", "torchvision", "timm", "pytorch_metric_learning", "onnx", "onnxscript"}
FORBIDDEN = {
    "index": {"training", "service", "lookalike"} | TORCH,
    "service": {"training", "lookalike"} | TORCH,
    "training": {"service", "lookalike"},
}


def imported(file: Path) -> set[str]:
    """The top-level names of everything a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(file.relative_to(ROOT)): found for file in files if (found := imported(file) & FORBIDDEN[package])}
    assert wrong == {}
