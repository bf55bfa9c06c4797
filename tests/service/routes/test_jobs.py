"""Re-indexing over the API: real jobs in processes of their own, watched, cancelled, and outliving the service."""

import csv
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import fastapi.routing
import httpx
import pytest

from index.embedding.bundle import Bundle
from index.gallery.store.sqlite_jobs import SQLiteJobs
from index.ingest.options import ReindexOptions
from service.auth.api_keys import KeyRing
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.disk import files_up_to
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo, write_tiny_source


class Shop(NamedTuple):
    settings: Settings
    client: httpx.Client
    history: SQLiteJobs

    @property
    def gallery(self) -> Path:
        return Path(self.settings.gallery)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A service over an indexed gallery, with two sources and another bundle in its settings."""
    gallery = make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle"))
    settings = Settings(
        gallery=gallery,
        threads=1,
        sources={"more": str(write_tiny_source(tmp_path / "more", views=3)), "lost": str(tmp_path / "lost.csv")},
        bundles={"small": make_tiny_bundle(tmp_path / "small", grid=2)},
    )
    with serving(settings) as client, closing(SQLiteJobs(gallery)) as history:
        yield Shop(settings, client, history)


def wait_for_end(client: httpx.Client, address: str) -> dict[str, Any]:
    """Waits until a job has ended, and returns it."""
    deadline = time.monotonic() + 60
    while (job := client.get(address).json())["state"] == "running":
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return dict(job)


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the events of a stream, each with its data."""
    for line in lines:
        if line.startswith("event: "):
            yield line.removeprefix("event: "), json.loads(next(lines).removeprefix("data: "))


def test_a_job_is_started_watched_and_done(shop: Shop) -> None:
    started = shop.client.post("/v1/jobs", json={"source": "more"})
    assert started.status_code == 202 and started.json()["state"] == "running"
    address = started.headers["location"]
    assert address == f"/v1/jobs/{started.json()['id']}"
    with shop.client.stream("GET", f"{address}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = list(read_events(stream.iter_lines()))
    assert [name for name, _ in events[:-1]] == ["progress"] * (len(events) - 1)
    name, last = events[-1]
    assert (name, last["state"], last["done"], last["total"]) == ("ended", "done", 24, 24)
    assert (last["source"], last["embedded"], last["unchanged"]) == ("more", 8, 16)
    job = shop.client.get(address).json()
    assert job == last and job["rate"] > 0 and job["seconds_left"] is None
    assert [one["id"] for one in shop.client.get("/v1/jobs").json()["jobs"]] == [job["id"], job["id"] - 1]
    options = ReindexOptions.model_validate_json((shop.gallery / "jobs" / f"{job['id']}.options.json").read_bytes())
    assert options.source == [shop.settings.sources["more"]], "the options are kept with the log"
    assert "8 photos embedded" in (shop.gallery / "jobs" / f"{job['id']}.log").read_text()
    found = shop.client.post("/v1/search?limit=1", files={"image": tiny_photo(2, 2)}).json()
    gallery = shop.client.get("/v1/status").json()["gallery"]
    assert found["items"][0]["id"] == "ball-blue"
    assert job["revision"] == found["revision"] == gallery["revision"] == gallery["index"]["revision"]


def test_a_named_bundle_is_activated_over_the_api(shop: Shop) -> None:
    small = Bundle.load(shop.settings.bundles["small"]).id
    body = {"source": "more", "bundle": "small", "max_delete": 1, "queries": "more", "expect_recall": 0.5}
    started = shop.client.post("/v1/jobs", json=body)
    assert (shop.gallery / "bundles" / small).is_dir(), "items that are stored from now on get vectors of it"
    job = wait_for_end(shop.client, started.headers["location"])
    assert (job["state"], job["bundle_id"]) == ("done", small) and "Recall@1" in job["message"]
    deadline = time.monotonic() + 20
    while shop.client.get("/v1/status").json()["bundle"]["id"] != small:
        shop.client.post("/v1/search", files={"image": tiny_photo(0, 0)})
        assert time.monotonic() < deadline, "the service must follow"


def test_only_one_of_several_concurrent_requests_starts_a_job(shop: Shop) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: shop.client.post("/v1/jobs", json={"source": "more"}), range(4)))
    (started,) = [answer for answer in answers if answer.status_code == 202]
    for answer in answers:
        if answer is not started:
            body = problem(answer, 409, "job-running")
            assert f"Job {started.json()['id']} " in body["detail"]
            assert answer.headers["location"] == started.headers["location"]
    assert wait_for_end(shop.client, started.headers["location"])["state"] == "done"


def test_a_job_of_another_process_blocks_a_new_one(shop: Shop) -> None:
    other = shop.history.begin("elsewhere.csv", "0" * 16)
    body = problem(shop.client.post("/v1/jobs", json={"source": "more"}), 409, "job-running")
    assert str(other.record.id) in body["detail"]
    other.update(state="done")
    started = shop.client.post("/v1/jobs", json={"source": "more"})
    assert wait_for_end(shop.client, started.headers["location"])["state"] == "done"


def test_a_request_names_sources_and_never_paths(shop: Shop) -> None:
    for source in (shop.settings.sources["more"], "/etc/passwd", "--help", ""):
        body = problem(shop.client.post("/v1/jobs", json={"source": source}), 422, "request-invalid")
        assert "lost, more" in body["remedy"]
    body = problem(shop.client.post("/v1/jobs", json={"source": "more", "bundle": "/tmp"}), 422, "request-invalid")
    assert "small" in body["remedy"]
    for wrong in ({}, {"source": "more", "max_delete": 2}, {"source": "more", "expect_recall": 1}, {"sauce": "more"}):
        problem(shop.client.post("/v1/jobs", json=wrong), 422, "request-invalid")
    half = shop.client.post(
        "/v1/jobs", content=b'{"source": "more", "bundle": ["\\ud800"]}', headers={"Content-Type": "application/json"}
    )
    problem(half, 422, "request-invalid")
    assert len(shop.client.get("/v1/jobs").json()["jobs"]) == 1, "none of these started a job"


def test_an_invalid_bundle_is_reported(shop: Shop) -> None:
    (shop.settings.bundles["small"] / "bundle.json").unlink()
    problem(shop.client.post("/v1/jobs", json={"source": "more", "bundle": "small"}), 422, "bundle-invalid")


def test_a_job_with_a_missing_source_fails_with_its_name(shop: Shop) -> None:
    job = wait_for_end(shop.client, shop.client.post("/v1/jobs", json={"source": "lost"}).headers["location"])
    assert job["state"] == "failed" and "No source at lost.csv." in job["message"]
    assert str(shop.gallery.parent) not in json.dumps(shop.client.get("/v1/jobs").json()), "paths are not shown"


def test_the_settings_allow_rows_to_name_more(tmp_path: Path) -> None:
    gallery = make_tiny_gallery(tmp_path / "gallery", make_tiny_bundle(tmp_path / "bundle"))
    photos, table = write_tiny_source(tmp_path / "photos").parent, tmp_path / "shop" / "catalogue.csv"
    table.parent.mkdir()
    table.write_text(f"item_id,image\n1,{photos}/red-0.jpg\n2,http://127.0.0.1:9/a.jpg\n")
    reasons = {}
    for folders, addresses in (([], []), ([str(photos)], ["127.0.0.0/8"])):
        settings = Settings(
            gallery=gallery,
            threads=1,
            sources={"shop": str(table)},
            source_folders=folders,
            source_addresses=addresses,
        )
        with serving(settings) as client:
            job = wait_for_end(client, client.post("/v1/jobs", json={"source": "shop"}).headers["location"])
        with (gallery / "jobs" / f"{job['id']}.rejects.csv").open() as file:
            reasons[job["state"]] = [row["reason"] for row in csv.DictReader(file)]
    assert reasons == {"failed": ["forbidden", "forbidden"], "partial": ["unreachable"]}


@pytest.mark.parametrize(
    ("script", "state", "message"),
    [
        ("echo starting\necho 'no memory left' >&2\nexit 1", "failed", "no memory left"),
        ("exit 7", "failed", "code 7"),
        ("kill -9 $$", "interrupted", "signal 9"),
    ],
)
def test_a_process_that_dies_early_is_recorded(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str, message: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(python))
    job = wait_for_end(shop.client, shop.client.post("/v1/jobs", json={"source": "more"}).headers["location"])
    assert job["state"] == state and message in job["message"]


def test_a_process_that_cannot_be_started_leaves_a_failed_job(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    problem(shop.client.post("/v1/jobs", json={"source": "more"}), 500, "internal")
    (newest, *_) = shop.client.get("/v1/jobs").json()["jobs"]
    assert newest["state"] == "failed" and "'python'" in newest["message"]


def test_a_cancelled_job_ends_and_cannot_be_cancelled_again(shop: Shop) -> None:
    address = shop.client.post("/v1/jobs", json={"source": "more"}).headers["location"]
    assert shop.client.delete(address).status_code == 202
    assert wait_for_end(shop.client, address)["state"] == "cancelled"
    assert "cancelled" in problem(shop.client.delete(address), 409, "job-ended")["detail"]


def test_an_unknown_job_is_not_found(shop: Shop) -> None:
    for address in ("/v1/jobs/99", "/v1/jobs/99/events"):
        problem(shop.client.get(address), 404, "job-missing")
    problem(shop.client.delete("/v1/jobs/99"), 404, "job-missing")
    for number in ("0", "x", str(2**63)):
        problem(shop.client.get(f"/v1/jobs/{number}"), 422, "request-invalid")


def test_a_history_that_cannot_be_opened_on_a_full_disk_is_reported_as_described(shop: Shop) -> None:
    described = shop.client.get("/openapi.json").json()["paths"]
    requests = [
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs/{job_id}"),
        ("DELETE", "/v1/jobs/{job_id}"),
    ]
    with files_up_to(4096):
        for method, path in requests:
            body = {"source": "more"} if method == "POST" else None
            response = shop.client.request(method, path.replace("{job_id}", "1"), json=body)
            problem(response, 507, "storage-full")
            assert "507" in described[path][method.lower()]["responses"]


def test_a_job_outlives_the_service_that_started_it(shop: Shop) -> None:
    with serving(shop.settings) as other:
        address = other.post("/v1/jobs", json={"source": "more"}).headers["location"]
    assert wait_for_end(shop.client, address)["state"] == "done"


def test_a_stream_sends_each_change_and_heartbeats(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastapi.routing, "_PING_INTERVAL", 0.1)
    job = shop.history.begin("elsewhere.csv", "0" * 16)
    with shop.client.stream("GET", f"/v1/jobs/{job.record.id}/events") as stream:
        assert stream.headers["x-accel-buffering"] == "no", "nginx must not buffer events"
        lines = stream.iter_lines()
        assert next(read_events(lines))[1]["stage"] == "checking"
        assert next(line for line in lines if line) == ": ping"
        job.update(stage="embedding", total=10, done=5)
        name, data = next(read_events(lines))
        assert (name, data["stage"], data["done"]) == ("progress", "embedding", 5) and data["seconds_left"] > 0
        job.update(state="done")
        assert next(read_events(lines))[0] == "ended"
        assert not any(line for line in lines if line != ": ping")


def test_a_stream_whose_client_disconnected_does_not_delay_the_shutdown(shop: Shop) -> None:
    job = shop.history.begin("elsewhere.csv", "0" * 16)
    with serving(shop.settings) as other, other.stream("GET", f"/v1/jobs/{job.record.id}/events") as stream:
        assert next(read_events(stream.iter_lines()))[0] == "progress"


def test_jobs_need_the_scope_admin(settings: Settings, tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    writer, admin = {"X-API-Key": ring.create("shop", ["write"])}, {"X-API-Key": ring.create("ops", ["admin"])}
    with serving(settings.model_copy(update={"keys": tmp_path / "keys.json"})) as client:
        routes = [("POST", ""), ("GET", ""), ("GET", "/1"), ("GET", "/1/events"), ("DELETE", "/1")]
        for method, path in routes:
            refused = client.request(method, f"/v1/jobs{path}", headers=writer, json={"source": "more"})
            assert "admin" in problem(refused, 403, "forbidden")["detail"]
        assert client.get("/v1/jobs", headers=admin).status_code == 200


def test_a_job_is_watched_by_a_bounded_number_of_clients(settings: Settings) -> None:
    with closing(SQLiteJobs(Path(settings.gallery))) as history:
        job = history.begin("catalogue.csv", "0" * 16)
        with serving(settings.model_copy(update={"max_waiting": 1})) as client:
            path = f"/v1/jobs/{job.record.id}/events"
            with client.stream("GET", path) as first:
                assert next(first.iter_lines()) == "event: progress"
                refused = problem(client.get(path), 503, "overloaded")
                assert refused["detail"] == "There are 1 watchers of jobs already."
            job.update(state="cancelled")
            deadline = time.monotonic() + 40
            while client.get(path).status_code != 200:
                assert time.monotonic() < deadline, "a client that left is noticed"
                time.sleep(0.1)
