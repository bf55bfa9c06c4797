"""The command line: help for every command, one clear line per user error, a traceback only with --debug."""

import logging
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

from lookalike import main
from tests.support.processes import lookalike
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import make_tiny_gallery, tiny_photo, write_tiny_source

COMMANDS = ("demo", "train", "study", "evaluate", "compare", "export", "report", "reindex", "search", "serve", "info")


class Result(NamedTuple):
    """The exit code and the output of a command."""

    code: object
    out: str
    error: str


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Takes back how `serve` configures logging, which would write to the closed output of its test from then on."""
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in ("", "service", "index", "uvicorn")]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command in this process: one process per command would take minutes."""

    def run_main(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["lookalike", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        return Result(exited.value.code, *capfd.readouterr())

    return run_main


def test_help_lists_every_command() -> None:
    result = lookalike("--help")
    assert result.returncode == 0, result.stderr
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run: Callable[..., Result], command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert f"Example: lookalike {command}" in result.out


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shop")
    bundle = make_tiny_bundle(directory / "bundle")
    make_tiny_gallery(directory / "gallery", bundle)
    make_tiny_bundle(directory / "other", grid=2)
    (directory / "photo.jpg").write_bytes(tiny_photo(2, 3))
    (directory / "text.jpg").write_text("not a photo")
    (directory / "bad.csv").write_text("sku,photo\n1,a.jpg\n")
    (directory / "begun").mkdir()
    (directory / "begun" / "config.yaml").write_text("data: sample\nconfig: {}\n")
    return directory


def test_search_prints_the_right_item_first(run: Callable[..., Result], shop: Path) -> None:
    result = run("search", shop / "photo.jpg", "--gallery", shop / "gallery", "--bundle", shop / "bundle")
    assert result.code == 0, result.error
    assert "ball-blue" in result.out.splitlines()[0]
    assert len(result.out.splitlines()) == 5


USER_ERRORS = [
    ("search nothing.jpg --gallery {shop}/gallery --bundle {shop}/bundle", "No photo at nothing.jpg"),
    ("search {shop}/text.jpg --gallery {shop}/gallery --bundle {shop}/bundle", "not a photo of a known format"),
    ("search {shop}/photo.jpg --gallery {shop}/nothing --bundle {shop}/bundle", "lookalike reindex"),
    ("search {shop}/photo.jpg --gallery {shop}/gallery --bundle {shop}/other", "was indexed with bundle"),
    ("reindex {shop}/nothing.csv --gallery {shop}/new --bundle {shop}/bundle", "No source at"),
    ("reindex {shop}/bad.csv --gallery {shop}/new --bundle {shop}/bundle", "it has sku, photo"),
    ("reindex {shop}/gallery-source/catalogue.csv --gallery {shop}/new --bundle {shop}/nothing", "lookalike export"),
    ("reindex {shop}/gallery-source/catalogue.csv --gallery {shop}/bundle --bundle {shop}/bundle", "is not a gallery"),
    ("serve", "gallery is missing"),
    ("serve --gallery {shop}/nothing --bundle {shop}/bundle", "No gallery at"),
    ("serve --gallery {shop}/gallery --bundle {shop}/other", "was indexed with bundle"),
    ("serve --gallery {shop}/gallery --host 192.0.2.1", "without API keys"),
    ("train --data nonsense --out {shop}/run", "Unknown data 'nonsense'"),
    ("train --data folder:{shop}/nothing --out {shop}/run", "No folder at"),
    ("train --data folder:{shop} --out {shop}/run --set epochs=many", "epochs must be a whole number (got 'many')"),
    ("train --data folder:{shop} --out {shop}/run --set epochs", "--set key=value"),
    ("train --data folder:{shop} --out {shop}/run --config {shop}/nothing.yaml", "No configuration file"),
    ("evaluate --model {shop}/nothing --data sample", "No training run at"),
    ("evaluate --model {shop}/bundle --data sample --k zero", "Write it as 1,2,4,8"),
    ("evaluate --model backbone:nothing --data sample", "Unknown backbone 'nothing'"),
    ("compare {shop}/nothing --data sample", "No training run at"),
    ("export backbone: --out {shop}/new", "names no backbone"),
    ("export {shop}/nothing --out {shop}/new", "No training run at"),
    ("report {shop}/nothing", "No training run at"),
    ("report {shop}/begun", "has no checkpoint yet"),
    ("report {shop}/begun --out {shop}", "is a folder"),
]


@pytest.mark.parametrize(("line", "message"), USER_ERRORS, ids=[line for line, _ in USER_ERRORS])
def test_a_user_error_prints_one_line_and_exits_with_one(
    run: Callable[..., Result], shop: Path, line: str, message: str
) -> None:
    result = run(*(part.format(shop=shop) for part in line.split()))
    assert result.code == 1, result.error
    assert message in result.error
    assert len(result.error.strip().splitlines()) == 1 and "Traceback" not in result.error


@pytest.mark.parametrize(
    "line", ["--debug search {0} --gallery g --bundle b", "search {0} --gallery g --bundle b --debug"]
)
def test_debug_prints_the_traceback(run: Callable[..., Result], line: str) -> None:
    result = run(*line.format("nothing.jpg").split())
    assert result.code == 1
    assert "Traceback" in result.error and "No photo at nothing.jpg" in result.error


def test_wrong_usage_exits_with_two(run: Callable[..., Result]) -> None:
    assert run("search", "photo.jpg", "--no-such-option").code == 2
    assert run("no-such-command").code == 2


def test_reindex_with_rejected_photos_exits_with_three(run: Callable[..., Result], shop: Path, tmp_path: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    (source.parent / "red-0.jpg").write_bytes(b"broken")
    rejects = tmp_path / "rejects.csv"
    result = run("reindex", source, "--gallery", tmp_path / "g", "--bundle", shop / "bundle", "--rejects", rejects)
    assert result.code == 3, result.error
    assert "15 photos embedded, 0 unchanged, 1 rejected" in result.out
    assert "red-0.jpg" in rejects.read_text()


def test_version_prints_the_version_and_exits(run: Callable[..., Result]) -> None:
    assert run("--version") == (0, f"lookalike {version('lookalike')}\n", "")


def test_an_internal_error_exits_with_seventy(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("lookalike._build_app", lambda: fail)
    result = run("serve")
    assert result.code == 70
    assert result.error == (
        "lookalike: ZeroDivisionError: division by zero. This is a bug in Lookalike; --debug shows the traceback.\n"
    )
