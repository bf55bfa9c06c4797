"""Metrics, log lines and spans of the service."""

import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from index.gallery.store.sqlite_jobs import JOBS_FILE, SQLiteJobs
from index.jobs import JobState
from service import photos
from service.auth.api_keys import KeyRing
from service.observability.logging import JsonFormatter, TextFormatter
from service.settings import Settings
from tests.service.conftest import problem, running, serving
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo

PHOTO = {"image": tiny_photo(2, 5)}


def figures(page: str) -> dict[str, float]:
    """Returns each sample by its name and labels, as `name{a=x,b=y}`."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def fresh(settings: Settings) -> Iterator[httpx.Client]:
    """A service that no other test uses."""
    with serving(settings) as client:
        yield client


def test_requests_and_stages_are_counted(fresh: httpx.Client) -> None:
    for _ in range(3):
        assert fresh.post("/v1/search", files=PHOTO).status_code == 200
    fresh.post("/v1/search")
    page = fresh.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = figures(page.text)
    assert values["lookalike_requests_total{method=POST,route=/v1/search,status=200}"] == 3
    assert values["lookalike_requests_total{method=POST,route=/v1/search,status=422}"] == 1
    assert values["lookalike_request_seconds_count{method=POST,route=/v1/search}"] == 4
    for stage in ("decode", "wait", "embed", "search"):
        assert values[f"lookalike_stage_seconds_count{{stage={stage}}}"] == 3
    assert values["lookalike_batch_photos_sum"] == 3
    assert values["lookalike_queue_photos"] == values["lookalike_working_requests"] == 0
    assert values[f"process_resident_memory_bytes{{pid={os.getpid()}}}"] > 1e6


def test_the_gallery_the_index_and_the_model_have_metrics(fresh: httpx.Client) -> None:
    before = time.time()
    status, values = fresh.get("/v1/status").json(), figures(fresh.get("/metrics").text)
    gallery = status["gallery"]
    assert (values["lookalike_gallery_items"], values["lookalike_gallery_images"]) == (
        gallery["items"],
        gallery["images"],
    )
    assert values["lookalike_gallery_revision"] == gallery["revision"]
    assert values["lookalike_gallery_unsearchable_images"] == gallery["unsearchable"] == 0
    index = gallery["index"]
    assert (index["engine"], index["kind"]) == ("faiss", "exact") and index["name"]
    assert values["lookalike_index_revision"] == index["revision"] == gallery["revision"]
    assert (values["lookalike_index_pending_images"], values["lookalike_index_recall"]) == (0, index["recall"])
    assert values["lookalike_index_info{device=cpu,engine=faiss,kind=exact}"] == 1
    for what in ("gallery_revision", "index"):
        assert before - 1 <= values[f"lookalike_{what}_seen_timestamp_seconds"] <= time.time()
    (bundle,) = [name for name in values if name.startswith("lookalike_bundle_info")]
    assert status["bundle"]["id"] in bundle and status["provider"] in bundle


def test_the_newest_job_of_each_state_has_a_metric(settings: Settings, tmp_path: Path) -> None:
    bundle = make_tiny_bundle(tmp_path / "bundle")
    gallery = make_tiny_gallery(tmp_path / "gallery", bundle)
    with serving(settings.model_copy(update={"gallery": gallery, "bundle": bundle})) as client:
        with closing(SQLiteJobs(gallery)) as history:
            done = history.newest()[0].updated
            history.begin("catalogue.csv", "b" * 16).update(state="failed", message="no such table")
            failed = history.newest()[0].updated
        values = figures(client.get("/metrics").text)
        ended = {
            state: values[f"lookalike_job_updated_timestamp_seconds{{state={state}}}"] for state in get_args(JobState)
        }
        never = {"running": 0, "partial": 0, "cancelled": 0, "interrupted": 0}
        assert ended == {"done": done, "failed": failed, **never}
        (gallery / JOBS_FILE).write_bytes(b"no database" * 1000)
        broken = client.get("/metrics")
        assert broken.status_code == 200 and "lookalike_gallery_items 8" in broken.text


def test_a_service_with_nothing_to_search_is_not_ready(settings: Settings, tmp_path: Path) -> None:
    empty = settings.model_copy(update={"gallery": tmp_path / "gallery", "bundle": None, "create": True})
    with serving(empty) as client:
        assert client.get("/readyz").status_code == 503
        assert figures(client.get("/metrics").text)["lookalike_ready"] == 0
    with serving(settings) as client:
        assert client.get("/readyz").status_code == 200
        assert figures(client.get("/metrics").text)["lookalike_ready"] == 1


def test_every_documented_metric_exists_and_every_metric_is_documented(fresh: httpx.Client) -> None:
    fresh.post("/v1/search", files=PHOTO)
    page = (Path(__file__).parents[3] / "docs" / "monitor.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `?.*", page, re.MULTILINE))
    names = {name for row in documented for name in re.findall(r"`((?:lookalike|process)_\w+)", row)}
    values = fresh.get("/metrics").text
    families = set(re.findall(r"^# TYPE (\w+)", values, re.MULTILINE))
    assert len(names) > 15 and names <= families
    assert {family for family in families if family.startswith("lookalike_")} <= names


def test_made_up_paths_and_methods_do_not_become_labels(fresh: httpx.Client) -> None:
    for number in range(5):
        fresh.get(f"/nowhere/{number}")
        fresh.get(f"/media/{number}.jpg")
        fresh.get(f"/web/{number}.js")
        fresh.request(f"MADE{number}", "/v1/search")
    values = figures(fresh.get("/metrics").text)
    counted = {name: value for name, value in values.items() if name.startswith("lookalike_requests_total")}
    assert counted == {
        "lookalike_requests_total{method=GET,route=none,status=404}": 5,
        "lookalike_requests_total{method=GET,route=/media/{digest}.jpg,status=404}": 5,
        "lookalike_requests_total{method=GET,route=/web,status=404}": 5,
        "lookalike_requests_total{method=other,route=/v1/search,status=405}": 5,
    }


def test_refused_requests_are_counted_by_their_reason(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = KeyRing(tmp_path / "keys.json").create("shop", ["search"])
    small = {"keys": tmp_path / "keys.json", "max_requests": 1, "rate": 0.1, "burst": 2}
    may_continue, decode = threading.Event(), photos.decode_query

    def decode_late(*given: Any) -> Any:
        assert may_continue.wait(60)
        return decode(*given)

    monkeypatch.setattr(photos, "decode_query", decode_late)
    with serving(settings.model_copy(update=small)) as client, ThreadPoolExecutor(1) as pool:
        problem(client.get("/metrics"), 401, "key-missing")
        client.headers["X-API-Key"] = key
        try:
            first = pool.submit(client.post, "/v1/search", files=PHOTO)
            while figures_of(tmp_path, client)["lookalike_working_requests"] < 1:
                time.sleep(0.01)
            overloaded = client.post("/v1/search", files=PHOTO)
        finally:
            may_continue.set()
        assert int(overloaded.headers["Retry-After"]) >= 1
        problem(overloaded, 503, "overloaded")
        assert first.result().status_code == 200
        problem(client.post("/v1/search", files=PHOTO), 429, "too-many-requests")
        values = figures_of(tmp_path, client)
        assert values["lookalike_refused_total{reason=search}"] == values["lookalike_refused_total{reason=rate}"] == 1


def figures_of(folder: Path, client: httpx.Client) -> dict[str, float]:
    """Read with a key of its own, so that reading takes nothing from another's rate."""
    scraper = KeyRing(folder / "keys.json").create("scraper", ["search"])
    return figures(client.get("/metrics", headers={"X-API-Key": scraper}).text)


def test_a_log_line_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    record = logging.LogRecord("service", logging.INFO, "", 0, "asked for %s", ("a\nERROR b\x1b[31m\u2028",), None)
    line = TextFormatter().format(record)
    assert "\n" not in line and "\x1b" not in line and r"a\nERROR b\x1b[31m" in line
    assert json.loads(JsonFormatter().format(record))["message"].startswith("asked for a\n")
    assert len(JsonFormatter().format(record).splitlines()) == 1


def test_every_log_line_is_json_and_every_request_has_one(settings: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    token = KeyRing(keys).create("shop", ["search"])
    variables = {"LOOKALIKE_LOG_FORMAT": "json", "LOOKALIKE_LOG_LEVEL": "debug", "LOOKALIKE_KEYS": str(keys)}
    with running(settings, tmp_path, **variables) as service:
        headers = {"X-API-Key": token, "X-Request-Id": "shop-7"}
        httpx.post(f"{service.address}/v1/search", files=PHOTO, headers=headers)
        httpx.get(f"{service.address}/healthz")
        chunks = (b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0), b"IDAT")  # Pillow warns of so many
        bomb = b"".join(struct.pack(">I", len(it) - 4) + it + struct.pack(">I", zlib.crc32(it)) for it in chunks)
        refused = httpx.post(
            f"{service.address}/v1/search", files={"image": b"\x89PNG\r\n\x1a\n" + bomb}, headers=headers
        )
        problem(refused, 413, "image-too-many-pixels")
    text = service.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    asked, probed, _ = [line for line in lines if line["logger"] == "service.requests"]
    fields = {name: asked[name] for name in ("method", "route", "status", "key", "client", "request_id", "level")}
    assert fields == {
        "method": "POST",
        "route": "/v1/search",
        "status": 200,
        "key": token.split("_")[1],
        "client": "127.0.0.1",
        "request_id": "shop-7",
        "level": "info",
    }
    assert asked["milliseconds"] > 0 and (probed["route"], probed["level"]) == ("/healthz", "debug")
    assert "uvicorn.error" in {line["logger"] for line in lines}
    ready = json.loads(service.ready)
    assert (ready["level"], ready["message"]) == ("info", f"Lookalike serves on {service.address}")
    assert token not in text and token.split("_")[2] not in text


@pytest.mark.slow
def test_a_first_start_logs_what_is_missing_and_the_remedy(settings: Settings, tmp_path: Path) -> None:
    keys, empty = tmp_path / "keys.json", settings.model_copy(update={"gallery": tmp_path / "gallery"})
    with running(empty, tmp_path, LOOKALIKE_CREATE="true", LOOKALIKE_KEYS=str(keys)) as service:
        waiting = problem(httpx.get(f"{service.address}/readyz"), 503, "not-ready")
        assert "lookalike reindex" in waiting["remedy"]
    log = service.log.read_text()
    assert log.count("lookalike keys create") == log.count("lookalike reindex") == 1
    assert f"NO KEY YET in {keys}" in log and f"EMPTY GALLERY {tmp_path / 'gallery'}" in log
    KeyRing(keys).create("shop", ["search"])
    with running(settings, tmp_path, LOOKALIKE_KEYS=str(keys)) as service:
        pass
    assert "WARNING" not in service.log.read_text()


@pytest.mark.slow
def test_processes_are_reported_as_one_service(settings: Settings, tmp_path: Path) -> None:
    with running(settings, tmp_path, LOOKALIKE_WORKERS="2") as service:
        values: dict[str, float] = {}
        sent, deadline = 0, time.monotonic() + 60
        while sum(name.startswith("process_open_fds") for name in values) < 2:
            assert time.monotonic() < deadline, service.log.read_text()
            for _ in range(5):  # each on a connection of its own, which either process may accept
                assert httpx.post(f"{service.address}/v1/search", files=PHOTO, timeout=60).status_code == 200
            sent += 5
            values = figures(httpx.get(f"{service.address}/metrics").text)
            assert values["lookalike_requests_total{method=POST,route=/v1/search,status=200}"] == sent
        assert values["lookalike_stage_seconds_count{stage=search}"] == sent
        assert (values["lookalike_gallery_items"], values["lookalike_working_requests"]) == (8, 0)


@contextmanager
def collecting() -> Iterator[tuple[str, list[Span]]]:
    """A collector of spans, as OpenTelemetry's protocol has it."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()


def test_spans_continue_the_clients_trace(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with collecting() as (address, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        with serving(settings) as client:
            client.post("/v1/search", files=PHOTO, headers={"traceparent": f"00-{trace}-{parent}-01"})
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"POST /v1/search", "decode", "wait", "embed", "search"}
    whole = by_name["POST /v1/search"]
    assert whole.parent_span_id.hex() == parent and {span.trace_id.hex() for span in spans} == {trace}
    attributes = {each.key: each.value for each in whole.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    for stage in ("decode", "wait", "embed", "search"):
        span = by_name[stage]
        assert span.parent_span_id == whole.span_id and span.start_time_unix_nano <= span.end_time_unix_nano
    order = [by_name[stage].end_time_unix_nano for stage in ("decode", "wait", "embed", "search")]
    assert order == sorted(order)


def test_without_an_endpoint_the_sdk_is_not_imported(settings: Settings) -> None:
    probe = (
        "import sys; from service.app import create_app; from service.settings import Settings;"
        f"create_app(Settings(gallery={str(settings.gallery)!r}));"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    finished = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env=clean)
    assert finished.stdout.strip() == "[]"
