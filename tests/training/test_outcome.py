"""Whether training helped, from the records of its epochs."""

import pytest

from training.outcome import best_trained, describe_outcome

UNTRAINED = {"epoch": 0, "map@r": 0.5, "validation.map@r": 0.484}


def trained(epoch: int, test: float, validation: float | None = None) -> dict[str, float]:
    record = {"epoch": epoch, "map@r": test}
    return record if validation is None else record | {"validation.map@r": validation}


def test_an_untrained_backbone_that_wins_is_described_with_both_figures() -> None:
    history = [UNTRAINED, trained(1, 0.4, 0.45), trained(2, 0.4, 0.467)]
    assert describe_outcome(history, UNTRAINED, "map@r") == (
        "Training did not help; the untrained backbone is better on the validation classes"
        " (MAP@R 48.4 % vs 46.7 % at epoch 2)."
    )
    assert "as good" in str(describe_outcome([UNTRAINED, trained(1, 0.4, 0.484)], UNTRAINED, "map@r"))


def test_a_run_that_is_worse_on_the_test_classes_alone_is_described() -> None:
    for record in (trained(1, 0.4), trained(1, 0.4, 0.6)):
        assert describe_outcome([UNTRAINED, record], record, "map@r") == (
            "Training did not help on the test classes; the untrained backbone is better there"
            " (MAP@R 50.0 % vs 40.0 % at epoch 1)."
        )


def test_a_training_that_helped_needs_no_remark() -> None:
    assert describe_outcome([UNTRAINED, trained(1, 0.6, 0.6)], trained(1, 0.6, 0.6), "map@r") is None


def test_a_run_without_an_epoch_is_described() -> None:
    assert describe_outcome([UNTRAINED], UNTRAINED, "map@r") == "Nothing was trained: this is the untrained backbone."


@pytest.mark.parametrize(("scores", "best"), [((0.3, 0.5, 0.5), 2), ((0.1, 0.1), 1)])
def test_the_earliest_of_the_best_epochs_counts(scores: tuple[float, ...], best: int) -> None:
    record = best_trained([UNTRAINED, *(trained(n, s) for n, s in enumerate(scores, 1))], "map@r")
    assert record and record["epoch"] == best
    assert best_trained([UNTRAINED], "map@r") is None
