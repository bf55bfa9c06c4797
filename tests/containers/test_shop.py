"""The compose file from an empty volume to years later, with real containers."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from index.embedding.bundle import Bundle
from tests.containers.shop import PATIENCE, Engine, Shop


def test_a_first_start_is_closed_and_says_what_it_waits_for(shop: Shop) -> None:
    waiting = shop.get("/readyz")
    assert waiting.status_code == 503 and "lookalike reindex" in waiting.json()["remedy"]
    assert shop.get("/v1/status").status_code == 401
    assert "<html" in shop.get("/").text
    told = shop.compose("logs", "serve")
    assert "NO KEY YET in /keys/keys.json" in told and "EMPTY GALLERY /data/gallery" in told


def test_the_service_can_change_nothing_but_its_volumes(shop: Shop) -> None:
    assert shop.inside("id -u").strip() == "10001"
    assert "CapEff:\t0000000000000000" in shop.inside("cat /proc/1/status")
    for place in ("/", "/app", "/opt/lookalike", "/keys", "/shop", "/bundles", "/etc"):
        assert shop.inside(f"touch {place}/x 2>/dev/null || echo refused").strip() == "refused", place
    assert shop.inside("touch /tmp/x /data/x && echo written").strip() == "written"


def test_the_image_carries_neither_pytorch_nor_what_built_it(shop: Shop) -> None:
    assert shop.inside("python -c 'import torch' 2>&1 || true").splitlines()[-1].startswith("ModuleNotFoundError")
    assert shop.inside("ls /opt/lookalike/lib/*/site-packages | grep -E '^(pip|setuptools|wheel)$' || true") == ""
    assert shop.inside("ls -d /build /source /requirements /root/.cache 2>/dev/null || true") == ""
    assert shop.inside("lookalike --version").startswith("lookalike ")


def test_indexed_photos_are_found_after_a_restart_and_after_down_and_up(shop: Shop) -> None:
    key = shop.job("lookalike", "keys", "create", "shop", "--scope", "search").strip()
    assert "16 photos embedded" in shop.job("reindex")
    shop.wait_until("/readyz", 200)
    assert shop.found(key) == "ball-blue"
    shop.compose("restart", "serve")
    shop.wait_until("/readyz", 200)
    assert shop.found(key) == "ball-blue"
    shop.compose("down")
    shop.compose("up", "--detach", "--no-build")
    shop.wait_until("/readyz", 200)
    assert shop.found(key) == "ball-blue", "neither the gallery nor the key is lost"
    assert "0 photos embedded, 16 unchanged" in shop.job("reindex")
    assert "No fault found" in shop.job("lookalike", "gallery", "verify", "/data/gallery")


def test_a_new_bundle_goes_live_and_is_rolled_back_beside_the_service(shop: Shop, tmp_path: Path) -> None:
    old, new = (Bundle.load(tmp_path / "bundles" / name).id for name in ("bundle", "new"))
    key = shop.job("lookalike", "keys", "create", "shop", "--scope", "search").strip()
    shop.job("reindex")
    shop.wait_until("/readyz", 200)
    shop.wait_for_bundle(old, key)
    shop.job("reindex", BUNDLE="new")
    shop.wait_for_bundle(new, key)
    assert shop.found(key) == "ball-blue"
    assert f"Bundle {old} is live again" in shop.job("lookalike", "gallery", "rollback", "/data/gallery")
    shop.wait_for_bundle(old, key)
    assert shop.found(key) == "ball-blue"


def test_a_snapshot_is_restored_beside_the_gallery(shop: Shop) -> None:
    shop.job("reindex")
    shop.job("lookalike", "gallery", "snapshot", "/data/gallery", "/data/backup.tar")
    shop.job("lookalike", "gallery", "restore", "/data/backup.tar", "/data/restored")
    assert "No fault found" in shop.job("lookalike", "gallery", "verify", "/data/restored")


def test_the_nightly_job_runs_at_its_time_and_waits_for_the_next(shop: Shop) -> None:
    at = datetime.now(UTC) + timedelta(seconds=15)
    shop.compose("--profile", "nightly", "up", "--detach", "--no-build", "nightly", REINDEX_AT=f"{at:%H:%M:%S}")
    shop.wait_until("/readyz", 200)
    deadline = time.monotonic() + PATIENCE
    while (told := shop.compose("--profile", "nightly", "logs", "nightly")).count("The next re-index starts on") < 2:
        assert time.monotonic() < deadline, told
        time.sleep(0.5)
    assert "16 photos embedded" in told and "The re-index ended with code 0." in told


def test_a_change_of_the_source_leaves_the_dependencies_layer_alone(engine: Engine, project: Path, image: str) -> None:
    def layers() -> list[str]:
        told: list[str] = json.loads(engine.run("image", "inspect", image, "--format", "{{json .RootFS.Layers}}"))
        return told

    before = layers()
    with (project / "lookalike.py").open("a") as file:
        file.write(f"\n# {time.time()}\n")
    engine.compose(project, "build", "serve", IMAGE=image)
    *kept, ours = layers()
    assert kept == before[:-1] and ours != before[-1]
