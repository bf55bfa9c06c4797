"""Tests of distributed training: two processes that share a batch learn what one process learns from all of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny_gallery import COLOURS, tiny_photo, write_tiny_folder
from training.checkpoints import RunFolder

pytestmark = pytest.mark.slow

SETTINGS = (
    "epochs=2",
    "preprocessing={resize: 36, input_size: 32}",
    "sampling.batch_size=8",
    "optimiser.learning_rate=0.0003",
    "selection.validation_share=0",
    "device=cpu",
    "workers=0",
)
# The second case freezes the backbone in its first epoch, accumulates gradients and selects by held-out classes.
VARIANT = ("schedule.warm_up_epochs=1", "optimiser.accumulation=2", "selection.validation_share=0.4", "test_every=0")


@pytest.mark.parametrize(("loss", "variant"), [("proxy_isa", ()), ("proxy_anchor", VARIANT)])
def test_two_processes_equal_one(tmp_path: Path, loss: str, variant: tuple[str, ...]) -> None:
    photos = write_tiny_folder(tmp_path / "photos")
    settings = [part for setting in (*SETTINGS, f"loss.name={loss}", *variant) for part in ("--set", setting)]
    module = ["-m", "lookalike", "train", "--data", f"folder:{photos}", *settings]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # The queue filters from the first steps on, so that every part of the state of the loss is used.
    if loss == "proxy_isa":
        module += ["--set", "loss.settings={queue_start: 1, filter_start: 2, volume: 5}"]
    for name, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, *launcher, *module, "--out", str(tmp_path / name)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("to learn, batches of") == 1, "one process prints"
    first, second = (RunFolder(tmp_path / name) for name in ("one", "two"))
    assert second.result()["map@r"] == pytest.approx(first.result()["map@r"], abs=0.1), "each evaluates a part"
    assert first.history()[0]["recall@8"] == second.history()[0]["recall@8"], "in the order of the photos"
    one, two = first.load_checkpoint(), second.load_checkpoint()
    assert one and two
    for part in ("model", "loss"):
        for name, value in one["work"][part].items():
            other = two["work"][part][name]
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                # Sums over half batches round differently, and Adam turns the sign of a tiny gradient into a full step.
                assert (value - other).norm() <= 3e-3 * value.norm() + 1e-6, f"{part}.{name}"
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, other), f"{part}.{name}"


def test_two_processes_train_all_folds(tmp_path: Path) -> None:
    photos = write_tiny_folder(tmp_path / "photos")
    for number, colour in enumerate(COLOURS):  # twice as many classes, for eight to train on
        (photos / f"small-{colour}").mkdir()
        for view in range(4):
            (photos / f"small-{colour}" / f"{view}.jpg").write_bytes(tiny_photo(number, view + 4))
    settings = [part for setting in (*SETTINGS, "epochs=1") for part in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lookalike",
    ]
    command += ["train", "--data", f"folder:{photos}", "--protocol", "folds", "--out", str(tmp_path / "out"), *settings]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("concatenated") == 1, "one process evaluates"
    assert (tmp_path / "out" / "folds.json").is_file()
