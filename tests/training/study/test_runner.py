"""A study of two losses and two seeds: killed, moved, shared and summed up as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy import stats
from typer.testing import CliRunner

from lookalike import app
from tests.support.tiny_gallery import write_tiny_folder
from tests.support.training_runs import RecordingCallback
from training.config import TrainingConfig
from training.data import load_data
from training.errors import TrainingError
from training.study.file import DropRule, RunKey, Study, read_study
from training.study.results import Initial, RunResult, StudyFolder
from training.study.runner import StudyRunner, drop_reason
from training.study.summary import format_summary, summarise

ROOT = Path(__file__).parents[3]
TABLE: dict[str, Any] = {
    "name": "tiny",
    "settings": {
        "epochs": 2,
        "preprocessing": {"resize": 36, "input_size": 32},
        "sampling": {"batch_size": 8},
        "optimiser": {"learning_rate": 0.0003},
        "selection": {"validation_share": 0.4, "patience": None},
        "workers": 0,
        "loss": {"name": "proxy_isa", "settings": {"volume": 4, "queue_start": 0, "filter_start": 0}},
    },
    "seeds": [0, 1],
    "runs": {"anchor": {"loss": {"name": "proxy_anchor"}}, "isa": None},
}
KEYS = [RunKey(run, seed) for seed in (0, 1) for run in ("anchor", "isa")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("data") / "photos")


def write_table(directory: Path, **changes: Any) -> Path:
    file = directory / "study.yaml"
    file.write_text(yaml.safe_dump(TABLE | changes, sort_keys=False))
    return file


def run_study(file: Path, photos: Path, out: Path, **options: Any) -> tuple[list[str], list[RunKey]]:
    """Trains what is left in this process; returns what was said and which runs failed."""
    said: list[str] = []

    def watching(config: TrainingConfig) -> AbstractContextManager[RecordingCallback]:
        return nullcontext(RecordingCallback())

    study, spec = read_study(file), f"folder:{photos}"
    runner = StudyRunner(study, spec, load_data(spec), StudyFolder(out), watching, said.append, **options)
    return said, runner.run(study.plan())


def start_study(file: Path, photos: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lookalike", "study", str(file), "--data", f"folder:{photos}", "--out", str(out)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--threads", "1", *options], stdout=subprocess.PIPE, text=True, env=one_thread, cwd=ROOT
    )


def learned(folder: StudyFolder) -> tuple[dict[RunKey, Any], dict[RunKey, Any]]:
    """Results and epochs without what depends on the time of day."""
    results = {
        key: result.model_dump(exclude={"seconds", "photos_per_second"}) for key, result in folder.results().items()
    }
    histories = folder.histories([])
    for record in (record for history in histories.values() for record in history):
        record.pop("photos_per_second", None)
    return results, histories


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StudyFolder]:
    directory = tmp_path_factory.mktemp("finished")
    file = write_table(directory)
    said, failed = run_study(file, photos, directory / "out")
    assert not failed and said == [f"{key}: run {number} of 4" for number, key in enumerate(KEYS, 1)]
    return file, StudyFolder(directory / "out")


def test_runs_of_a_seed_start_alike_and_are_kept_as_lines(finished: tuple[Path, StudyFolder]) -> None:
    _, folder = finished
    results, histories = folder.results(), folder.histories([])
    assert list(results) == KEYS and list(histories) == KEYS
    for seed in (0, 1):
        assert results[RunKey("anchor", seed)].initial == results[RunKey("isa", seed)].initial
    assert len({result.initial.weights for result in results.values()}) == 2
    assert len({result.initial.batches for result in results.values()}) == 2
    assert len({result.config_digest for result in results.values()}) == 4
    for key, result in results.items():
        assert [record["epoch"] for record in histories[key]] == [0, 1, 2]
        chosen = histories[key][result.epoch]
        assert result.figures["map@r"] == chosen["map@r"] and result.seconds > 0
        assert max(record["validation.map@r"] for record in histories[key][1:]) == chosen["validation.map@r"]
    assert histories[KEYS[0]][2] != histories[KEYS[1]][2], "two losses learn different things"
    assert str(folder.path.parent) not in folder.results_file.read_text(), "no path of this machine"
    assert "photos" not in json.loads(folder.results_file.read_text().splitlines()[0])["data"]


def test_finished_runs_keep_their_weights_and_on_wish_all_of_the_checkpoint(photos: Path, tmp_path: Path) -> None:
    last_epoch = TABLE["settings"] | {"epochs": 1, "selection": {"validation_share": 0}}
    file = write_table(tmp_path, settings=last_epoch, seeds=[0], runs={"isa": {}})
    run = StudyFolder(tmp_path / "out").run(RunKey("isa", 0))
    run_study(file, photos, tmp_path / "out", keep_checkpoints=True)
    checkpoint, newest = run.path / "checkpoint.pt", run.model().state_dict()
    assert checkpoint.is_file() and not (run.path / "best.pt").exists()
    run_study(file, photos, tmp_path / "out")
    assert not checkpoint.exists()
    assert all(torch.equal(value, newest[name]) for name, value in run.model().state_dict().items())


def test_a_study_killed_within_a_run_ends_as_if_it_had_not_been(
    finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path
) -> None:
    file, undisturbed = finished
    here, there = StudyFolder(tmp_path / "here"), StudyFolder(tmp_path / "there")
    begun = here.run(KEYS[1]).path
    process = start_study(file, photos, here.path)
    try:
        deadline = time.monotonic() + 60
        while not (begun / "checkpoint.pt").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert list(here.results()) == KEYS[:1], "killed within the second run"

    # Another machine has the lines and the unfinished run, and its photos lie elsewhere.
    moved = shutil.copytree(photos, tmp_path / "other place")
    there.path.mkdir()
    for copied in (here.results_file, here.history_file):
        shutil.copy(copied, there.path)
    shutil.copytree(begun, there.run(KEYS[1]).path)
    for folder, place in ((here, photos), (there, moved)):
        said, failed = run_study(file, place, folder.path)
        assert not failed and said == [f"{key}: run {number} of 4" for number, key in enumerate(KEYS, 1) if number > 1]
        assert learned(folder) == learned(undisturbed)


def test_lines_alone_are_enough_to_train_nothing_again(
    finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path
) -> None:
    file, folder = finished
    for copied in (folder.results_file, folder.history_file):
        shutil.copy(copied, tmp_path)
    said, failed = run_study(file, photos, tmp_path)
    assert said == [] and not failed and not (tmp_path / "runs").exists()
    assert learned(StudyFolder(tmp_path)) == learned(folder)

    write_table(tmp_path, settings=TABLE["settings"] | {"optimiser": {"learning_rate": 0.001}})
    with pytest.raises(TrainingError, match=r"anchor, seed 0 .*optimiser.learning_rate was 0.0003, is 0.001"):
        run_study(tmp_path / "study.yaml", photos, tmp_path)
    with pytest.raises(TrainingError, match="holds the study 'tiny', not 'other'"):
        run_study(write_table(tmp_path, name="other"), photos, tmp_path)
    fewer = shutil.copytree(photos, tmp_path / "fewer")
    (fewer / "red" / "3.jpg").unlink()
    with pytest.raises(TrainingError, match="was trained on other photos"):
        run_study(file, fewer, tmp_path)


def test_two_processes_share_the_runs(finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path) -> None:
    file, folder = write_table(tmp_path, seeds=[0]), StudyFolder(tmp_path / "out")
    with folder.lock(KEYS[0].folder) as free:
        assert free
        process = start_study(file, photos, folder.path)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "anchor, seed 0 is being trained by another process" in said and "1 of 2 runs have ended" in said
    assert list(folder.results()) == [KEYS[1]]
    said_here, _ = run_study(file, photos, folder.path)
    assert said_here == ["anchor, seed 0: run 1 of 2"]
    assert set(folder.results()) == set(KEYS[:2])
    assert learned(folder)[0].items() <= learned(finished[1])[0].items()


def test_a_run_far_behind_is_dropped_and_a_failed_one_stops_no_other(photos: Path, tmp_path: Path) -> None:
    anchor = {"loss": {"name": "proxy_anchor"}}
    runs = {
        "anchor": anchor,
        "diverging": anchor | {"optimiser": {"learning_rate": 1e30, "clip_value": None}},
        "coarse": anchor | {"optimiser": {"learning_rate": 0.03}},
    }
    changes: dict[str, Any] = {"seeds": [0], "runs": runs, "drop": {"after_epoch": 1, "behind": 0.01}}
    file = write_table(tmp_path, settings=TABLE["settings"] | {"epochs": 4}, **changes)
    folder = StudyFolder(tmp_path / "out")
    said, failed = run_study(file, photos, folder.path)
    assert failed == [RunKey("diverging", 0)] and any(text.startswith("diverging, seed 0 failed: ") for text in said)
    results = folder.results()
    assert list(results) == [RunKey("anchor", 0), RunKey("coarse", 0)]
    dropped = results[RunKey("coarse", 0)]
    assert dropped.dropped and "validation.map@r behind anchor at epoch" in dropped.dropped
    assert 0 < dropped.epochs_trained < 4 and results[RunKey("anchor", 0)].epochs_trained == 4
    text = format_summary(summarise(read_study(file), results, folder.histories(read_study(file).plan())))
    assert "coarse, seed 0 was dropped: " in text and "diverging, seed 0 is at epoch 0 of 4" in text


def test_the_rule_compares_at_the_same_epoch_with_the_best_rival() -> None:
    rule = DropRule(after_epoch=2, behind=0.1)

    def course(*scores: float) -> list[dict[str, Any]]:
        return [{"epoch": epoch, "validation.map@r": score} for epoch, score in enumerate(scores)]

    rivals = {"good": course(0.1, 0.5, 0.6), "better": course(0.1, 0.3, 0.7, 0.9), "new": course(0.1)}
    assert drop_reason(rule, course(0.1, 0.1), rivals) is None, "too early"
    assert drop_reason(rule, course(0.1, 0.1, 0.61), rivals) is None, "near enough"
    reason = drop_reason(rule, course(0.1, 0.5, 0.55), rivals)
    assert reason == "15.00 points of validation.map@r behind better at epoch 2 (the rule: 10)"
    assert drop_reason(rule, course(0.1, 0.1, 0.1, 0.1, 0.1), rivals) is None, "no rival has come so far"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"seed": [0]}, r"seed is not a setting; did you mean seeds\?"),
    ({"settings": {"epohcs": 3}}, r"settings.epohcs is not a setting; did you mean epochs\?"),
    ({"settings": {"epochs": -1}}, "settings.epochs=-1: .*greater than or equal to 0"),
    (
        {"runs": {"a": {"optimiser": {"learning_rat": 1}}}},
        "runs.a.optimiser.learning_rat .* did you mean learning_rate",
    ),
    ({"runs": {"a/b": {}}}, "runs.a/b"),
    ({"runs": {}}, "runs={}"),
    ({"baseline": "ancor"}, "baseline='ancor' is not a run; did you mean anchor"),
    ({"seeds": [0, 0]}, "lists a seed twice"),
    ({"seeds": ["0"]}, "seeds.0='0'"),
    ({"runs": {"a": {"seed": 3}}}, "runs.a.seed=3: list seeds under seeds"),
    ({"presets": ["club"]}, "No preset is called 'club'"),
    ({"drop": {"after_epoch": 3, "behind": 1.5}}, "drop.behind=1.5"),
    ({"drop": {"after": 3, "behind": 0.1}}, "drop.after_epoch is missing; drop.after is not a setting; did you mean"),
    ({"metric": "recall@3"}, "metric='recall@3'"),
]


@pytest.mark.parametrize(("changes", "problem"), MISTAKES, ids=[problem for _, problem in MISTAKES])
def test_a_mistake_in_the_file_is_named_with_its_place(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=problem):
        read_study(write_table(tmp_path, **changes))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    with pytest.raises(TrainingError, match="No study at"):
        read_study(file)
    file.write_text("name: x\nruns:\n  a: {}\n  a: {epochs: 3}\n")
    with pytest.raises(TrainingError, match="'a' is a duplicate key"):
        read_study(file)


def test_mistakes_that_need_the_photos_show_before_the_first_run(photos: Path, tmp_path: Path) -> None:
    isa = {"loss": {"name": "proxy_isa", "settings": {"volumen": 3}}}
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"runs": {"good": {}, "bad": isa}}, "Run 'bad': .*no setting 'volumen'"),
        ({"runs": {"good": {}, "bad": {"loss": {"name": "proxy_isaa"}}}}, "Run 'bad': No loss is called 'proxy_isaa'"),
        (
            {"drop": {"after_epoch": 1, "behind": 0.1}, "runs": {"a": {"selection": {"validation_share": 0}}}},
            "needs held-out classes, and run 'a' has none",
        ),
    ]
    for changes, problem in mistakes:
        with pytest.raises(TrainingError, match=problem):
            run_study(write_table(tmp_path, **changes), photos, tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()


def result_of(run: str, seed: int, chosen: float, weights: str = "w") -> RunResult:
    figures = {"recall@1": chosen + 0.3, "map@r": chosen}
    return RunResult(
        study="sums",
        run=run,
        seed=seed,
        data="cub",
        photos="p",
        config={},
        config_digest="c",
        epoch=1,
        figures=figures,
        validation={},
        untrained={"recall@1": 0.2, "map@r": 0.1},
        epochs_trained=2,
        dropped=None,
        seconds=1,
        photos_per_second=1,
        initial=Initial(weights=f"{weights}{seed}", batches=f"b{seed}"),
        versions={},
        processor="x",
        threads=1,
    )


def test_the_summary_agrees_with_an_independent_computation() -> None:
    study = Study(name="sums", seeds=(0, 1, 2), runs={"one": {}, "two": {}}, baseline="one")
    one, two = [0.20, 0.23, 0.21], [0.24, 0.25, 0.22]
    results = {
        result.key: result
        for run, values in (("one", one), ("two", two))
        for result in (result_of(run, seed, value) for seed, value in enumerate(values))
    }
    histories = {
        key: [
            {"epoch": 0, "map@r": 0.9, "recall@1": 0.9},
            {"epoch": 1, "map@r": result.figures["map@r"], "recall@1": 0.5},
            {"epoch": 2, "map@r": result.figures["map@r"] - 0.05, "recall@1": 0.6},
        ]
        for key, result in results.items()
    }
    summary = summarise(study, results, histories)
    first, second = summary.runs
    chosen = second.figures["chosen"]["map@r"]
    assert chosen and chosen.mean == pytest.approx(np.mean(two))
    assert chosen.deviation == pytest.approx(np.std(two, ddof=1))
    last, best = second.figures["last"]["map@r"], second.figures["best"]["recall@1"]
    assert last and last.mean == pytest.approx(np.mean(two) - 0.05)
    assert best and best.mean == pytest.approx(0.5), "the epoch that is best on test, but not the untrained one"
    difference = second.differences["chosen"]
    assert difference and difference.interval and first.differences["chosen"] is None
    assert difference.spread.deviation == pytest.approx(np.std(np.subtract(two, one), ddof=1))
    assert difference.interval == pytest.approx(tuple(stats.ttest_rel(two, one).confidence_interval(0.95)))
    assert "+2.33 ±1.53 [-1.46, +6.13]" in format_summary(summary)
    assert summary.warnings == []


def test_pairs_are_of_common_seeds_and_one_seed_has_no_interval() -> None:
    study = Study(name="sums", seeds=(0, 1), runs={"one": {}, "two": {}})
    given = [result_of("one", 0, 0.5), result_of("one", 1, 0.1), result_of("two", 0, 0.6, weights="other")]
    summary = summarise(study, {result.key: result for result in given}, {})
    difference = summary.runs[1].differences["chosen"]
    assert difference and difference.spread.mean == pytest.approx(0.1) and difference.interval is None
    assert summary.runs[1].done == 1 and summary.runs[1].planned == 2
    assert summary.warnings == ["Seed 0: runs have different initial weights: one / two."]
    moved = {RunKey("two", 1): result_of("two", 1, 0.2).model_copy(update={"threads": 8})}
    summary = summarise(study, {result.key: result for result in given} | moved, {})
    assert summary.warnings[1:] == ["Seed 1: runs have different processors or numbers of threads: one / two."]


def test_the_command_checks_sums_up_and_writes_a_page(
    finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path
) -> None:
    file, folder = finished
    asked = CliRunner().invoke(
        app, ["study", str(file), "--out", str(folder.path), "--summary", "--report", f"{tmp_path}/p.html"]
    )
    assert asked.exit_code == 0, asked.output
    assert "4 of 4 runs have ended" in asked.output and "minus that of anchor, paired by seed" in asked.output
    page = (tmp_path / "p.html").read_text()
    assert "default-src 'none'" in page and "<script" not in page and "http://" not in page
    results = folder.results()
    assert all(f"{100 * result.figures['map@r']:.2f}" in page for result in results.values())
    for text in ("MAP@R on the test classes", "MAP@R on the held-out training classes", "loss.settings.volume", "thin"):
        assert text in page
    assert results[KEYS[0]].initial.weights[:8] in page

    plan = ["study", str(file), "--data", f"folder:{photos}", "--out", f"{tmp_path}/new", "--dry-run", "--no-nice"]
    asked = CliRunner().invoke(app, [*plan, "--only", "isa"])
    assert asked.exit_code == 0, asked.output
    assert asked.output.count("not started") == 2 and "isa, seed 1" in asked.output
    assert not (tmp_path / "new" / "runs").exists()
    asked = CliRunner().invoke(app, [*plan, "--only", "isb"])
    assert isinstance(asked.exception, TrainingError) and "did you mean isa?" in str(asked.exception)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "studies").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_studies_of_the_benchmarks_can_be_read(file: Path) -> None:
    study = read_study(file)
    assert study.name == file.stem and len(study.runs) > 1
