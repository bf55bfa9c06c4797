"""Names and titles of metrics in the records of a run."""

import pytest

from training.metric_names import metric_title, retrieval_figures


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("recall@1", "Recall@1"),
        ("map@r", "MAP@R"),
        ("map", "mAP"),
        ("r_precision", "R-precision"),
        ("validation.map@r", "validation MAP@R"),
        ("loss", "loss"),
    ],
)
def test_a_metric_has_the_title_of_the_field(name: str, title: str) -> None:
    assert metric_title(name) == title


def test_only_figures_on_the_test_classes_are_picked() -> None:
    record = {"epoch": 1, "recall@1": 0.5, "map@r": 0.4, "validation.map@r": 0.6, "loss": 3.0}
    assert retrieval_figures(record) == {"recall@1": 0.5, "map@r": 0.4}
