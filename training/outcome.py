"""Whether training helped: the kept epoch against the untrained backbone."""

from collections.abc import Mapping, Sequence
from typing import Any

from training.metric_names import metric_title

Records = Sequence[Mapping[str, Any]]


def best_trained(history: Records, metric: str) -> Mapping[str, Any] | None:
    """Returns the record of the trained epoch with the highest metric, the earliest of equals; None without any."""
    measured = [record for record in history if record["epoch"] and metric in record]
    return max(measured, key=lambda record: float(record[metric]), default=None)


def describe_outcome(history: Records, result: Mapping[str, Any], metric: str) -> str | None:
    """Returns a sentence if the untrained backbone is better than the trained model, or if nothing was trained.

    The validation classes decide which epoch is kept. Figures on the test classes are only described.
    """
    if len(history) == 1:
        return "Nothing was trained: this is the untrained backbone."
    title, untrained, name = metric_title(metric), history[0], f"validation.{metric}"
    best = best_trained(history, name)
    if best and not result["epoch"]:
        verdict = "better" if untrained[name] > best[name] else "as good"
        return (
            f"Training did not help; the untrained backbone is {verdict} on the validation classes"
            f" ({title} {_percent(untrained[name])} vs {_percent(best[name])} at epoch {best['epoch']})."
        )
    if metric in result and metric in untrained and result[metric] < untrained[metric]:
        return (
            "Training did not help on the test classes; the untrained backbone is better there"
            f" ({title} {_percent(untrained[metric])} vs {_percent(result[metric])} at epoch {result['epoch']})."
        )
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
