"""Refit: the shipped model was trained on all products and carries the figures of the first run."""

from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from tests.support.processes import lookalike
from tests.support.tiny_gallery import COLOURS, write_tiny_folder
from training.checkpoints import RunFolder

pytestmark = pytest.mark.slow

SETTINGS = (
    "epochs=3",
    "preprocessing={resize: 36, input_size: 32}",
    "sampling.batch_size=8",
    "stop_epoch=2",
    "selection.validation_share=0",
    "test_every=0",
    "workers=0",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("refit")
    photos = write_tiny_folder(place / "photos")
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    done = lookalike("train", "--data", f"folder:{photos}", "--out", place / "run", "--refit", *settings)
    assert done.returncode == 0, done.stderr
    assert f"lookalike export {place / 'run' / 'refit'}" in done.stdout
    return place


def test_the_refit_learns_every_product_for_the_chosen_epochs(place: Path) -> None:
    first, second = RunFolder(place / "run"), RunFolder(place / "run" / "refit")
    state, before = second.load_checkpoint(), first.load_checkpoint()
    assert state and before
    assert len(state["work"]["loss"]["proxies"]) == len(COLOURS) > len(before["work"]["loss"]["proxies"])
    assert state["progress"]["epoch"] == first.result()["epoch"]
    assert second.config.epochs == first.config.epochs, "the schedule is the first run's"


def test_the_refit_keeps_the_first_runs_figures_marked(place: Path) -> None:
    first, second = RunFolder(place / "run").result(), RunFolder(place / "run" / "refit").result()
    assert second["recall@1"] == first["recall@1"] and second["untrained"] == first["untrained"]
    assert second["refit"] == {"products": len(COLOURS), "photos": 4 * len(COLOURS)}
    assert all("recall@1" not in record for record in RunFolder(place / "run" / "refit").history())


def test_the_bundle_marks_its_figures_as_those_of_the_first_run(place: Path) -> None:
    done = lookalike("export", place / "run" / "refit", "--out", place / "bundle")
    assert done.returncode == 0, done.stderr
    bundle = Bundle.load(place / "bundle")
    assert bundle.card.refit and bundle.card.metrics["recall@1"] == RunFolder(place / "run").result()["recall@1"]
    assert "was trained on all products" in (place / "bundle" / "README.md").read_text()
    measured = lookalike("evaluate", "--model", place / "bundle", "--data", f"folder:{place / 'photos'}")
    assert measured.returncode == 1
    assert f"3 of the 3 classes to measure were used to train {place / 'bundle'}" in measured.stderr
    included = ["--seen-classes", "include", "--data", f"folder:{place / 'photos'}"]
    measured = lookalike("evaluate", "--model", place / "bundle", *included)
    assert measured.returncode == 0 and "too high for new products" in measured.stderr


def test_a_refitted_run_is_not_measured_on_its_training_data(place: Path) -> None:
    for verb in (["evaluate", "--model"], ["report"]):
        data = ["--data", f"folder:{place / 'photos'}"]
        refused = lookalike(*verb, place / "run" / "refit", *data)
        assert refused.returncode == 1 and "3 of the 3 classes to measure" in refused.stderr, verb


def test_a_reduced_precision_of_a_refit_is_measured_on_request_and_marked(place: Path) -> None:
    arguments = ["export", str(place / "run" / "refit"), "--out", str(place / "both"), "--precision", "fp32,fp16"]
    refused = lookalike(*arguments)
    assert refused.returncode == 1 and "3 of the 3 classes" in refused.stderr
    assert not (place / "both").exists()
    done = lookalike(*arguments, "--seen-classes", "include")
    assert done.returncode == 0, done.stderr
    assert "too high for new products" in done.stdout
    assert "too high for new products" in (place / "both-fp16" / "README.md").read_text()
    assert "too high" not in (place / "both" / "README.md").read_text()


def test_the_untrained_backbone_is_not_refitted(tmp_path: Path) -> None:
    photos = write_tiny_folder(tmp_path / "photos")
    settings = [part for setting in (*SETTINGS, "epochs=0") for part in ("--set", setting)]
    done = lookalike("train", "--data", f"folder:{photos}", "--out", tmp_path / "run", "--refit", *settings)
    assert done.returncode == 0, done.stderr
    assert "There is no trained epoch to refit" in done.stdout
    assert f"lookalike export {tmp_path / 'run'} --out" in done.stdout and not (tmp_path / "run" / "refit").exists()


def test_an_unreadable_photo_is_left_out_of_the_refit_too(tmp_path: Path) -> None:
    photos = write_tiny_folder(tmp_path / "photos")
    (photos / "red" / "0.jpg").write_bytes(b"not a photo")
    settings = [part for setting in (*SETTINGS, "epochs=1") for part in ("--set", setting)]
    done = lookalike("train", "--data", f"folder:{photos}", "--out", tmp_path / "run", "--refit", *settings)
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path / "run" / "refit").result()["refit"]["photos"] == 4 * len(COLOURS) - 1


def test_a_finished_refit_is_not_trained_again(place: Path) -> None:
    checkpoint = place / "run" / "refit" / "checkpoint.pt"
    before = checkpoint.stat().st_mtime_ns
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    photos = f"folder:{place / 'photos'}"
    done = lookalike("train", "--data", photos, "--out", place / "run", "--resume", "--refit", *settings)
    assert done.returncode == 0, done.stderr
    assert checkpoint.stat().st_mtime_ns == before
    assert "refit" in RunFolder(place / "run" / "refit").result()
