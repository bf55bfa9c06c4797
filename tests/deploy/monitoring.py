"""The shipped alerts and dashboard, as the tests read them."""

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
    """The panels that show something; rows only part them."""
    return (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def expressions() -> dict[str, str]:
    """Every expression by the place where it stands, with Grafana's own variables filled in."""
    asked = {f"alert {rule['alert']}": rule["expr"] for rule in ALERTS}
    for panel in panels():
        for target in panel["targets"]:
            filled = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "30s")
            asked[f"panel {panel['title']} {target['refId']}"] = filled
    return asked


def program(name: str) -> str:
    """A program of Prometheus, or the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on this machine (Debian: apt-get install prometheus)")
    return found


def metrics_of(expression: str) -> set[str]:
    """The names of metrics in an expression: what is left of its words without labels, functions and operators."""
    for other in (r'"[^"]*"', r"\{[^}]*\}|\[[^]]*\]", r"\b(by|on)\s*\([^)]*\)"):
        expression = re.sub(other, "", expression)
    return set(re.findall(r"[a-zA-Z_]\w*\b(?!\s*\()", expression)) - {"and", "or", "unless"}
