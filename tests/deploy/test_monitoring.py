"""Tests of the shipped alerts and dashboard: their metrics exist, and each alert says what to do."""

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
from index.gallery.vectors.faiss.settings import DEFAULT
from index.jobs import JobState
from lookalike import app
from service.admission import Refusal
from service.app import create_app
from service.observability.metrics import Stage
from service.settings import PREFIX, Settings
from tests.deploy.monitoring import ALERTS, DASHBOARD, FOLDER, expressions, metrics_of, panels, program
from tests.support.processes import run_server
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

REPOSITORY = FOLDER.parents[1]
PROMETHEUS_OWN = {"up", "ALERTS"}
SEVERAL_MACHINES = {"lookalike_gallery_stale_seconds"}
"""Metrics of a gallery in PostgreSQL; the service of these tests has its gallery in a folder."""


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the metrics of a running service."""
    root = tmp_path_factory.mktemp("shop")
    gallery = make_tiny_gallery(root / "gallery", make_tiny_bundle(root / "bundle"))
    with run_server("serve", "--gallery", gallery) as address:
        httpx.post(f"{address}/v1/search", files={"image": tiny_photo(1, 3)}).raise_for_status()
        return httpx.get(f"{address}/metrics").text


def test_alerts_and_panels_use_exactly_the_metrics_of_a_running_service(scrape: str) -> None:
    names = PROMETHEUS_OWN | SEVERAL_MACHINES
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", scrape, re.MULTILINE):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    used = {place: metrics_of(expression) for place, expression in expressions().items()}
    assert len(used) == len(ALERTS) + sum(len(panel["targets"]) for panel in panels()), "each has a name of its own"
    assert [place for place, metrics in used.items() if not metrics] == []
    assert {place: metrics - names for place, metrics in used.items() if metrics - names} == {}
    own = {name for name in names if name.startswith("lookalike_")}
    unused = own.difference(*used.values())
    assert {name for name in unused if not name.endswith(("_bucket", "_sum", "_count"))} == set()


def test_label_values_in_expressions_exist() -> None:
    known: dict[str, set[str]] = {
        "route": {*create_app(Settings(gallery="")).openapi()["paths"]},
        "state": {*get_args(JobState)},
        "reason": {*get_args(Refusal)},
        "stage": {*get_args(Stage)},
        "provider": {*PROVIDERS},
        "alertstate": {"firing"},
        "job": {"lookalike"},
    }
    for place, expression in expressions().items():
        for label, operator, value in re.findall(r'(\w+) *(=~|!~|!=|=) *"([^"]*)"', expression):
            for part in value.split("|") if label in known else []:
                pattern = part if "~" in operator else re.escape(part)
                assert any(re.fullmatch(pattern, name) for name in known[label]), f"{place}: no {label} is {part}"


def test_every_panel_uses_the_provisioned_data_source() -> None:
    (source,) = read_provisioning("datasources/prometheus.yaml")["datasources"]
    expected = {"type": source["type"], "uid": source["uid"]}
    (variable,) = DASHBOARD["templating"]["list"]
    users = [variable, *panels(), *(target for panel in panels() for target in panel["targets"])]
    assert [user for user in users if user["datasource"] != expected] == []


def test_panels_have_a_title_and_a_description_and_do_not_overlap() -> None:
    assert all(panel["title"] and panel["description"] for panel in panels())
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    for one, other in combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def read_provisioning(name: str) -> Any:
    settings = yaml.safe_load((FOLDER / "grafana" / "provisioning" / name).read_text(encoding="utf-8"))
    assert settings["apiVersion"] == 1
    return settings


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_runbook_of_every_alert_names_things_that_exist(rule: dict[str, Any]) -> None:
    runbook = rule["annotations"]["runbook"]
    verbs = set(commands(typer.main.get_command(app)))
    lines = re.findall(r"`lookalike ([^`]*)`", runbook)
    assert [line for line in lines if not any(f"{line} ".startswith(f"{verb} ") for verb in verbs)] == []
    variables = re.findall(rf"\b{PREFIX}(\w+)", runbook)
    assert [name for name in variables if name.lower() not in Settings.model_fields] == []
    stages = set(re.findall(r"`(\w+)`", runbook))
    assert stages <= {*get_args(Stage)}
    probes = set(re.findall(r"/\w+z\b", runbook))
    assert probes <= {*create_app(Settings(gallery="")).openapi()["paths"]}
    pages = re.findall(r"docs/\w+\.md", runbook)
    assert [page for page in pages if not (REPOSITORY / page).is_file()] == []
    programs = [name for name in ("nvidia-smi", "the log", "The log") if name in runbook]
    assert lines or variables or stages or probes or pages or programs, "a runbook names something to run or to look at"


def test_every_alert_has_a_severity_a_summary_and_a_line_in_the_documentation() -> None:
    page = (REPOSITORY / "docs" / "monitor.md").read_text(encoding="utf-8")
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"].endswith(".")
        assert f"| `{rule['alert']}` |" in page, "docs/monitor.md lists every alert"


def commands(group: Any, *before: str) -> Iterator[str]:
    """Returns every command with its group: `serve`, `gallery compact`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        else:
            yield " ".join((*before, name))


def test_thresholds_of_alerts_equal_those_of_the_gallery() -> None:
    by_name = {rule["alert"]: rule["expr"] for rule in ALERTS}
    minimum, share = map(int, re.findall(r"> (\d+) and .* / (\d+)", by_name["LookalikeCompactionBehind"])[0])
    for images in (0, 100 * share, share * minimum, 10 * share * minimum):
        due = max(minimum, images // share)
        assert DEFAULT.is_compaction_due(images, due + 1) and not DEFAULT.is_compaction_due(images, due)
    assert f"{minimum}" in str(list(panels())) and f"/ {share}," in str(list(panels()))
    assert float(by_name["LookalikeRecallLow"].rpartition("< ")[2]) == DEFAULT.recall_target


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("check config --syntax-only prometheus.yml", "prometheus.yml is valid prometheus config file syntax"),
        ("check config --syntax-only prometheus.cluster.yml", "prometheus.cluster.yml is valid prometheus config file"),
        ("check rules alerts.yml", f"{len(ALERTS)} rules found"),
        pytest.param("test rules alerts.test.yml", "SUCCESS", marks=pytest.mark.slow),
    ],
)
def test_promtool_accepts_the_shipped_files(arguments: str, expected: str) -> None:
    command = [program("promtool"), *arguments.split()]
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and expected in result.stdout, result.stdout + result.stderr


def test_every_alert_fires_in_a_test() -> None:
    cases = yaml.safe_load((FOLDER / "alerts.test.yml").read_text(encoding="utf-8"))["tests"]
    expected = str([sample for case in cases for test in case["promql_expr_test"] for sample in test["exp_samples"]])
    assert {rule["alert"] for rule in ALERTS if f'"{rule["alert"]}"' not in expected} == set()


def test_compose_mounts_what_prometheus_and_grafana_read() -> None:
    services = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text(encoding="utf-8"))["services"]
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["serve:8000"]}] and "serve" in services
    cluster = yaml.safe_load((FOLDER / "prometheus.cluster.yml").read_text(encoding="utf-8"))
    (replicas,) = cluster["scrape_configs"][0]["static_configs"]
    assert replicas == {"targets": ["serve-1:8000", "serve-2:8000"]} and {"serve-1", "serve-2"} <= set(services)
    assert {
        **cluster,
        "scrape_configs": [{**cluster["scrape_configs"][0], "static_configs": [{"targets": ["serve:8000"]}]}],
    } == config
    mounted = mounts(services["prometheus"])
    assert "--config.file=/etc/prometheus/${PROMETHEUS_CONFIG:-prometheus.yml}" in services["prometheus"]["command"]
    assert mounted["/etc/prometheus/prometheus.cluster.yml"] == "./monitoring/prometheus.cluster.yml"
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= set(mounted)
    key = Path(scrape["authorization"]["credentials_file"])
    key_job = services["scrape-key"]
    assert mounted[str(key.parent)] == mounts(key_job)["/data"] and f"mv .new {key.name}" in str(key_job["command"])
    mounted = mounts(services["grafana"])
    (provider,) = read_provisioning("dashboards/lookalike.yaml")["providers"]
    assert mounted["/etc/grafana/provisioning"] == "./monitoring/grafana/provisioning"
    assert mounted[provider["options"]["path"]] == "./monitoring/grafana/dashboards"
    (source,) = read_provisioning("datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Returns the volumes of a container by the path inside it."""
    parts = [str(volume).split(":") for volume in service["volumes"]]
    return {inside: outside for outside, inside, *_ in parts}
