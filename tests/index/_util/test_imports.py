"""Tests of optional dependencies: the module, or the command that installs it."""

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


def test_error_inside_an_installed_module_is_not_hidden(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ValueError('broken inside')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="broken inside"):
        require("broken_package", "cpu")
