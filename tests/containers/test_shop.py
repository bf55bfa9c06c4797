"""Tests of the compose file with real containers: first start, jobs, upgrades, backups."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from index.embedding.bundle import Bundle
from tests.containers.shop import TIMEOUT_SECONDS, Engine, Shop


def test_first_start_refuses_requests_and_reports_what_is_missing(shop: Shop) -> None:
    readiness = shop.get("/readyz")
    assert readiness.status_code == 503 and "lookalike reindex" in readiness.json()["remedy"]
    assert shop.get("/v1/status").status_code == 401
    assert "<html" in shop.get("/").text
    log = shop.compose("logs", "serve")
    assert "NO KEY YET in /keys/keys.json" in log and "EMPTY GALLERY /data/gallery" in log


def test_service_can_write_only_to_its_volumes(shop: Shop) -> None:
    assert shop.run_inside("id -u").strip() == "10001"
    assert "CapEff:\t0000000000000000" in shop.run_inside("cat /proc/1/status")
    for place in ("/", "/app", "/opt/lookalike", "/keys", "/shop", "/bundles", "/etc"):
        assert shop.run_inside(f"touch {place}/x 2>/dev/null || echo refused").strip() == "refused", place
    assert shop.run_inside("touch /tmp/x /data/x && echo written").strip() == "written"
    assert "NoNewPrivs:\t1" in shop.run_inside("cat /proc/1/status")
    assert shop.run_inside("df --output=size --block-size=1M /tmp").split()[-1] == "256"


def test_jobs_reach_neither_the_keys_nor_other_services(shop: Shop) -> None:
    shop.job("lookalike", "keys", "create", "shop", "--scope", "search")
    assert shop.job("--entrypoint", "ls", "reindex", "-A", "/keys").strip() == ""
    connect = "import socket; socket.create_connection(('serve', 8000), 5)"
    with pytest.raises(AssertionError, match="gaierror"):
        shop.job("--entrypoint", "python", "reindex", "-c", connect)


def test_image_decodes_the_formats_of_phones(shop: Shop) -> None:
    script = "import pillow_heif; from PIL import features; print(features.check('avif'), features.check('webp'))"
    assert shop.run_inside(f'python -c "{script}"').strip() == "True True"


def test_password_of_grafana_is_random_and_kept(shop: Shop) -> None:
    def password() -> str:
        shop.compose("--profile", "monitoring", "run", "-T", "--rm", "grafana-password")
        show = ("--entrypoint", "cat", "grafana-password", "/data/password")
        return shop.compose("--profile", "monitoring", "run", "-T", "--rm", *show).strip()

    first = password()
    assert len(first) == 32 and password() == first


def test_image_contains_neither_pytorch_nor_build_tools(shop: Shop) -> None:
    assert shop.run_inside("python -c 'import torch' 2>&1 || true").splitlines()[-1].startswith("ModuleNotFoundError")
    assert shop.run_inside("ls /opt/lookalike/lib/*/site-packages | grep -E '^(pip|setuptools|wheel)$' || true") == ""
    assert shop.run_inside("ls -d /build /source /requirements /root/.cache 2>/dev/null || true") == ""
    assert shop.run_inside("lookalike --version").startswith("lookalike ")


def test_gallery_and_keys_survive_restart_and_recreation(shop: Shop) -> None:
    key = shop.job("lookalike", "keys", "create", "shop", "--scope", "search").strip()
    assert "16 photos embedded" in shop.job("reindex")
    shop.wait_until("/readyz", 200)
    assert shop.search(key) == "ball-blue"
    shop.compose("restart", "serve")
    shop.wait_until("/readyz", 200)
    assert shop.search(key) == "ball-blue"
    shop.compose("down")
    shop.compose("up", "--detach", "--no-build")
    shop.wait_until("/readyz", 200)
    assert shop.search(key) == "ball-blue", "gallery and key are kept"
    assert "0 photos embedded, 16 unchanged" in shop.job("reindex")
    assert "No fault found" in shop.job("lookalike", "gallery", "verify", "/data/gallery")


def test_new_bundle_is_activated_and_rolled_back_while_serving(shop: Shop, tmp_path: Path) -> None:
    old, new = (Bundle.load(tmp_path / "bundles" / name).id for name in ("bundle", "new"))
    key = shop.job("lookalike", "keys", "create", "shop", "--scope", "search").strip()
    shop.job("reindex")
    shop.wait_until("/readyz", 200)
    shop.wait_for_bundle(old, key)
    shop.job("reindex", BUNDLE="new")
    shop.wait_for_bundle(new, key)
    assert shop.search(key) == "ball-blue"
    assert f"Bundle {old} is active again" in shop.job("lookalike", "gallery", "rollback", "/data/gallery")
    shop.wait_for_bundle(old, key)
    assert shop.search(key) == "ball-blue"


def test_snapshot_is_restored_next_to_the_gallery(shop: Shop) -> None:
    shop.job("reindex")
    shop.job("lookalike", "gallery", "snapshot", "/data/gallery", "/data/backup.tar")
    shop.job("lookalike", "gallery", "restore", "/data/backup.tar", "/data/restored")
    assert "No fault found" in shop.job("lookalike", "gallery", "verify", "/data/restored")


def test_nightly_job_runs_at_its_time_and_schedules_the_next(shop: Shop) -> None:
    at = datetime.now(UTC) + timedelta(seconds=15)
    shop.compose("--profile", "nightly", "up", "--detach", "--no-build", "nightly", REINDEX_AT=f"{at:%H:%M:%S}")
    shop.wait_until("/readyz", 200)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (log := shop.compose("--profile", "nightly", "logs", "nightly")).count("The next re-index starts on") < 2:
        assert time.monotonic() < deadline, log
        time.sleep(0.5)
    assert "16 photos embedded" in log and "The re-index ended with code 0." in log


def test_source_change_keeps_the_layer_of_dependencies(engine: Engine, project: Path, image: str) -> None:
    def layers() -> list[str]:
        digests: list[str] = json.loads(engine.run("image", "inspect", image, "--format", "{{json .RootFS.Layers}}"))
        return digests

    before = layers()
    with (project / "lookalike.py").open("a") as file:
        file.write(f"\n# {time.time()}\n")
    engine.compose(project, "build", "serve", IMAGE=image)
    *kept, ours = layers()
    assert kept == before[:-1] and ours != before[-1]
