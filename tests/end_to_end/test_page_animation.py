"""Tests of docs/page_animation.py over the small gallery."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support.tiny_gallery import tiny_photo

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "docs" / "page_animation.py"


def run_script(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    env = os.environ | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_the_recording_is_a_looping_animation_of_different_views(gallery: Path, tmp_path: Path) -> None:
    examples = gallery.with_name("examples")
    examples.mkdir()
    (examples / "red.jpg").write_bytes(tiny_photo(0, 6))
    out = tmp_path / "page.webp"
    done = run_script("--demo", gallery.parent, "--out", out, "--example", "red", "--filter", "green")
    assert done.returncode == 0, done.stderr
    with Image.open(out) as animation:
        assert animation.info["loop"] == 0
        frames = set()
        for number in range(getattr(animation, "n_frames", 1)):
            animation.seek(number)
            frames.add(animation.convert("RGB").tobytes())
    assert len(frames) > 20


def test_a_missing_demo_is_reported_with_the_command_that_builds_it(gallery: Path, tmp_path: Path) -> None:
    done = run_script("--demo", tmp_path, "--out", tmp_path / "page.webp")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path} has no demo. Build it: lookalike demo --no-serve --dir {tmp_path}\n"


def test_a_missing_browser_is_reported_with_the_package_to_install(tmp_path: Path) -> None:
    done = run_script("--demo", tmp_path, PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "Chromium or Chrome is not on the PATH. Install it: apt-get install chromium\n"
