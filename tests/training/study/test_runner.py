"""A study of two losses and two seeds: killed, moved to another machine, and shared by processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_gallery import write_tiny_folder
from tests.training.study.small_study import KEYS, ROOT, TABLE, run_study, write_table
from training.errors import TrainingError
from training.study.file import DropRule, RunKey, read_study
from training.study.results import StudyFolder
from training.study.runner import drop_reason
from training.study.summary import format_summary, summarise


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("data") / "photos")


def start_study(file: Path, photos: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lookalike", "study", str(file), "--data", f"folder:{photos}", "--out", str(out)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--threads", "1", *options], stdout=subprocess.PIPE, text=True, env=one_thread, cwd=ROOT
    )


def without_times(folder: StudyFolder) -> tuple[dict[RunKey, Any], dict[RunKey, Any]]:
    """Returns results and epochs without times and speeds."""
    results = {
        key: result.model_dump(exclude={"seconds", "photos_per_second"}) for key, result in folder.results().items()
    }
    histories = folder.histories([])
    for record in (record for history in histories.values() for record in history):
        record.pop("photos_per_second", None)
    return results, histories


@pytest.mark.slow
def test_runs_of_a_seed_start_equal_and_are_kept_as_lines(finished: tuple[Path, StudyFolder]) -> None:
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
        assert max(record["validation.map@r"] for record in histories[key]) == chosen["validation.map@r"]
    assert histories[KEYS[0]][2] != histories[KEYS[1]][2], "two losses learn different things"
    assert str(folder.path.parent) not in folder.results_file.read_text(), "no path of this machine"
    assert "photos" not in json.loads(folder.results_file.read_text().splitlines()[0])["data"]


def test_finished_runs_keep_their_weights_and_optionally_the_checkpoint(photos: Path, tmp_path: Path) -> None:
    last_epoch = TABLE["settings"] | {"epochs": 1, "selection": {"validation_share": 0}}
    file = write_table(tmp_path, settings=last_epoch, seeds=[0], runs={"isa": {}})
    run = StudyFolder(tmp_path / "out").run(RunKey("isa", 0))
    run_study(file, photos, tmp_path / "out", keep_checkpoints=True)
    checkpoint, newest = run.path / "checkpoint.pt", run.model().state_dict()
    assert checkpoint.is_file() and not (run.path / "best.pt").exists()
    run_study(file, photos, tmp_path / "out")
    assert not checkpoint.exists()
    assert all(torch.equal(value, newest[name]) for name, value in run.model().state_dict().items())


@pytest.mark.slow
def test_a_study_killed_within_a_run_resumes_to_the_same_results(
    finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path
) -> None:
    file, undisturbed = finished
    here, there = StudyFolder(tmp_path / "here"), StudyFolder(tmp_path / "there")
    unfinished = here.run(KEYS[1]).path
    process = start_study(file, photos, here.path)
    try:
        deadline = time.monotonic() + 60
        while not (unfinished / "checkpoint.pt").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert list(here.results()) == KEYS[:1], "killed within the second run"

    # Another machine has the lines and the unfinished run, and its photos are elsewhere.
    moved = shutil.copytree(photos, tmp_path / "other place")
    there.path.mkdir()
    for copied in (here.results_file, here.history_file):
        shutil.copy(copied, there.path)
    shutil.copytree(unfinished, there.run(KEYS[1]).path)
    for folder, place in ((here, photos), (there, moved)):
        messages, failed = run_study(file, place, folder.path)
        assert not failed and messages == [
            f"{key}: run {number} of 4" for number, key in enumerate(KEYS, 1) if number > 1
        ]
        assert without_times(folder) == without_times(undisturbed)


@pytest.mark.slow
def test_finished_runs_are_not_trained_again_with_only_their_lines(
    finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path
) -> None:
    file, folder = finished
    for copied in (folder.results_file, folder.history_file):
        shutil.copy(copied, tmp_path)
    messages, failed = run_study(file, photos, tmp_path)
    assert messages == [] and not failed and not (tmp_path / "runs").exists()
    assert without_times(StudyFolder(tmp_path)) == without_times(folder)

    write_table(tmp_path, settings=TABLE["settings"] | {"optimiser": {"learning_rate": 0.001}})
    with pytest.raises(TrainingError, match=r"anchor, seed 0 .*optimiser.learning_rate was 0.0003, is 0.001"):
        run_study(tmp_path / "study.yaml", photos, tmp_path)
    with pytest.raises(TrainingError, match="holds the study 'tiny', not 'other'"):
        run_study(write_table(tmp_path, name="other"), photos, tmp_path)
    fewer = shutil.copytree(photos, tmp_path / "fewer")
    (fewer / "red" / "3.jpg").unlink()
    with pytest.raises(TrainingError, match="was trained on other photos"):
        run_study(file, fewer, tmp_path)


@pytest.mark.slow
def test_two_processes_share_the_runs(finished: tuple[Path, StudyFolder], photos: Path, tmp_path: Path) -> None:
    file, folder = write_table(tmp_path, seeds=[0]), StudyFolder(tmp_path / "out")
    with folder.lock(KEYS[0].folder) as free:
        assert free
        process = start_study(file, photos, folder.path)
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "anchor, seed 0 is being trained by another process" in printed and "1 of 2 runs have ended" in printed
    assert list(folder.results()) == [KEYS[1]]
    messages_here, _ = run_study(file, photos, folder.path)
    assert messages_here == ["anchor, seed 0: run 1 of 2"]
    assert set(folder.results()) == set(KEYS[:2])
    assert without_times(folder)[0].items() <= without_times(finished[1])[0].items()


@pytest.mark.slow
def test_a_run_far_behind_is_dropped_and_a_failed_one_does_not_stop_others(photos: Path, tmp_path: Path) -> None:
    anchor = {"loss": {"name": "proxy_anchor"}}
    runs = {
        "anchor": anchor,
        "diverging": anchor | {"optimiser": {"learning_rate": 1e30, "clip_value": None}},
        "coarse": anchor | {"optimiser": {"learning_rate": 0.03}},
    }
    changes: dict[str, Any] = {"seeds": [0], "runs": runs, "drop": {"after_epoch": 1, "behind": 0.01}}
    file = write_table(tmp_path, settings=TABLE["settings"] | {"epochs": 4}, **changes)
    folder = StudyFolder(tmp_path / "out")
    messages, failed = run_study(file, photos, folder.path)
    assert failed == [RunKey("diverging", 0)] and any(
        text.startswith("diverging, seed 0 failed: ") for text in messages
    )
    results = folder.results()
    assert list(results) == [RunKey("anchor", 0), RunKey("coarse", 0)]
    dropped = results[RunKey("coarse", 0)]
    assert dropped.dropped and "validation.map@r behind anchor at epoch" in dropped.dropped
    assert 0 < dropped.epochs_trained < 4 and results[RunKey("anchor", 0)].epochs_trained == 4
    text = format_summary(summarise(read_study(file), results, folder.histories(read_study(file).plan())))
    assert "coarse, seed 0 was dropped: " in text and "diverging, seed 0 is at epoch 0 of 4" in text


def test_the_rule_compares_with_the_best_rival_at_the_same_epoch() -> None:
    rule = DropRule(after_epoch=2, behind=0.1)

    def course(*scores: float) -> list[dict[str, Any]]:
        return [{"epoch": epoch, "validation.map@r": score} for epoch, score in enumerate(scores)]

    rivals = {"good": course(0.1, 0.5, 0.6), "better": course(0.1, 0.3, 0.7, 0.9), "new": course(0.1)}
    assert drop_reason(rule, course(0.1, 0.1), rivals) is None, "too early"
    assert drop_reason(rule, course(0.1, 0.1, 0.61), rivals) is None, "near enough"
    reason = drop_reason(rule, course(0.1, 0.5, 0.55), rivals)
    assert reason == "15.00 points of validation.map@r behind better at epoch 2 (the rule: 10)"
    assert drop_reason(rule, course(0.1, 0.1, 0.1, 0.1, 0.1), rivals) is None, "no rival has come so far"


def test_mistakes_that_need_the_photos_show_before_the_first_run(photos: Path, tmp_path: Path) -> None:
    isa = {"loss": {"name": "proxy_isa", "settings": {"volumen": 3}}}
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"runs": {"good": {}, "bad": isa}}, "Run 'bad': .*volumen is unknown"),
        (
            {"runs": {"good": {}, "bad": {"loss": {"name": "proxy_isaa"}}}},
            r"'bad': No loss is called 'proxy_isaa' \(did you mean proxy_isa\?",
        ),
        (
            {"drop": {"after_epoch": 1, "behind": 0.1}, "runs": {"a": {"selection": {"validation_share": 0}}}},
            "needs held-out classes, and run 'a' has none",
        ),
    ]
    for changes, problem in mistakes:
        with pytest.raises(TrainingError, match=problem):
            run_study(write_table(tmp_path, **changes), photos, tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()
