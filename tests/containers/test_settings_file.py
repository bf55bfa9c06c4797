"""Tests of `.env.example`: it lists every setting with its default."""

import re
from pathlib import Path

from service.settings import FILE_VARIABLE, PREFIX, Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCUMENTED = dict(re.findall(r"^#(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
COMPOSE = re.sub(r"\n +", " ", (DEPLOY / "compose.yaml").read_text())
"""With folded lines, as YAML reads them."""
FIXED = {"cache", "create", "host", "port"}
"""Settings with a fixed value in a container."""


def test_every_setting_of_the_service_is_documented() -> None:
    settings = {name for name in DOCUMENTED if name.startswith(PREFIX)} - {FILE_VARIABLE}
    assert settings == {f"{PREFIX}{name}".upper() for name in set(Settings.model_fields) - FIXED}


def test_every_variable_of_the_compose_file_is_documented_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE))
    assert used and {name: DOCUMENTED.get(name) for name in used} == used
