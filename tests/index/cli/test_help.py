"""Help: flags are shown without a value."""

import pytest
from typer.testing import CliRunner

from lookalike import app


@pytest.mark.parametrize("command", [[], ["train"], ["search"], ["gallery"], ["gallery", "stats"], ["keys"]])
def test_flags_are_shown_without_a_value(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"]).output
    assert "--help" in shown and "bool" not in shown
