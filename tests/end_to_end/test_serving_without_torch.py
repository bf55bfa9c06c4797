"""What a server installs: the core and an engine, no PyTorch, and it serves."""

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.processes import lookalike, run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with the extra `cpu` alone; `make test` has made it already."""
    subprocess.run(["make", ".venv-serve/.complete"], cwd=ROOT, check=True, capture_output=True)
    return ROOT / ".venv-serve" / "bin" / "python"


def test_the_serving_environment_has_no_training_packages(python: Path) -> None:
    probe = "import importlib.util as u; print([n for n in ('torch', 'timm', 'onnx') if u.find_spec(n)])"
    told = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_it_indexes_serves_and_finds(python: Path, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    make_tiny_gallery(tmp_path / "gallery", bundle)
    source = tmp_path / "gallery-source" / "catalogue.csv"
    told = lookalike("reindex", source, "--gallery", tmp_path / "new", "--bundle", bundle, python=python)
    assert told.returncode == 0, told.stderr
    with run_server("serve", "--gallery", tmp_path / "new", "--bundle", bundle, python=python) as address:
        answer = httpx.post(f"{address}/v1/search", files={"image": tiny_photo(1, 3)}, params={"top": 3})
        assert answer.status_code == 200
        assert answer.json()["items"][0]["id"] == "ball-green"
        picture = httpx.get(address + answer.json()["items"][0]["image"]["url"])
        assert picture.headers["content-type"] == "image/jpeg"
        assert "<html" in httpx.get(address).text


@pytest.mark.parametrize(
    "verb", ["train --data sample --out run", "evaluate --model m --data sample", "export r --out b"]
)
def test_training_verbs_say_how_to_install_their_extra(python: Path, verb: str) -> None:
    told = lookalike(*verb.split(), python=python)
    assert told.returncode == 1
    assert "torch" in told.stderr and 'pip install "lookalike[cpu,train]"' in told.stderr


def test_a_missing_engine_is_told(tmp_path: Path, python: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    (tmp_path / "photo.jpg").write_bytes(tiny_photo(0, 0))
    blocked = "import sys; sys.modules['onnxruntime'] = None; import lookalike; lookalike.main()"
    line = ["search", tmp_path / "photo.jpg", "--gallery", gallery, "--bundle", bundle]
    told = subprocess.run([str(python), "-c", blocked, *map(str, line)], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert "lookalike[cpu]" in told.stderr
