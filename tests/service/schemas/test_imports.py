"""The wire types stay light: a client can import them without FastAPI, NumPy or an engine."""

import json
import subprocess
import sys

import pytest

HEAVY = {"fastapi", "starlette", "numpy", "PIL", "faiss", "onnxruntime", "torch", "uvicorn"}


@pytest.mark.parametrize("module", ["base", "items", "media", "problem", "rankings", "search", "status"])
def test_a_schema_imports_neither_fastapi_nor_an_engine(module: str) -> None:
    probe = f"import json, sys, service.schemas.{module}; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(output))
    assert f"service.schemas.{module}" in loaded
    assert not loaded & HEAVY
    assert not {name for name in loaded if name.startswith(("index.gallery", "index.embedding", "service.problems"))}
