"""The shipped alerts and dashboard ask for what the service tells, and say what can be done."""

import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import typer
import yaml

from index.embedding.embedder import PROVIDERS
from index.gallery.jobs import State
from index.gallery.vectors.faiss.compaction import RECALL_TARGET, is_due
from lookalike import app
from service.admission import Refusal
from service.app import create_app
from service.observability.metrics import Stage
from service.settings import PREFIX, Settings
from tests.deploy.monitoring import ALERTS, DASHBOARD, FOLDER, expressions, metrics_of, panels, program
from tests.support.processes import serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

PROMETHEUS_OWN = {"up", "ALERTS"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a running service answers to a scrape."""
    root = tmp_path_factory.mktemp("shop")
    gallery = make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle"))
    with serving("serve", "--gallery", gallery) as address:
        httpx.post(f"{address}/v1/search", files={"image": tiny_photo(1, 3)}).raise_for_status()
        return httpx.get(f"{address}/metrics").text


def test_every_metric_that_is_asked_for_is_told_by_a_running_service(told: str) -> None:
    names = set(PROMETHEUS_OWN)
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", told, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    asked = {place: metrics_of(expression) for place, expression in expressions().items()}
    assert all(asked.values()) and len(asked) > 40
    assert {place: metrics - names for place, metrics in asked.items() if metrics - names} == {}
    own = {name for name in names if name.startswith("lookalike_")}
    shown = set().union(*asked.values())
    assert {name for name in own - shown if not name.endswith(("_bucket", "_sum", "_count"))} == set()


def test_values_of_labels_that_are_asked_for_exist() -> None:
    known: dict[str, set[str]] = {
        "route": {*create_app(Settings(gallery="")).openapi()["paths"]},
        "state": {*get_args(State)},
        "reason": {*get_args(Refusal)},
        "stage": {*get_args(Stage)},
        "provider": {*PROVIDERS},
        "alertstate": {"firing"},
        "job": {"lookalike"},
    }
    for place, expression in expressions().items():
        for label, how, value in re.findall(r'(\w+) *(=~|!~|!=|=) *"([^"]*)"', expression):
            for one in value.split("|") if label in known else []:
                matches = [name for name in known[label] if re.fullmatch(one if "~" in how else re.escape(one), name)]
                assert matches, f"{place}: no {label} is {one}"


def test_every_panel_asks_the_provisioned_data_source() -> None:
    (source,) = provisioned("datasources/prometheus.yaml")["datasources"]
    wanted = {"type": source["type"], "uid": source["uid"]}
    (chooser,) = DASHBOARD["templating"]["list"]
    asking = [chooser, *panels(), *(target for panel in panels() for target in panel["targets"])]
    assert [one for one in asking if one["datasource"] != wanted] == []


def test_panels_have_a_title_a_text_and_a_place_of_their_own() -> None:
    assert all(panel["title"] and panel["description"] for panel in panels())
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def provisioned(name: str) -> Any:
    settings = yaml.safe_load((FOLDER / "grafana" / "provisioning" / name).read_text(encoding="utf-8"))
    assert settings["apiVersion"] == 1
    return settings


def test_every_alert_says_what_to_do_with_commands_and_settings_that_exist() -> None:
    verbs = set(commands(typer.main.get_command(app)))
    page = (FOLDER.parents[1] / "docs" / "monitor.md").read_text(encoding="utf-8")
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"].endswith(".") and len(rule["annotations"]["runbook"]) > 80
        runbook = rule["annotations"]["runbook"]
        for line in re.findall(r"`lookalike ([^`]*)`", runbook):
            assert any(f"{line} ".startswith(f"{verb} ") for verb in verbs), f"{rule['alert']}: lookalike {line}"
        for variable in re.findall(rf"\b{PREFIX}(\w+)", runbook):
            assert variable.lower() in Settings.model_fields, f"{rule['alert']}: {PREFIX}{variable}"
        assert f"| `{rule['alert']}` |" in page, "docs/monitor.md tells every alert"


def commands(group: Any, *before: str) -> Iterator[str]:
    """Every verb of the command line with its group: `serve`, `gallery compact`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        else:
            yield " ".join((*before, name))


def test_thresholds_are_those_of_the_gallery() -> None:
    by_name = {rule["alert"]: rule["expr"] for rule in ALERTS}
    least, share = map(int, re.findall(r"> (\d+) and .* / (\d+)", by_name["LookalikeCompactionBehind"])[0])
    for images in (0, 100 * share, share * least, 10 * share * least):
        due = max(least, images // share)
        assert is_due(images, due + 1) and not is_due(images, due)
    assert f"{least}" in str(list(panels())) and f"/ {share}," in str(list(panels()))
    assert float(by_name["LookalikeRecallLow"].rpartition("< ")[2]) == RECALL_TARGET


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("check config --syntax-only prometheus.yml", "prometheus.yml is valid prometheus config file syntax"),
        ("check rules alerts.yml", f"{len(ALERTS)} rules found"),
        ("test rules alerts.test.yml", "SUCCESS"),
    ],
)
def test_promtool_accepts(line: str, end: str) -> None:
    ran = subprocess.run([program("promtool"), *line.split()], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and end in ran.stdout, ran.stdout + ran.stderr


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    cases = yaml.safe_load((FOLDER / "alerts.test.yml").read_text(encoding="utf-8"))["tests"]
    expected = str([sample for case in cases for test in case["promql_expr_test"] for sample in test["exp_samples"]])
    assert {rule["alert"] for rule in ALERTS if f'"{rule["alert"]}"' not in expected} == set()


def test_prometheus_and_grafana_find_what_compose_mounts() -> None:
    services = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text(encoding="utf-8"))["services"]
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["serve:8000"]}] and "serve" in services
    seen = mounts(services["prometheus"])
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= set(seen)
    key = Path(scrape["authorization"]["credentials_file"])
    keeper = services["scrape-key"]
    assert seen[str(key.parent)] == mounts(keeper)["/data"] and f"mv .new {key.name}" in str(keeper["command"])
    seen = mounts(services["grafana"])
    (provider,) = provisioned("dashboards/lookalike.yaml")["providers"]
    assert seen["/etc/grafana/provisioning"] == "./monitoring/grafana/provisioning"
    assert seen[provider["options"]["path"]] == "./monitoring/grafana/dashboards"
    (source,) = provisioned("datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Where a container sees what, by its own path."""
    parts = [str(volume).split(":") for volume in service["volumes"]]
    return {inside: outside for outside, inside, *_ in parts}
