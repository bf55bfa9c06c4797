"""The names of retrieval metrics in the records of a run, and their titles."""

from collections.abc import Mapping
from typing import Any

_TITLES = {"recall": "Recall", "map@r": "MAP@R", "r_precision": "R-precision", "validation.": "validation "}


def metric_title(name: str) -> str:
    """Returns the title of a metric, such as `validation MAP@R` of `validation.map@r`."""
    if name == "map":
        return "mAP"
    for part, title in _TITLES.items():
        name = name.replace(part, title)
    return name


def retrieval_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns Recall@K and MAP@R on the test classes among all that a record holds."""
    return {name: value for name, value in record.items() if name.startswith(("recall@", "map@"))}
