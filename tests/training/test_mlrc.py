"""Four models on class-disjoint folds: what each learns, what is measured, and how a killed run is resumed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from index.evaluation.metrics import retrieval_metrics
from lookalike import main
from tests.support.published_trees import TREES
from tests.support.tiny_gallery import write_tiny_folder
from tests.support.training_runs import SMALL_SETTINGS, RecordingCallback
from training.checkpoints import RunFolder
from training.config import TrainingConfig, load_config
from training.data import DataSet, Photo, load_data
from training.data.dataset import fold_out
from training.errors import TrainingError
from training.evaluation import embed_photos, load_model
from training.mlrc import FOLDS, measure_folds, train_folds


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    """All eight colours to learn, and the same photos under other names to measure on."""
    loaded = load_data(f"folder:{write_tiny_folder(tmp_path_factory.mktemp('data') / 'photos')}")
    photos = (*loaded.train, *loaded.test)
    return DataSet("tiny", photos, tuple(photo._replace(label=f"new {photo.label}") for photo in photos))


@pytest.fixture(scope="module")
def config() -> TrainingConfig:
    return load_config(None, [*SMALL_SETTINGS, "epochs=1", "cached_views=1", "test_every=0"])


def labels(photos: tuple[Photo, ...]) -> set[str]:
    return {photo.label for photo in photos}


def test_every_class_is_held_out_by_one_fold(data: DataSet) -> None:
    parts = [fold_out(data.train, fold, 4, seed=3) for fold in range(4)]
    for learned, held in parts:
        assert len(labels(held)) == 2 and not labels(learned) & labels(held)
        assert sorted(learned + held) == sorted(data.train)
    assert set.union(*(labels(held) for _, held in parts)) == labels(data.train)
    assert parts != [fold_out(data.train, fold, 4, seed=4) for fold in range(4)]


def test_folds_that_cannot_be_judged_are_refused(data: DataSet, config: TrainingConfig, tmp_path: Path) -> None:
    few = tuple(photo for photo in data.train if photo.label not in ("red", "blue"))
    with pytest.raises(TrainingError, match="6 classes with two or more photos: too few for 4 folds"):
        train_folds(config, DataSet("few", few, data.test), tmp_path / "runs", "x", RecordingCallback())
    assert not (tmp_path / "runs").exists()
    with pytest.raises(TrainingError, match=r"fold must be in 0\.\.3"):
        load_config(None, ["selection.fold=4"])


@pytest.mark.slow
def test_four_models_are_trained_once_and_measured_separated_and_concatenated(
    data: DataSet, config: TrainingConfig, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    with pytest.raises(KeyboardInterrupt):
        train_folds(config, data, out, "tiny", KilledInFold(1))
    assert [RunFolder(out / f"fold-{fold}").is_finished for fold in range(FOLDS)] == [True, False, False, False]
    with pytest.raises(TrainingError, match="--resume"):
        train_folds(config, data, out, "tiny", RecordingCallback())

    kept = (out / "fold-0" / "checkpoint.pt").stat().st_mtime_ns
    callback = RecordingCallback()
    runs = train_folds(config, data, out, "tiny", callback, resume=True)
    assert "Fold 0 is finished" in callback.messages
    assert (out / "fold-0" / "checkpoint.pt").stat().st_mtime_ns == kept, "not trained again"
    assert all(run.is_finished and run.config.selection.fold == fold for fold, run in enumerate(runs))
    assert all("validation.map@r" in run.history()[-1] for run in runs)

    result = measure_folds(runs, data, out, callback)
    assert result == json.loads((out / "folds.json").read_text())
    vectors = [embed_photos(data.test, *load_model(run.path)) for run in runs]
    names = [photo.label for photo in data.test]
    apart = [retrieval_metrics(one, names)["map@r"] for one in vectors]
    assert [fold["map@r"] for fold in result["folds"]] == pytest.approx(apart)
    assert result["separated"]["map@r"]["mean"] == pytest.approx(np.mean(apart))
    assert result["separated"]["map@r"]["deviation"] == pytest.approx(np.std(apart, ddof=1))
    together = retrieval_metrics(np.concatenate(vectors, axis=1), names)
    assert result["concatenated"] == pytest.approx(together)

    with pytest.raises(TrainingError, match="different settings"):
        train_folds(config.model_copy(update={"seed": 1}), data, out, "tiny", RecordingCallback(), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "size", "optimiser"), [("folds", 512, "adam"), ("mlrc", 128, "rmsprop")])
def test_a_protocol_overrides_the_data_sets_preset_and_the_user_overrides_it(
    protocol: str, size: int, optimiser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TREES["cars"](tmp_path / "cars")
    out = tmp_path / "runs"
    command = ["train", "--data", f"cars:{tmp_path / 'cars'}", "--out", str(out), "--protocol", protocol]
    small = "epochs=1 workers=0 backbone.weights=none sampling.batch_size=8 sampling.steps_per_epoch=1"
    settings = [*small.split(), "preprocessing={resize: 36, input_size: 32}"]
    monkeypatch.setattr(sys, "argv", ["lookalike", *command, *(f"--set={setting}" for setting in settings)])
    with pytest.raises(SystemExit, match="0"):
        main()
    config = RunFolder(out / "fold-3").config
    assert config.loss.settings["hardness_sensitivity"] == 0.4, "of the data set's preset"
    assert (config.backbone.embedding_size, config.optimiser.name) == (size, optimiser)
    assert config.selection.fold == 3 and config.sampling.batch_size == 8 and config.preprocessing.input_size == 32
    result = json.loads((out / "folds.json").read_text())
    assert len(result["folds"]) == FOLDS and result["concatenated"].keys() == result["separated"].keys()


class KilledInFold(RecordingCallback):
    """Ends the run as a kill would, in the first step of a fold."""

    def __init__(self, fold: int) -> None:
        super().__init__()
        self.fold = fold

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        if f"Fold {self.fold} of {FOLDS}, counted from 0" in self.messages:
            raise KeyboardInterrupt
