"""Tests of optional dependencies: the module, or the command that installs it."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from index._util.imports import DependencyMissing, faiss, onnxruntime, require


def test_installed_module_is_returned() -> None:
    assert require("json.decoder", "none") is sys.modules["json.decoder"]


def test_missing_module_is_reported_with_the_command_that_installs_it() -> None:
    with pytest.raises(DependencyMissing) as caught:
        require("no_such_package", "parquet")
    assert "no_such_package" in caught.value.problem
    assert caught.value.remedy == 'Run: pip install "lookalike[parquet]"'


@pytest.mark.parametrize(("name", "engine"), [("onnxruntime", onnxruntime), ("faiss", faiss)])
def test_missing_engine_names_the_extras_of_cpu_and_gpu(
    name: str, engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine().__name__ == name
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyMissing, match=name) as caught:
        engine()
    assert 'pip install "lookalike[cpu]"' in caught.value.remedy and '"lookalike[gpu]"' in caught.value.remedy


def test_threads_that_import_the_engine_at_once_all_get_the_complete_module() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from index._util.imports import faiss
with ThreadPoolExecutor(8) as threads:
    for index in [threads.submit(lambda: faiss().IndexFlatIP(4)) for _ in range(8)]:
        assert index.result().d == 4
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_error_inside_an_installed_module_is_not_hidden(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ValueError('broken inside')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="broken inside"):
        require("broken_package", "cpu")
