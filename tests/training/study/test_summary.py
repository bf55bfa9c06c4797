"""The summary of a study against independent computations."""

import numpy as np
import pytest
from scipy import stats

from training.errors import TrainingError
from training.study.file import RunKey, Study
from training.study.results import History, Initial, RunResult
from training.study.summary import (
    curve_table,
    difference_table,
    figure_table,
    format_curve,
    format_summary,
    summarise,
    time_table,
)

NOTHING = "\u2013"


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


def test_figures_that_no_run_has_are_not_shown() -> None:
    study = Study(name="sums", seeds=(0,), runs={"one": {}, "two": {}}, baseline="one")
    results = {result.key: result for result in (result_of("one", 0, 0.5), result_of("two", 0, 0.6))}
    unmeasured = summarise(study, results, {key: [{"epoch": 1, "sigma": 0.5}] for key in results})
    assert figure_table(unmeasured)[0][-2:] == ["Recall@1, chosen epoch", "MAP@R, chosen epoch"]
    assert difference_table(unmeasured) == (["run", "pairs", "chosen epoch"], [["two", "1", "+10.00"]])
    measured = [{"epoch": 1, "map@r": 0.5, "recall@1": 0.8}]
    curves: dict[RunKey, History] = {RunKey("one", 0): measured}
    assert difference_table(summarise(study, results, curves))[0][2:] == ["chosen epoch", "last epoch", "best test*"]
    assert "best test" not in format_summary(unmeasured)
    assert "* chosen on test" not in format_summary(unmeasured)
    assert "* chosen on test" in format_summary(summarise(study, results, curves))


def test_a_curve_is_the_mean_over_seeds_at_eleven_epochs_or_fewer() -> None:
    study = Study(name="sums", seeds=(0, 1), runs={"one": {}, "two": {}})
    results = {result.key: result for result in (result_of("one", seed, 0.5) for seed in (0, 1))}
    histories: dict[RunKey, History] = {
        RunKey("one", seed): [{"epoch": epoch, "map@r": (epoch + 2 * seed) / 1000} for epoch in range(101)]
        for seed in (0, 1)
    }
    histories[RunKey("two", 0)] = [{"epoch": 0, "map@r": 0.0}, {"epoch": 1, "sigma": 0.12345}]
    summary = summarise(study, results, histories)
    columns, (one, two) = curve_table(summary, histories, "map@r")
    assert columns == ["run", *map(str, range(0, 101, 10))]
    assert one == ["one", *(f"{tenth}.1" for tenth in range(11))], "in percent"
    assert two == ["two", "0.0", *[NOTHING] * 10]
    assert curve_table(summary, histories, "sigma") == (["run", "1"], [["two", "0.123"]])
    assert format_curve(summary, histories, "map@r").startswith("map@r by epoch, mean over seeds in percent\nrun ")
    with pytest.raises(TrainingError, match=r"'sigm' .did you mean sigma\?") as error:
        curve_table(summary, histories, "sigm")
    assert error.value.remedy == "Recorded: map@r, sigma."


def test_the_times_are_means_over_seeds() -> None:
    study = Study(name="sums", seeds=(0, 1), runs={"one": {}, "two": {}})
    slow = result_of("one", 1, 0.5).model_copy(update={"seconds": 180.0, "photos_per_second": None})
    fast = result_of("one", 0, 0.5).model_copy(update={"seconds": 60.0, "photos_per_second": 100.0})
    _, rows = time_table(summarise(study, {slow.key: slow, fast.key: fast}, {}))
    assert rows == [["one", "2.0 ±1.4", "100"], ["two", NOTHING, NOTHING]]
