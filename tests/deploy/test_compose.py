"""The compose file gives each container only what it needs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
JOBS = ["lookalike", "reindex", "nightly", "demo-shop", "scrape-key", "grafana-password"]


def key_mounts(name: str) -> list[str]:
    return [volume for volume in SERVICES[name]["volumes"] if volume.startswith("keys:")]


@pytest.mark.parametrize("name", ["reindex", "nightly", "demo-shop"])
def test_jobs_that_decode_photos_of_others_cannot_reach_the_keys(name: str) -> None:
    assert key_mounts(name) == []


def test_only_commands_about_keys_may_write_them() -> None:
    writers = {name for name in SERVICES if "volumes" in SERVICES[name] and "keys:/keys" in key_mounts(name)}
    assert writers == {"lookalike", "scrape-key"}


def test_jobs_are_in_another_network_than_the_services() -> None:
    assert {name for name in SERVICES if SERVICES[name].get("networks") == ["jobs"]} == set(JOBS)
    assert all("default" in SERVICES[name].get("networks", ["default"]) for name in set(SERVICES) - set(JOBS))


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["pids_limit"] == 512
    assert "no-new-privileges:true" in service["security_opt"]
    assert service.get("cap_add", []) == (["NET_BIND_SERVICE"] if name == "tls" else [])
    assert not {"privileged", "pid", "ipc", "network_mode", "devices", "user"} & set(service)


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
