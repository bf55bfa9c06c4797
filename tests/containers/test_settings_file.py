"""The file that explains the settings is complete and true."""

import re
from pathlib import Path

from service.settings import FILE_VARIABLE, PREFIX, Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
EXPLAINED = dict(re.findall(r"^#(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
COMPOSE = (DEPLOY / "compose.yaml").read_text()
FIXED = {"create", "host", "port"}
"""What a container must not have otherwise."""


def test_every_setting_of_the_service_is_explained() -> None:
    ours = {name for name in EXPLAINED if name.startswith(PREFIX)} - {FILE_VARIABLE}
    assert ours == {f"{PREFIX}{name}".upper() for name in set(Settings.model_fields) - FIXED}


def test_every_variable_of_the_compose_file_is_explained_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", COMPOSE))
    assert used and {name: EXPLAINED.get(name) for name in used} == used
