"""The commands of `lookalike gallery rankings`."""

import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from index.gallery import open_gallery
from lookalike import main

RULES = '{"diversity": 0.3, "pin": ["mug-01"]}'


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    open_gallery(tmp_path / "gallery", create=True).close()
    return tmp_path / "gallery"


class Result(NamedTuple):
    """The exit code and the output of a command."""

    code: object
    out: str
    error: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def run_main(*arguments: object, text: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["lookalike", "gallery", "rankings", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", StringIO(text))
        with pytest.raises(SystemExit) as exited:
            main()
        return Result(exited.value.code, *capfd.readouterr())

    return run_main


def test_a_ranking_is_set_listed_shown_and_deleted(run: Run, gallery: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text(RULES)
    assert run("list", gallery) == (0, "", "")
    assert run("set", gallery, "home", tmp_path / "rules.json").out.startswith("home  version 1, ")
    assert run("set", "--gallery", gallery, "home", "-", text='{"group_by": "product"}').code == 0
    assert "version 2" in run("list", gallery).out and "group_by" in run("list", gallery).out
    assert json.loads(run("show", gallery, "home").out) == {"group_by": "product"}
    assert json.loads(run("show", gallery, "home", "--version", 1).out) == json.loads(RULES)
    lines = run("show", "--gallery", gallery, "home", "--versions").out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["home  version 2", "home  version 1"]
    assert run("delete", gallery, "home").out == "Ranking home was deleted.\n"
    assert run("list", gallery).out == ""


def test_mistakes_are_named(run: Run, gallery: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text('{"diversity": 3}')
    run("set", gallery, "home", "-", text=RULES)
    for arguments, problem in (
        (("set", gallery, "home", tmp_path / "rules.json"), "diversity must be at most 1"),
        (("set", gallery, "home", tmp_path / "none.json"), "cannot be read"),
        (("set", gallery, "a/b", tmp_path / "none.json"), "cannot be read"),
        (("show", gallery, "other"), "no ranking 'other'"),
        (("delete", gallery, "other"), "no ranking 'other'"),
        (("show", gallery, "home", "--version", 7), "no ranking 'home' of version 7"),
    ):
        result = run(*arguments)
        assert result.code == 1 and problem in result.error
    assert run("set", gallery, "home").code == 2


@pytest.mark.parametrize("command", ["list", "show", "set", "delete"])
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    assert f"Example: lookalike gallery rankings {command}" in run(command, "--help").out
