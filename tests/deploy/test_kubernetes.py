"""Tests of the manifests: they are valid and name only paths, settings and commands that exist."""

import ipaddress
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import typer
import yaml

from lookalike import app
from service.app import create_app
from service.auth.api_keys import KeyRing
from service.server import run
from service.settings import PREFIX, Settings, SettingsError, load_settings
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import tiny_photo, write_tiny_source

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OLDEST_VERSION = "1.31"
"""The first version in which every field that is used is stable."""


def read(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


(KUSTOMIZATION,) = read("kustomization.yaml")
OBJECTS: dict[str, Any] = {
    f"{each['kind']}/{each['metadata']['name']}": each for name in KUSTOMIZATION["resources"] for each in read(name)
}
SERVE = OBJECTS["Deployment/lookalike"]["spec"]["template"]
JOB = OBJECTS["CronJob/lookalike-reindex"]["spec"]["jobTemplate"]["spec"]
PODS = {"serve": SERVE, "reindex": JOB["template"]}
NETWORK = {name: OBJECTS[f"NetworkPolicy/lookalike-{name}"]["spec"] for name in ("default", "serve", "reindex")}
SETTINGS: dict[str, str] = OBJECTS["ConfigMap/lookalike-settings"]["data"]


def container(pod: dict[str, Any]) -> Any:
    (single,) = pod["spec"]["containers"]
    return single


@pytest.mark.parametrize("version", [OLDEST_VERSION, kubernetes_validate.latest_version()])
def test_every_object_is_valid(version: str) -> None:
    for each in OBJECTS.values():
        kubernetes_validate.validate(each, version, strict=True)
    misspelt = {**OBJECTS["Service/lookalike"], "spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, version, strict=True)


def test_kustomization_has_every_file_and_the_released_image() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == {"kustomization.yaml", *KUSTOMIZATION["resources"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (image,) = KUSTOMIZATION["images"]
    assert image["newTag"] == project["version"]
    assert {container(pod)["image"] for pod in PODS.values()} == {image["name"]}
    assert not any("namespace" in each["metadata"] for each in OBJECTS.values())


def test_kubectl_builds_the_kustomization_and_the_documented_overlay(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    overlay = "".join(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))  # a kustomization, and one more patch
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "kustomization.yaml").write_text(overlay)
    for folder in (FOLDER, tmp_path / "cluster"):
        built = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=True).stdout
        objects = {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(built)}
        assert set(objects) == set(OBJECTS)
        for each in objects.values():
            kubernetes_validate.validate(each, OLDEST_VERSION, strict=True)
    pod = objects["Deployment/lookalike"]["spec"]["template"]
    assert container(pod)["image"].startswith("registry.example/lookalike:")
    job = objects["NetworkPolicy/lookalike-reindex"]["spec"]["egress"]
    assert job[:-1] == NETWORK["reindex"]["egress"] and job[-1]["to"] == [{"ipBlock": {"cidr": "10.20.30.40/32"}}]


def test_probes_use_endpoints_of_the_service() -> None:
    paths = create_app(Settings(gallery="")).openapi()["paths"]
    serve = container(SERVE)
    (port,) = serve["ports"]
    assert str(port["containerPort"]) == SETTINGS["LOOKALIKE_PORT"]
    for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert serve[probe]["httpGet"] == {"path": path, "port": port["name"]} and "get" in paths[path]
    assert OBJECTS["Service/lookalike"]["spec"]["ports"][0]["targetPort"] == port["name"]
    (rule,) = NETWORK["serve"]["ingress"]
    assert rule["ports"] == [{"port": port["name"], "protocol": "TCP"}]


def test_settings_exist_and_match_the_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SETTINGS.items():
        assert variable.removeprefix(PREFIX).lower() in Settings.model_fields
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    mounts = {mount["mountPath"]: mount["name"] for mount in container(SERVE)["volumeMounts"]}
    assert mounts[str(Path(settings.gallery).parent)] == "data"
    assert settings.keys and mounts[str(settings.keys.parent)] == "keys"


def test_service_links_of_kubernetes_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    name = OBJECTS["Service/lookalike"]["metadata"]["name"]
    monkeypatch.setenv(f"{name.upper()}_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(SettingsError):
        load_settings(gallery="gallery")
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in PODS.values())


def test_grace_period_covers_draining_and_requests_in_progress() -> None:
    drain, readiness = float(SETTINGS["LOOKALIKE_DRAIN_SECONDS"]), container(SERVE)["readinessProbe"]
    assert drain > readiness["periodSeconds"] * readiness["failureThreshold"]
    assert SERVE["spec"]["terminationGracePeriodSeconds"] >= drain + run._SHUTDOWN_SECONDS + 10


def test_service_and_job_share_a_volume_on_one_node() -> None:
    labels = SERVE["metadata"]["labels"]
    for pod in PODS.values():
        (affinity,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert affinity == {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
        (claim,) = [each["persistentVolumeClaim"] for each in pod["spec"]["volumes"] if each["name"] == "data"]
        assert claim == {"claimName": "lookalike-data"}
    assert OBJECTS["PersistentVolumeClaim/lookalike-data"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    for selector in (
        OBJECTS["Deployment/lookalike"]["spec"]["selector"]["matchLabels"],
        OBJECTS["Service/lookalike"]["spec"]["selector"],
        NETWORK["serve"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
    isolated = NETWORK["reindex"]["podSelector"]["matchLabels"]
    assert isolated == PODS["reindex"]["metadata"]["labels"] != labels


def test_pods_have_no_connections_by_default() -> None:
    assert NETWORK["default"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & set(NETWORK["default"])
    selected = NETWORK["default"]["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in PODS.values())


def test_service_accepts_only_labelled_clients_and_prometheus() -> None:
    assert NETWORK["serve"]["policyTypes"] == ["Ingress"] and "egress" not in NETWORK["serve"]
    (rule,) = NETWORK["serve"]["ingress"]
    labels = [{kind: peer[kind]["matchLabels"] for kind in peer} for peer in rule["from"]]
    assert labels == [
        {"podSelector": {"lookalike-access": "true"}},
        {"namespaceSelector": {"lookalike-access": "true"}},
        {
            "namespaceSelector": {"lookalike-access": "metrics"},
            "podSelector": {"app.kubernetes.io/name": "prometheus"},
        },
    ]
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert "lookalike-access=true" in page and "lookalike-access=metrics" in page


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("169.254.169.254", False),
        ("169.254.170.2", False),
        ("fd00:ec2::254", False),
        ("168.63.129.16", False),
        ("100.100.100.200", False),
        ("192.0.0.192", False),
        ("10.96.0.1", False),
        ("172.20.0.1", False),
        ("192.168.1.1", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:a9fe:a9fe::", False),
    ],
)
def test_job_connects_only_to_public_addresses(address: str, allowed: bool) -> None:
    names, public = NETWORK["reindex"]["egress"]
    assert NETWORK["reindex"]["policyTypes"] == ["Egress"]
    assert {port["port"] for port in names["ports"]} == {53} and {port["port"] for port in public["ports"]} == {80, 443}
    target = ipaddress.ip_address(address)
    blocks = [peer["ipBlock"] for peer in public["to"]]
    open_blocks = [
        block
        for block in blocks
        if target in ipaddress.ip_network(block["cidr"])
        and not any(target in ipaddress.ip_network(each) for each in block["except"])
    ]
    assert bool(open_blocks) is allowed


@pytest.mark.parametrize("name", PODS)
def test_pods_have_minimal_privileges(name: str) -> None:
    pod, pod_container = PODS[name]["spec"], container(PODS[name])
    user = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    context = pod["securityContext"]
    assert {(str(context["runAsUser"]), str(context["runAsGroup"]))} == set(user)
    assert context["runAsNonRoot"] and context["fsGroup"] == context["runAsGroup"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod_container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert set(pod_container["resources"]["limits"]) == set(pod_container["resources"]["requests"]) == {"cpu", "memory"}
    writable = {mount["mountPath"] for mount in pod_container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/data", "/tmp"}
    temporary = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}
    assert set(temporary) == {"tmp"} and set(temporary["tmp"]) == {"sizeLimit"}, "on disk, and limited"
    mounted = {mount["name"] for mount in pod_container["volumeMounts"]}
    assert ("keys" in mounted) is (name == "serve"), "the job decodes photos of others"


def job_arguments() -> list[str]:
    """Returns the arguments of the job after `lookalike reindex`, with its variables filled in as the kubelet does."""
    job = container(JOB["template"])
    (source,) = job["envFrom"]
    values = OBJECTS[f"ConfigMap/{source['configMapRef']['name']}"]["data"]
    assert job["command"] == ["lookalike", "reindex"]
    return [re.sub(r"\$\((\w+)\)", lambda found: str(values[found[1]]), argument) for argument in job["args"]]


def test_command_line_accepts_the_arguments_of_the_job() -> None:
    command: Any = typer.main.get_command(app)
    parameters = command.commands["reindex"].make_context("reindex", job_arguments()).params
    assert parameters["source"] == ["/data/shop/catalogue.csv"] and parameters["delete_missing"]
    assert str(parameters["gallery"]) == SETTINGS["LOOKALIKE_GALLERY"]
    assert all(str(parameters[name]).startswith("/data/") for name in ("bundle", "rejects"))
    (no_retry, _) = JOB["podFailurePolicy"]["rules"]
    exit_codes = no_retry["onExitCodes"]
    page = (ROOT / "docs" / "reindex.md").read_text(encoding="utf-8")
    assert exit_codes["containerName"] == container(JOB["template"])["name"]
    assert all(f"\n| {code} |" in page for code in exit_codes["values"])


def test_commands_of_the_pods_run_as_written(tmp_path: Path) -> None:
    """The service starts with an empty volume and is not ready until the job has filled it."""
    data = tmp_path / "data"
    write_tiny_source(data / "shop")
    make_tiny_bundle(data / "bundles" / "bundle")
    (tmp_path / "keys").mkdir()
    headers = {"X-API-Key": KeyRing(tmp_path / "keys" / "keys.json").create("shop", ["search"])}
    variables = {name: map_volumes(value, tmp_path) for name, value in SETTINGS.items()}
    command = [sys.executable, "-m", *container(SERVE)["command"], "--host", "127.0.0.1", "--port", "0"]
    environment = {**os.environ, **variables, "LOOKALIKE_DRAIN_SECONDS": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout
            found = re.search(r"http://[^\s\"]+", process.stdout.readline())
            assert found
            probes = {path: httpx.get(found[0] + path).status_code for path in ("/healthz", "/readyz")}
            assert probes == {"/healthz": 200, "/readyz": 503}
            arguments = [map_volumes(argument, tmp_path) for argument in job_arguments()]
            subprocess.run([sys.executable, "-m", "lookalike", "reindex", *arguments], check=True, capture_output=True)
            deadline = time.monotonic() + 60
            while httpx.get(f"{found[0]}/readyz").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            response = httpx.post(f"{found[0]}/v1/search", files={"image": tiny_photo(2, 5)}, headers=headers)
            assert response.json()["items"][0]["id"] == "ball-blue"
        finally:
            process.terminate()
    assert process.returncode in (0, -15)


def test_key_ring_follows_keys_that_kubernetes_replaces(tmp_path: Path) -> None:
    """The kubelet mounts a Secret as links into a folder that is itself a link, and replaces that link."""
    keys = tmp_path / "keys.json"
    keys.symlink_to("..data/keys.json")
    tokens = []
    ring = KeyRing(keys)
    for version in ("..first", "..second"):
        (tmp_path / version).mkdir()
        tokens.append(KeyRing(tmp_path / version / "keys.json").create("shop", ["search"]))
        (tmp_path / "..data_tmp").symlink_to(version)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        assert ring.verify(tokens[-1])
    assert not ring.verify(tokens[0])


def map_volumes(value: str, root: Path) -> str:
    """Returns a value of the manifests with the volumes of the pod moved to a folder of this test."""
    return re.sub("(^|=)/(data|keys)/", rf"\1{root}/\2/", value)
