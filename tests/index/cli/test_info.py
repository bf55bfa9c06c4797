"""`lookalike info`: what it finds out, and that it works where parts are missing or broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from index._util.cuda import Gpu, Gpus
from index.cli.info import collect
from tests.support.gpus import FakeDevice, pool_of
from tests.support.processes import lookalike
from tests.support.tiny_bundle import make_tiny_bundle

CPU_INFO = "processor\t: 0\nmodel name\t: Example CPU 9000\nflags\t\t: fpu avx2 avx512f avx512_vnni\n\nprocessor\t: 1\n"


def test_info_prints_the_same_as_text_and_as_json() -> None:
    text, found = lookalike("info"), json.loads(lookalike("info", "--json").stdout)
    assert text.returncode == 0 and not text.stderr
    assert list(found) == ["versions", "machine", "gpus", "engines"]
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    for title, section in found.items():
        assert f"{title}:" in text.stdout
        assert all(f"  {name:<20}" in text.stdout for name in section)


def test_the_processor_is_described_by_what_engines_use(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(CPU_INFO)
    machine = collect(root=tmp_path)["machine"]
    assert machine["processor"] == "Example CPU 9000"
    assert machine["features"] == ["avx2", "avx512f", "avx512_vnni"]
    assert "FileNotFoundError" in collect(root=tmp_path / "nowhere")["machine"]["processor"]


def test_gpus_are_listed_with_the_engines_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus((Gpu("Example GPU", 8 << 30, 3 << 30),), cuda="13.0", driver="580.1")
    monkeypatch.setattr("index._util.cuda.find_gpus", lambda: gpus)
    monkeypatch.setattr("index.gallery.vectors.faiss.gpu.POOL", pool_of(FakeDevice()))
    found = collect()
    assert found["gpus"] == {"GPU 0": "Example GPU, 8.0 GiB, 3.0 GiB free", "driver": "580.1", "CUDA": "13.0"}
    assert found["engines"]["search"] == "Fake GPU, Fake GPU, equal to the CPU"


def test_a_gpu_that_fails_its_check_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(lambda positions: positions[:, ::-1] * 0)
    monkeypatch.setattr("index.gallery.vectors.faiss.gpu.POOL", pool_of(device))
    assert collect()["engines"]["search"] == "cpu: the GPU's neighbours are not the nearest ones"


def test_a_bundle_is_started(tmp_path: Path) -> None:
    assert collect(make_tiny_bundle(tmp_path / "bundle"))["engines"]["model"].startswith("CPUExecutionProvider: ")
    assert "No bundle at" in collect(tmp_path / "nothing")["engines"]["model"]


def test_engines_that_are_not_installed_are_reported() -> None:
    hide = "import sys; sys.modules.update(faiss=None, onnxruntime=None)"
    script = f"{hide}; from index.cli.info import collect; import json; print(json.dumps(collect()['engines']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    engines = json.loads(done.stdout)
    for name in ("FAISS", "ONNX Runtime", "model", "graphs"):
        assert "pip install" in engines[name]
