"""A small run on real weights: it learns, and resumes after a kill with the same result."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.tiny_gallery import write_tiny_folder
from tests.support.training_runs import SMALL_SETTINGS, RecordingCallback
from training.backbones import EmbeddingModel
from training.checkpoints import RunFolder
from training.config import TrainingConfig, load_config
from training.data import DataSet, load_data
from training.errors import TrainingError
from training.evaluation import Evaluator, load_model, measure
from training.loop import train
from training.optimizers import rate_factor
from training.seen_classes import SeenClasses


def same_weights(first: RunFolder, second: RunFolder) -> bool:
    """Compares model and loss bit for bit, also counters, queue and thresholds."""
    left, right = first.load_checkpoint(), second.load_checkpoint()
    assert left and right
    pairs = [(left["work"][part], right["work"][part]) for part in ("model", "loss")]
    return all(
        torch.equal(value, other[name])
        for one, other in pairs
        for name, value in one.items()
        if isinstance(value, torch.Tensor)
    )


def measure_by_epoch(scores: list[float]) -> Callable[..., dict[str, float]]:
    """Returns an evaluator's method whose figures are given: two of each, for validation and test."""
    remaining = [score for score in scores for _ in range(2)]
    return lambda *_, **__: {"recall@1": 1.0, "map@r": remaining.pop(0)}


def test_a_run_reports_every_epoch_and_step(data: DataSet, config: TrainingConfig, tmp_path: Path) -> None:
    callback = RecordingCallback()
    train(config, data, tmp_path / "run", "folder:photos", callback)
    steps = len(data.train) // 8
    assert callback.epochs == [0, 1, 2]
    assert callback.steps == [(epoch, step) for epoch in range(2) for step in range(1, steps + 1)]
    assert any("never acts" in text for text in callback.messages), "the decay does not begin in so short a run"


def test_the_records_of_a_run_hold_its_figures(run: RunFolder, config: TrainingConfig, data: DataSet) -> None:
    history = run.history()
    assert [record["epoch"] for record in history] == [0, 1, 2]
    for record in history:
        assert 0 < record["recall@1"] <= record["recall@2"] <= record["recall@4"] <= record["recall@8"] <= 1
        assert 0 < record["map@r"] <= 1
    figures = measure(data.test, *load_model(run.path))
    assert {name: history[-1][name] for name in figures} == pytest.approx(figures, abs=1e-6)
    assert run.config == config and run.data == "folder:photos"
    result = run.result()
    assert {name: result[name] for name in history[-1]} == history[-1], "without validation the last epoch is kept"
    assert result["untrained"]["recall@1"] == history[0]["recall@1"] and result["epochs"] == 2
    best = max(history[1:], key=lambda record: record["map@r"])
    assert result["best_on_test"] == {"epoch": best["epoch"]} | {k: best[k] for k in result["untrained"]}


def test_an_epochs_record_holds_the_means_of_its_steps(run: RunFolder, config: TrainingConfig, data: DataSet) -> None:
    """TensorBoard has the single steps; the learning rate follows the schedule."""
    steps = len(data.train) // 8
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    losses = [event.value for event in events.Scalars("step/loss")]
    assert len(losses) == 2 * steps and min(losses) > 0
    factor = rate_factor(config, steps)
    for record in run.history()[1:]:
        own = range((record["epoch"] - 1) * steps, record["epoch"] * steps)
        assert record["loss"] == pytest.approx(np.mean([losses[step] for step in own]), rel=1e-5)
        rates = [config.optimiser.learning_rate * factor(step) for step in own]
        assert record["learning_rate"] == pytest.approx(np.mean(rates))
        assert sum(record[share] for share in ("outlier", "informative", "easy")) == pytest.approx(1)


@pytest.mark.parametrize("kill", [{"stop_after_epoch": 1}, {"stop_after_step": (1, 2)}])
def test_a_killed_run_resumes_to_the_same_weights(
    run: RunFolder, data: DataSet, config: TrainingConfig, tmp_path: Path, kill: dict[str, Any]
) -> None:
    often = config.model_copy(update={"checkpoint_minutes": 1e-9})
    with pytest.raises(KeyboardInterrupt):
        train(often, data, tmp_path / "killed", "folder:photos", RecordingCallback(**kill))
    callback = RecordingCallback()
    train(often, data, tmp_path / "killed", "folder:photos", callback, resume=True)
    assert callback.steps[0] > (0, 1), "not from the beginning"
    assert same_weights(RunFolder(tmp_path / "killed"), run)
    times = ("photos_per_second",)
    resumed, undisturbed = (
        [{name: value for name, value in record.items() if name not in times} for record in folder.history()]
        for folder in (RunFolder(tmp_path / "killed"), run)
    )
    assert resumed == undisturbed


def test_a_finished_run_is_only_continued_with_resume(run: RunFolder, data: DataSet, config: TrainingConfig) -> None:
    with pytest.raises(TrainingError, match="--resume"):
        train(config, data, run.path, "folder:photos", RecordingCallback())
    callback = RecordingCallback()
    assert train(config, data, run.path, "folder:photos", callback, resume=True) == run.result()
    assert callback.steps == [], "nothing was left to do"


def test_held_out_classes_choose_the_epoch_and_end_the_run(data: DataSet, tmp_path: Path) -> None:
    """The learning rate is so high that the model gets worse: the untrained backbone is kept, patience ends the run."""
    wild = [
        *SMALL_SETTINGS,
        "epochs=9",
        "selection={validation_share: 0.4, patience: 2, metric: map@r}",
        "test_every=0",
    ]
    config = load_config(None, [*wild, "optimiser.learning_rate=0.1"])
    callback = RecordingCallback()
    result = train(config, data, tmp_path / "run", "folder:photos", callback)
    history = RunFolder(tmp_path / "run").history()
    scores = {record["epoch"]: record["validation.map@r"] for record in history[1:]}
    best = max(scores, key=lambda epoch: (scores[epoch], -epoch))
    assert result["epoch"] == 0 and history[0]["validation.map@r"] > scores[best]
    assert "Training did not help; the untrained backbone is better" in result["remark"]
    assert result["remark"] in callback.messages
    assert max(scores) == best + 2 < 9, "the run ends when its patience of 2 epochs is used up"
    assert ["recall@1" in record for record in history] == [True] + [False] * len(scores), "tested only at the end"
    assert result["recall@1"] == pytest.approx(measure(data.test, *load_model(tmp_path / "run"))["recall@1"])


def test_a_trained_epoch_is_kept_if_it_beats_the_untrained_backbone(data: DataSet, tmp_path: Path) -> None:
    settings = [*SMALL_SETTINGS, "selection.validation_share=0.4", "epochs=4"]
    config = load_config(None, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "measure", measure_by_epoch([0.2, 0.1, 0.3, 0.25, 0.3]))
        result = train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    assert result["epoch"] == 2 and "remark" not in result
    assert "head.weight" in RunFolder(tmp_path / "run").model().state_dict()


def test_without_epochs_the_run_holds_the_untrained_backbone(data: DataSet, tmp_path: Path) -> None:
    for share in ("0", "0.4"):
        run = RunFolder(tmp_path / share)
        config = load_config(None, [*SMALL_SETTINGS, "epochs=0", f"selection.validation_share={share}"])
        result = train(config, data, run.path, "folder:photos", RecordingCallback())
        assert result["epoch"] == 0 and "Nothing was trained" in result["remark"]
        assert run.model().dimension == 1280, "the features of the backbone, without a random head"
        measured = measure(data.test, *load_model(run.path))
        assert measured == pytest.approx({name: result[name] for name in measured}, abs=1e-6)
        longer = config.model_copy(update={"epochs": 1})
        train(longer, data, run.path, "folder:photos", RecordingCallback(), resume=True)
    assert RunFolder(tmp_path / "0").model().dimension == 512, "without validation the newest epoch is kept"


def test_a_run_remembers_its_classes(data: DataSet, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    config = load_config(None, [*SMALL_SETTINGS, "epochs=1", "selection.validation_share=0.4"])
    train(config, data, run.path, "folder:photos", RecordingCallback())
    labels = json.loads((run.path / "classes.json").read_text())
    assert {*labels["train"], *labels["validation"]} == {photo.label for photo in data.train}
    assert set(labels["test"]) == {photo.label for photo in data.test} and len(labels["validation"]) == 2
    seen = run.seen_classes(run.path / "checkpoint.pt")
    assert seen == SeenClasses.of([*labels["train"], *labels["validation"]])
    kept = labels["validation"] if not run.result()["epoch"] else [*labels["train"], *labels["validation"]]
    assert run.seen_classes() == SeenClasses.of(kept)


def test_the_head_alone_is_trained_on_cached_features(data: DataSet, tmp_path: Path) -> None:
    config = load_config(None, [*SMALL_SETTINGS, "cached_views=2", "epochs=4"])
    train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    run = RunFolder(tmp_path / "run")
    assert [record["epoch"] for record in run.history()] == [0, 1, 2, 3, 4]
    torch.manual_seed(config.seed)
    before, after = EmbeddingModel(config.backbone, input_size=32).state_dict(), run.model().state_dict()
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("backbone."))
    measured = measure(data.test, *load_model(run.path))
    assert measured["map@r"] == pytest.approx(run.result()["map@r"], abs=0.02), "like the complete model"


@pytest.mark.parametrize("loss", ["proxy_anchor", "triplet", "soft_triple"])
def test_a_baseline_loss_trains_by_its_name(data: DataSet, tmp_path: Path, loss: str) -> None:
    sampling = "sampling={kind: balanced, batch_size: 8, photos_per_class: 2}"
    config = load_config(None, [*SMALL_SETTINGS, sampling, f"loss.name={loss}", "epochs=1"])
    record = train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    assert math.isfinite(record["loss"])


def test_the_backbone_does_not_change_during_the_warm_up(data: DataSet, tmp_path: Path) -> None:
    config = load_config(None, [*SMALL_SETTINGS, "epochs=1", "schedule.warm_up_epochs=1"])
    train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    torch.manual_seed(config.seed)
    before = EmbeddingModel(config.backbone, input_size=32).state_dict()
    after = RunFolder(tmp_path / "run").model().state_dict()
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert torch.equal(before["backbone.conv_stem.weight"], after["backbone.conv_stem.weight"])


def test_training_moves_the_weights_and_leaves_batch_norm_statistics(run: RunFolder, config: TrainingConfig) -> None:
    torch.manual_seed(config.seed)
    before, after = EmbeddingModel(config.backbone, input_size=32).state_dict(), run.model().state_dict()
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert not torch.equal(before["backbone.conv_stem.weight"], after["backbone.conv_stem.weight"])
    assert torch.equal(before["backbone.bn1.running_mean"], after["backbone.bn1.running_mean"])


@pytest.mark.slow
def test_a_finished_run_continues_for_more_epochs(data: DataSet, config: TrainingConfig, tmp_path: Path) -> None:
    """With a constant rate it ends with the weights of one long run."""
    constant = load_config(None, [*SMALL_SETTINGS, "schedule.kind=constant", "loss.settings.volume=9"])
    longer = constant.model_copy(update={"epochs": 3, "checkpoint_minutes": 5.0})
    train(longer, data, tmp_path / "long", "folder:photos", RecordingCallback())
    train(constant, data, tmp_path / "continued", "folder:photos", RecordingCallback())
    result = train(longer, data, tmp_path / "continued", "folder:photos", RecordingCallback(), resume=True)
    assert result["epochs"] == 3 and RunFolder(tmp_path / "continued").config == longer
    assert same_weights(RunFolder(tmp_path / "continued"), RunFolder(tmp_path / "long"))


def test_a_run_keeps_its_volume_when_it_continues_for_longer(data: DataSet, tmp_path: Path) -> None:
    short = load_config(None, [*SMALL_SETTINGS, "epochs=1"])
    volumes = []
    for config in (short, short.model_copy(update={"epochs": 2})):
        train(config, data, tmp_path / "run", "folder:photos", RecordingCallback(), resume=True)
        state = RunFolder(tmp_path / "run").load_checkpoint()
        assert state
        volumes.append(state["work"]["loss"]["hardness._extra_state"]["volume"])
    assert volumes[0] == volumes[1]


def test_a_run_is_not_continued_on_other_photos(config: TrainingConfig, tmp_path: Path) -> None:
    """A renamed class changes the split: trained classes would be measured."""
    photos = write_tiny_folder(tmp_path / "photos")
    with pytest.raises(KeyboardInterrupt):
        train(
            config,
            load_data(f"folder:{photos}"),
            tmp_path / "run",
            "folder:photos",
            RecordingCallback(stop_after_epoch=2),
        )
    (photos / "purple").rename(photos / "aubergine")
    with pytest.raises(TrainingError, match="have changed since the run"):
        train(
            config, load_data(f"folder:{photos}"), tmp_path / "run", "folder:photos", RecordingCallback(), resume=True
        )


@pytest.mark.slow
def test_a_loss_that_draws_random_numbers_resumes_to_the_same_weights(data: DataSet, tmp_path: Path) -> None:
    """Also when the activations were cached by an earlier run."""
    config = load_config(None, [*SMALL_SETTINGS, "loss.name=margin", "cached_views=2", "cached_stage=-1", "epochs=3"])
    often = config.model_copy(update={"checkpoint_minutes": 1e-9})
    with pytest.raises(KeyboardInterrupt):
        train(often, data, tmp_path / "killed", "folder:photos", RecordingCallback(stop_after_step=(1, 1)))
    train(often, data, tmp_path / "killed", "folder:photos", RecordingCallback(), resume=True)
    train(config, data, tmp_path / "undisturbed", "folder:photos", RecordingCallback())
    assert same_weights(RunFolder(tmp_path / "killed"), RunFolder(tmp_path / "undisturbed"))


def test_a_run_that_diverges_ends_with_the_step_and_the_remedy(data: DataSet, tmp_path: Path) -> None:
    config = load_config(
        None, [*SMALL_SETTINGS, "optimiser.learning_rate=1e30", "optimiser.clip_value=null", "epochs=5"]
    )
    with pytest.raises(TrainingError, match=r"the loss became nan at step \d+ of epoch \d.*learning_rate"):
        train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())


def test_accumulated_batches_make_one_step(data: DataSet, tmp_path: Path) -> None:
    """Two batches make one update; the last batch of an epoch makes its own."""
    settings = [
        *SMALL_SETTINGS,
        "epochs=1",
        "loss.name=proxy_anchor",
        "sampling.batch_size=6",
        "optimiser.accumulation=2",
    ]
    config = load_config(None, settings)
    train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    state = RunFolder(tmp_path / "run").load_checkpoint()
    assert state
    steps = {int(entry["step"]) for entry in state["work"]["optimiser"]["state"].values()}
    batches = len(data.train) // 6
    assert batches == 3 and steps == {2}


def test_the_moving_average_is_measured_and_kept(data: DataSet, tmp_path: Path) -> None:
    config = load_config(None, [*SMALL_SETTINGS, "optimiser.ema_decay=0.9"])
    train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    run = RunFolder(tmp_path / "run")
    state = run.load_checkpoint()
    assert state
    kept, average = run.model().state_dict(), state["work"]["average"]["model"]
    assert all(torch.equal(kept[name], average[name]) for name in kept)
    assert not torch.equal(kept["head.weight"], state["work"]["model"]["head.weight"])
    assert measure(data.test, *load_model(run.path))["map@r"] == pytest.approx(run.result()["map@r"], abs=1e-6)


def test_a_small_limit_of_the_gradients_norm_keeps_the_weights_near(data: DataSet, tmp_path: Path) -> None:
    """Adam's step does not depend on the gradient's size unless it is lost in eps: a tiny limit leaves no step."""
    moved = []
    for limit in ("null", "1e-12"):
        config = load_config(None, [*SMALL_SETTINGS, "epochs=1", f"optimiser.clip_norm={limit}"])
        train(config, data, tmp_path / limit, "folder:photos", RecordingCallback())
        torch.manual_seed(config.seed)
        before = EmbeddingModel(config.backbone, input_size=32).head.weight
        moved.append((RunFolder(tmp_path / limit).model().head.weight - before).abs().max().item())
    assert moved[1] < moved[0] / 100


def test_a_rule_may_drop_a_run(data: DataSet, tmp_path: Path) -> None:
    seen: list[int] = []

    def drop(history: list[dict[str, Any]]) -> str | None:
        seen.append(len(history))
        return "too slow" if history[-1]["epoch"] == 2 else None

    config = load_config(None, [*SMALL_SETTINGS, "epochs=5"])
    result = train(config, data, tmp_path / "run", "folder:photos", RecordingCallback(), drop=drop)
    assert seen == [2, 3] and result["dropped"] == "too slow" and result["epochs"] == 2
    again = RecordingCallback()
    assert train(config, data, tmp_path / "run", "folder:photos", again, resume=True, drop=drop) == result
    assert again.steps == [], "a dropped run stays dropped"


def test_the_state_of_the_loss_is_recorded_by_epoch(data: DataSet, tmp_path: Path) -> None:
    config = load_config(None, [*SMALL_SETTINGS, "loss.settings={queue_start_epoch: 0, filter_start_epoch: 1}"])
    train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    for record in RunFolder(tmp_path / "run").history()[1:]:
        for name in ("s_avg", "s_learned", "s_outlier", "sigma", "weight_positive", "weight_negative"):
            assert math.isfinite(record[name])
        for pair in ("own", "other"):
            low, middle, high = (record[f"{pair}_cosine_p{quantile}"] for quantile in (10, 50, 90))
            assert -1 <= low <= middle <= high <= 1
        assert record["gradient_positive"] > 0 and record["gradient_negative"] > 0


@pytest.mark.parametrize("stage", [-1, -2])
def test_the_last_stages_learn_on_cached_activations(data: DataSet, tmp_path: Path, stage: int) -> None:
    config = load_config(None, [*SMALL_SETTINGS, "cached_views=2", f"cached_stage={stage}"])
    train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    run = RunFolder(tmp_path / "run")
    torch.manual_seed(config.seed)
    before, after = EmbeddingModel(config.backbone, input_size=32), run.model()
    changed = [
        any(not torch.equal(old, new) for old, new in zip(*pair, strict=True))
        for pair in zip(before.stage_parameters(), after.stage_parameters(), strict=True)
    ]
    assert changed == [False] * (len(changed) + stage) + [True] * -stage
    measured = measure(data.test, *load_model(run.path))
    assert measured["map@r"] == pytest.approx(run.result()["map@r"], abs=1e-6), "like the complete model"


def test_an_unknown_backbone_is_refused(data: DataSet, tmp_path: Path) -> None:
    for _ in range(2):  # it leaves no run behind that would block the corrected command
        with pytest.raises(TrainingError, match="Unknown backbone 'resnet9000'"):
            train(
                load_config(None, [*SMALL_SETTINGS, "backbone.name=resnet9000"]),
                data,
                tmp_path,
                "x",
                RecordingCallback(),
            )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def small() -> list[str]:
    """Settings of a run on a network with few weights."""
    return [*SMALL_SETTINGS, "backbone={name: test_efficientnet, weights: none, embedding_size: 16}", "epochs=1"]


def test_an_automatic_batch_size_is_recorded_and_kept(data: DataSet, small: list[str], tmp_path: Path) -> None:
    config = load_config(None, [*small, "sampling.batch_size=auto"])
    first, again = RecordingCallback(), RecordingCallback()
    train(config, data, tmp_path / "run", "folder:photos", first)
    run = RunFolder(tmp_path / "run")
    assert run.config.sampling.batch_size == 128 and run.config.optimiser.accumulation == 1
    assert first.plans[0].chosen and first.plans[0].batch_size == len(data.train)
    train(config, data, tmp_path / "run", "folder:photos", again, resume=True)
    assert again.steps == [] == again.plans, "the same run, which is finished"


def test_a_plan_counts_photos_and_estimates_memory_and_time(data: DataSet, small: list[str], tmp_path: Path) -> None:
    callback = RecordingCallback()
    train(load_config(None, small), data, tmp_path / "run", "folder:photos", callback)
    (plan,) = callback.plans
    assert (plan.photos, plan.classes, plan.steps) == (len(data.train), 5, len(data.train) // 8)
    assert not plan.chosen and 0 < plan.memory < plan.available and plan.epoch_seconds > 0
    assert plan.learns == "All weights learn, with proxy_isa at a learning rate of 0.0003"
    assert callback.results[0]["recall@1"] == RunFolder(tmp_path / "run").result()["recall@1"]


def test_seeds_losses_and_folds_share_cached_features(data: DataSet, small: list[str], tmp_path: Path) -> None:
    first = tmp_path / "first"
    train(load_config(None, small), data, first, "folder:photos", RecordingCallback())
    folder, tables = tmp_path / "feature-cache", []
    for number, change in enumerate(["seed=5", "seed=6", "loss.name=proxy_anchor", "selection={fold: 0, folds: 2}"]):
        # The backbone has no published weights: a run of its own stands for them.
        config = load_config(None, [*small, "cached_views=2", change, f"start_from={first}"])
        train(config, data, tmp_path / f"run-{number}", "folder:photos", RecordingCallback())
        tables.append({path.name: path.stat().st_size for path in folder.glob("*.rows")})
    assert tables[0] == tables[1] == tables[2] and len(tables[0]) == 2, "views to learn from, photos to measure"
    grown = [name for name, size in tables[3].items() if size != tables[0][name]]
    assert len(grown) == 1, "only the classes held out had not been measured before"


def test_a_run_starts_from_the_weights_of_an_earlier_one(data: DataSet, small: list[str], tmp_path: Path) -> None:
    train(load_config(None, small), data, tmp_path / "first", "folder:photos", RecordingCallback())
    first = RunFolder(tmp_path / "first")
    frozen = ["epochs=0", f"start_from={first.path}"]
    callback = RecordingCallback()
    result = train(load_config(None, [*small, *frozen]), data, tmp_path / "next", "folder:photos", callback)
    assert callback.messages[0] == f"Starts from {first.path}: backbone and head."
    assert result["start_from"] == str(first.path) == RunFolder(tmp_path / "next").config.start_from
    assert result["initial"]["weights"] == weights_digest(first)

    other_head = [*small, "epochs=1", f"start_from={first.path}", "backbone.embedding_size=8"]
    train(load_config(None, other_head), data, tmp_path / "head", "folder:photos", callback)
    assert any("its head has another size" in message for message in callback.messages)
    seen = RunFolder(tmp_path / "next").seen_classes()
    assert seen and all(photo.label in seen for photo in data.train), "classes of the earlier run count as seen"
    wrong = load_config(None, [*small, "backbone.name=test_vit", "preprocessing.input_size=160", *frozen])
    with pytest.raises(TrainingError, match=r"has the backbone test_efficientnet, which does not fit"):
        train(wrong, data, tmp_path / "wrong", "folder:photos", callback)


def weights_digest(run: RunFolder) -> str:
    digest = hashlib.sha256()
    for name, value in run.model().state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def test_a_changed_class_is_named_when_a_run_is_resumed(small: list[str], tmp_path: Path) -> None:
    photos, config = write_tiny_folder(tmp_path / "photos"), load_config(None, small)
    train(config, load_data(f"folder:{photos}"), tmp_path / "run", "folder:photos", RecordingCallback())
    label = load_data(f"folder:{photos}").train[0].label
    (photos / label / "0.jpg").unlink()
    message = rf"classes with another number of photos: {label}\)\. .*--start-from"
    with pytest.raises(TrainingError, match=message):
        train(
            config.model_copy(update={"epochs": 3}),
            load_data(f"folder:{photos}"),
            tmp_path / "run",
            "folder:photos",
            RecordingCallback(),
            resume=True,
        )


def test_the_end_of_patience_is_named_when_a_run_is_resumed(data: DataSet, small: list[str], tmp_path: Path) -> None:
    wild = ["epochs=9", "selection={validation_share: 0.4, patience: 1}", "optimiser.learning_rate=0.1"]
    config, callback = load_config(None, [*small, *wild]), RecordingCallback()
    train(config, data, tmp_path / "run", "folder:photos", RecordingCallback())
    train(config.model_copy(update={"epochs": 20}), data, tmp_path / "run", "folder:photos", callback, resume=True)
    assert any("selection.patience" in text for text in callback.messages) and not callback.steps
