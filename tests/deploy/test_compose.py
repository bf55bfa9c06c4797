"""The compose file gives each container only what it needs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]


def key_mounts(name: str) -> list[str]:
    return [volume for volume in SERVICES[name]["volumes"] if volume.startswith("keys:")]


@pytest.mark.parametrize("name", ["reindex", "nightly", "demo-shop"])
def test_jobs_that_decode_photos_of_others_cannot_reach_the_keys(name: str) -> None:
    assert key_mounts(name) == []


def test_only_commands_about_keys_may_write_them() -> None:
    writers = {name for name in SERVICES if "volumes" in SERVICES[name] and "keys:/keys" in key_mounts(name)}
    assert writers == {"lookalike", "scrape-key"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["pids_limit"] == 512
    assert "no-new-privileges:true" in service["security_opt"]
