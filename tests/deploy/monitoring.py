"""The shipped alerts and dashboard, parsed."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana/dashboards/lookalike.json").read_text(encoding="utf-8"))
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def panels() -> Iterator[dict[str, Any]]:
    """Returns the panels of the dashboard without its rows."""
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> dict[str, str]:
    """Returns every expression by the name of its alert or panel, with Grafana's variables filled in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in ALERTS}
    for panel in panels():
        for target in panel["targets"]:
            filled = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "30s")
            found[f"panel {panel['title']} {target['refId']}"] = filled
    return found


def program(name: str) -> str:
    """Returns the path of a program of Prometheus, or skips the test."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return path


def metrics_of(expression: str) -> set[str]:
    """Returns the names of the metrics in an expression: its words without labels, functions and operators."""
    for other in (r'"[^"]*"', r"\{[^}]*\}|\[[^]]*\]", r"\b(by|on)\s*\([^)]*\)"):
        expression = re.sub(other, "", expression)
    return set(re.findall(r"[a-zA-Z_]\w*\b(?!\s*\()", expression)) - {"and", "or", "unless"}
