"""The state of the service, for people and for probes."""

import shutil
import time
from pathlib import Path

import httpx

from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery


def test_status_reports_gallery_model_and_limits(client: httpx.Client) -> None:
    status = client.get("/v1/status").json()
    assert (status["gallery"]["items"], status["gallery"]["images"]) == (8, 16)
    assert (status["bundle"]["backbone"], status["bundle"]["dimension"]) == ("colour_grid", 48)
    assert status["bundle"]["metrics"] == {"recall@1": 0.9}
    assert status["bundle"]["untrained_metrics"] == {"recall@1": 0.5}
    assert status["provider"].endswith("ExecutionProvider")
    limits = {"max_body_bytes": 300_000, "max_pixels": 1_000_000, "max_batch": 16, "max_examples": 16}
    assert status["limits"] == limits


def test_a_pretrained_bundle_has_neither_loss_nor_data(settings: Settings, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle", loss="")
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    with serving(settings.model_copy(update={"gallery": str(gallery), "bundle": bundle})) as client:
        status = client.get("/v1/status").json()
    assert (status["bundle"]["loss"], status["bundle"]["data"]) == (None, None)


def test_probes_answer(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == client.get("/readyz").json() == {"status": "ok"}


def test_a_service_whose_store_is_gone_is_not_ready_and_keeps_searching(settings: Settings, tmp_path: Path) -> None:
    gallery = tmp_path / "gallery"
    shutil.copytree(settings.gallery, gallery)
    with serving(settings.model_copy(update={"gallery": str(gallery)})) as client:
        assert client.get("/readyz").status_code == 200
        (gallery / "catalogue.sqlite").rename(tmp_path / "moved")
        end = time.monotonic() + 20
        while client.get("/readyz").status_code == 200 and time.monotonic() < end:
            time.sleep(0.05)
        body = problem(client.get("/readyz"), 503, "not-ready")
        assert "was deleted, replaced or cut" in body["detail"] and str(tmp_path) not in body["detail"]
        problem(client.delete("/v1/items/ball-red"), 503, "store-failed")
        assert client.post("/v1/search", json={"item_id": "ball-red"}).status_code == 200
        assert "lookalike_ready 0" in client.get("/metrics").text


def test_a_damaged_store_is_a_problem_and_not_an_internal_error(settings: Settings, tmp_path: Path) -> None:
    gallery = tmp_path / "gallery"
    shutil.copytree(settings.gallery, gallery)
    with serving(settings.model_copy(update={"gallery": str(gallery)})) as client:
        assert client.get("/v1/status").status_code == 200
        with (gallery / "catalogue.sqlite").open("r+b") as file:
            file.truncate(8192)
        for path in ("/v1/items/ball-red", "/v1/items", "/v1/status"):
            body = problem(client.get(path), 503, "store-failed")
            assert "malformed" in body["detail"] and str(tmp_path) not in body["detail"]
