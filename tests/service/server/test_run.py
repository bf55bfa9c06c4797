"""Starting: what prevents it is one line with its remedy, and a server process that cannot start stops no other."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from service.app import create_app
from service.settings import Settings
from tests.service.conftest import running
from tests.support.tiny_gallery import tiny_photo

PHOTO = {"image": tiny_photo(2, 5)}


def serve(**variables: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{f"LOOKALIKE_{name}": str(value) for name, value in variables.items()}}
    command = [sys.executable, "-m", "lookalike", "serve", "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_prevents_a_start_is_one_line_in_the_format_of_the_log(tmp_path: Path, workers: str) -> None:
    nowhere = tmp_path / "nowhere"
    text = serve(GALLERY=nowhere, WORKERS=workers)
    assert (text.returncode, text.stdout) == (1, "")
    (line,) = text.stderr.splitlines()
    assert line.startswith("lookalike: ") and "nowhere" in line and "lookalike reindex" in line
    as_json = serve(GALLERY=nowhere, WORKERS=workers, LOG_FORMAT="json")
    assert (as_json.returncode, as_json.stdout) == (1, "")
    record = json.loads(as_json.stderr)
    assert f"lookalike: {record['message']}" == line
    assert record["level"] == "critical" and "exception" not in record


def messages_of_start(app: FastAPI) -> list[str]:
    """Returns what uvicorn logs as errors while it fails to start the application, however logging is configured."""
    logger, handler, records = logging.getLogger("uvicorn.error"), logging.Handler(logging.ERROR), list[str]()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.raises(SystemExit):
            uvicorn.Server(uvicorn.Config(app, port=0, log_config=None)).run()
    finally:
        logger.removeHandler(handler)
    return records


def test_an_error_when_the_application_starts_is_logged_without_a_traceback(settings: Settings, tmp_path: Path) -> None:
    app = create_app(settings.model_copy(update={"gallery": tmp_path / "nowhere"}))
    problem, end = messages_of_start(app)
    assert "nowhere" in problem and "lookalike reindex" in problem and "\n" not in problem
    assert end == "Application startup failed. Exiting."


def test_a_bug_when_the_application_starts_is_logged_with_its_traceback(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("service.state.check_exposure", fail)
    problem = messages_of_start(create_app(settings))[0]
    assert "Traceback" in problem and "ZeroDivisionError: a bug" in problem


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def children(process: int) -> set[int]:
    """Returns the server processes of the parent, without the helpers of Python's multiprocessing."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the processes from /proc")
def test_a_server_process_that_cannot_start_again_is_started_until_it_can(settings: Settings, tmp_path: Path) -> None:
    """The others continue: a fault that prevents a start, such as a full disk, need not prevent searches."""
    bundle = Path(str(settings.bundle))
    hidden = bundle.with_name("hidden")
    variables = {"LOOKALIKE_WORKERS": "2", "LOOKALIKE_BUNDLE": str(bundle)}
    with running(settings, tmp_path, **variables) as service:

        def starts(end: str) -> int:
            return service.log.read_text().count(f"Application startup {end}")

        until(lambda: starts("complete") == 2)
        first = children(service.process.pid)
        assert len(first) == 2
        bundle.rename(hidden)
        try:
            os.kill(min(first), signal.SIGKILL)
            until(lambda: starts("failed") >= 2)
            assert httpx.post(f"{service.address}/v1/search", files=PHOTO, timeout=60).status_code == 200
        finally:
            hidden.rename(bundle)
        until(lambda: starts("complete") == 3)
        assert len(children(service.process.pid)) == 2
        assert service.process.poll() is None
        assert "Traceback" not in service.log.read_text()
