"""Fixtures of the tests of reports."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_gallery import COLOURS, tiny_photo, write_tiny_folder
from tests.support.training_runs import SMALL_SETTINGS, RecordingCallback
from training.checkpoints import RunFolder
from training.cli import report
from training.config import load_config
from training.data import load_data
from training.loop import train


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products in folders; a test class has a photo of another, under a name that needs escaping."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("data") / "photos")
    one, other = sorted({photo.label for photo in load_data(f"folder:{folder}").test})[:2]
    (folder / one / "stray & <lost>.jpg").write_bytes(tiny_photo(COLOURS.index(other), 5))
    return folder


@pytest.fixture(scope="module")
def make_run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    def make(*changes: str, callback: RecordingCallback | None = None) -> RunFolder:
        out, spec = tmp_path_factory.mktemp("runs") / "run", f"folder:{photos}"
        config = load_config(None, [*SMALL_SETTINGS, *changes])
        try:
            train(config, load_data(spec), out, spec, callback or RecordingCallback())
        except KeyboardInterrupt:
            assert callback
        return RunFolder(out)

    return make


@pytest.fixture(scope="module")
def run(make_run: Callable[..., RunFolder]) -> RunFolder:
    """Proxy-ISA, whose queue and filter are on from the first step."""
    folder = make_run("loss.settings={queue_start: 0, filter_start: 0, volume: 8}")
    report(folder.path)
    return folder
