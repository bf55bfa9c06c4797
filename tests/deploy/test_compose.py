"""The compose file gives each container only what it needs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from lookalike import app

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
JOBS = ["lookalike", "reindex", "nightly", "demo-shop", "scrape-key", "grafana-password", "cluster-secrets"]
CLUSTER_JOBS = ["cluster", "cluster-reindex", "cluster-nightly"]
REPLICAS = ["serve-1", "serve-2"]
NODES = ["qdrant-1", "qdrant-2", "qdrant-3"]


def key_mounts(name: str) -> list[str]:
    return [volume for volume in SERVICES[name]["volumes"] if volume.startswith("keys:")]


@pytest.mark.parametrize("name", ["reindex", "nightly", "demo-shop", *CLUSTER_JOBS])
def test_jobs_that_decode_photos_of_others_cannot_reach_the_keys(name: str) -> None:
    assert key_mounts(name) == []


def test_only_commands_about_keys_may_write_them() -> None:
    writers = {name for name in SERVICES if "volumes" in SERVICES[name] and "keys:/keys" in key_mounts(name)}
    assert writers == {"lookalike", "scrape-key"}


def test_jobs_are_in_another_network_than_the_services() -> None:
    assert {name for name in SERVICES if SERVICES[name].get("networks") == ["jobs"]} == set(JOBS)
    assert {name for name in SERVICES if SERVICES[name].get("networks") == ["jobs", "cluster"]} == set(CLUSTER_JOBS)
    assert {name for name in SERVICES if SERVICES[name].get("networks") == ["cluster"]} == {"postgres", *NODES}
    others = set(SERVICES) - set(JOBS) - set(CLUSTER_JOBS) - {"postgres", *NODES}
    assert all("default" in SERVICES[name].get("networks", ["default"]) for name in others)


def test_databases_have_no_ports_and_no_connection_to_the_outside() -> None:
    assert COMPOSE["networks"]["cluster"] == {"internal": True}
    assert not any("ports" in SERVICES[name] for name in ("postgres", *NODES))
    members = {name for name in SERVICES if "cluster" in SERVICES[name].get("networks", [])}
    assert members == {"postgres", *NODES, *REPLICAS, *CLUSTER_JOBS}


def test_nothing_of_the_cluster_starts_without_its_profile() -> None:
    parts = {"postgres", *NODES, *REPLICAS, *CLUSTER_JOBS, "balancer", "cluster-secrets"}
    assert {name for name in SERVICES if SERVICES[name].get("profiles") == ["cluster"]} == parts


def test_replicas_and_jobs_of_the_cluster_use_one_gallery_and_caches_of_their_own() -> None:
    environments = [SERVICES[name]["environment"] for name in (*REPLICAS, *CLUSTER_JOBS)]
    (address,) = {each["LOOKALIKE_GALLERY"] for each in environments}
    found = re.fullmatch(r"\$\{CLUSTER_GALLERY:-(\S+) (\S+)\}", address)
    assert found
    store, index = urlsplit(found[1]), urlsplit(found[2])
    assert (store.scheme, store.hostname, store.password) == ("postgresql", "postgres", None)
    assert (store.username, store.path) == (SERVICES["postgres"]["environment"]["POSTGRES_USER"], "/lookalike")
    assert index.scheme == "qdrant" and index.netloc == ",".join(f"{node}:6334" for node in NODES)
    caches = [volume for name in REPLICAS for volume in SERVICES[name]["volumes"] if volume.endswith(":/data")]
    assert caches == [f"{name}:/data" for name in REPLICAS] and set(REPLICAS) <= set(COMPOSE["volumes"])
    assert {each["LOOKALIKE_CACHE"] for each in environments} == {"/data/cache"}


def test_nodes_of_qdrant_join_the_first_one_and_keep_their_own_volumes() -> None:
    for name in NODES:
        options = SERVICES[name]["command"]
        assert options[:2] == ["--uri", f"http://{name}:6335"]
        assert options[2:] == ([] if name == NODES[0] else ["--bootstrap", f"http://{NODES[0]}:6335"])
        assert f"{name}:/qdrant/storage" in SERVICES[name]["volumes"]


def test_secrets_of_the_cluster_are_generated_before_anything_uses_them(tmp_path: Path) -> None:
    users = {name for name in SERVICES if any("cluster-secrets:" in str(each) for each in SERVICES[name]["volumes"])}
    assert users == {"postgres", *NODES, *REPLICAS, *CLUSTER_JOBS, "cluster-secrets"}
    for name in users - {"cluster-secrets"}:
        assert "cluster-secrets:/run/secrets:ro" in SERVICES[name]["volumes"]
        assert SERVICES[name]["depends_on"]["cluster-secrets"] == {"condition": "service_completed_successfully"}
    command = [part.replace("$$", "$") for part in SERVICES["cluster-secrets"]["command"]]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for _ in range(2):  # the second time changes nothing
        subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PATH": path})
        files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert set(files) == {"password", "qdrant.key", "pgpass"}
    password = files["password"].strip()
    assert len(password) >= 32 and len(files["qdrant.key"].strip()) >= 32 and password != files["qdrant.key"].strip()
    assert files["pgpass"] == f"postgres:5432:lookalike:lookalike:{password}\n"
    assert (tmp_path / "pgpass").stat().st_mode & 0o777 == 0o600, "libpq ignores a file that others can read"
    assert len(list(tmp_path.iterdir())) == 3


def test_command_line_accepts_the_job_of_the_cluster() -> None:
    entrypoint = SERVICES["cluster-reindex"]["entrypoint"]
    assert entrypoint[-2].startswith("exec lookalike reindex ") and entrypoint[-3:-1][0] == "-c"
    assert SERVICES["cluster-nightly"]["command"] == entrypoint
    line = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", entrypoint[-2]).removesuffix(' "$$@"')
    words = [word.replace("$$LOOKALIKE_GALLERY", "gallery") for word in shlex.split(line)]
    command: Any = typer.main.get_command(app)
    parameters = command.commands["reindex"].make_context("reindex", words[3:]).params
    assert parameters["source"] == ["/shop/catalogue.csv"] and parameters["delete_missing"]
    assert str(parameters["gallery"]) == "gallery" and str(parameters["bundle"]) == "/bundles/bundle"


def test_balancer_knows_every_replica_and_the_shipped_configuration() -> None:
    balancer = SERVICES["balancer"]
    assert balancer["environment"]["UPSTREAM"].split() == [f"{name}:8000" for name in REPLICAS]
    assert balancer["volumes"] == ["./proxy/Caddyfile:/etc/caddy/Caddyfile:ro"]
    assert balancer["image"] == SERVICES["tls"]["image"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["pids_limit"] == 512
    assert "no-new-privileges:true" in service["security_opt"]
    assert service.get("cap_add", []) == (["NET_BIND_SERVICE"] if name in ("tls", "balancer") else [])
    assert not {"privileged", "pid", "ipc", "network_mode", "devices"} & set(service)
    assert service.get("user") == ("postgres" if name == "postgres" else None)


@pytest.mark.parametrize("name", SERVICES)
def test_memory_of_every_container_is_limited_and_contains_its_tmp(name: str) -> None:
    (tmp,) = SERVICES[name]["tmpfs"]
    place, options = tmp.split(":", 1)
    assert place == "/tmp" and options.endswith(",mode=1777,noexec,nosuid,nodev")
    assert 4 * mebibytes(options.removeprefix("size=").split(",")[0]) <= mebibytes(SERVICES[name]["mem_limit"])


def mebibytes(size: str) -> int:
    """Returns a size of the compose file, of a variable its default."""
    found = re.fullmatch(r"(?:\$\{\w+:-)?(\d+)([mg])\}?", size)
    assert found, size
    return int(found[1]) * {"m": 1, "g": 1024}[found[2]]


@pytest.mark.parametrize("name", SERVICES)
def test_only_the_tls_proxy_listens_beyond_this_machine(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert name == "tls" or port.startswith(("127.0.0.1:", "${BIND:-127.0.0.1}:"))


def test_password_of_grafana_is_generated_before_it_starts() -> None:
    grafana = SERVICES["grafana"]
    assert grafana["depends_on"]["grafana-password"] == {"condition": "service_completed_successfully"}
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/password"
    assert "grafana-password:/run/secrets:ro" in grafana["volumes"]
    assert SERVICES["grafana-password"]["volumes"] == ["grafana-password:/data"]
    others = {name for name in SERVICES if any("grafana-password:" in str(each) for each in SERVICES[name]["volumes"])}
    assert others == {"grafana", "grafana-password"}
