"""Tests of the environment of a server: the core and an engine, without PyTorch."""

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.processes import lookalike, run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python() -> Path:
    """Returns the interpreter of an environment with the extra `cpu` alone, which `make test` has installed."""
    subprocess.run(["make", ".venv-serve/.complete"], cwd=ROOT, check=True, capture_output=True)
    return ROOT / ".venv-serve" / "bin" / "python"


def test_serving_environment_has_no_training_packages(python: Path) -> None:
    probe = "import importlib.util as u; print([n for n in ('torch', 'timm', 'onnx') if u.find_spec(n)])"
    result = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_serving_environment_indexes_and_serves(python: Path, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    make_tiny_gallery(tmp_path / "gallery", bundle)
    source = tmp_path / "gallery-source" / "catalogue.csv"
    result = lookalike("reindex", source, "--gallery", tmp_path / "new", "--bundle", bundle, python=python)
    assert result.returncode == 0, result.stderr
    with run_server("serve", "--gallery", tmp_path / "new", "--bundle", bundle, python=python) as address:
        response = httpx.post(f"{address}/v1/search", files={"image": tiny_photo(1, 3)}, params={"limit": 3})
        assert response.status_code == 200
        assert response.json()["items"][0]["id"] == "ball-green"
        picture = httpx.get(address + response.json()["items"][0]["image"]["url"])
        assert picture.headers["content-type"] == "image/jpeg"
        assert "<html" in httpx.get(address).text


@pytest.mark.parametrize(
    "command", ["train --data sample --out run", "evaluate --model m --data sample", "export r --out b"]
)
def test_training_commands_name_the_extra_to_install(python: Path, command: str) -> None:
    result = lookalike(*command.split(), python=python)
    assert result.returncode == 1
    assert "torch" in result.stderr and 'pip install "lookalike[cpu,train]"' in result.stderr


def test_missing_engine_is_reported(tmp_path: Path, python: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    (tmp_path / "photo.jpg").write_bytes(tiny_photo(0, 0))
    blocked = "import sys; sys.modules['onnxruntime'] = None; import lookalike; lookalike.main()"
    arguments = ["search", tmp_path / "photo.jpg", "--gallery", gallery, "--bundle", bundle]
    result = subprocess.run(
        [str(python), "-c", blocked, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "lookalike[cpu]" in result.stderr
