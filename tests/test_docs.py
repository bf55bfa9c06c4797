"""The pages for readers: their commands exist, their links lead somewhere, and each says what ran it."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lookalike import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CHECKED = "## How this is checked"

_SPOKEN = re.compile(r"(?<![\w:/.-])(?:fresh/bin/)?lookalike ((?:gallery |keys )?[a-z]+)\b([^`\n#|;&>]*)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def code_of(page: str) -> list[str]:
    """Blocks and spans of code, each line that a backslash continues as one."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^ *```\w*\n.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [*(block.replace("\\\n", " ") for block in blocks), *re.findall(r"`([^`\n]+)`", rest)]


def commands_of(page: str) -> list[tuple[str, str]]:
    """The verb and the words behind it of every line that calls us."""
    return [(verb, words) for code in code_of(page) for verb, words in _SPOKEN.findall(code)]


def options_of(verb: str) -> set[str]:
    """What the command line takes for a verb; fails for one that it does not know."""
    command: Any = get_command(app)
    for name in verb.split():
        assert name in command.commands, f"there is no `lookalike {verb}`"
        command = command.commands[name]
    names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return names | {"--help", "--debug"}


def anchors_of(page: Path) -> set[str]:
    """The headings, as their addresses are formed."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_one_of_ours(page: Path) -> None:
    for verb, words in commands_of(page.read_text(encoding="utf-8")):
        used = {word.split("=")[0] for word in shlex.split(words) if re.match(r"--?[a-z]", word)}
        assert used <= options_of(verb), f"lookalike {verb}{words}"


def test_the_commands_of_the_pages_are_really_read() -> None:
    told = [command for page in PAGES for command in commands_of(page.read_text(encoding="utf-8"))]
    assert {verb for verb, _ in told} >= {"train", "export", "reindex", "serve", "gallery restore", "keys create"}
    with pytest.raises(AssertionError, match="no `lookalike gallery mend`"):
        options_of("gallery mend")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_file_of_a_page_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in _LINK.findall(text):
        path, _, anchor = link.partition("#")
        if not path.startswith(("http:", "https:")):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link
    for script in re.findall(r"\bbenchmarks/\w+\.py\b|\btests/[\w/]+\.py\b", text):
        assert (ROOT / script).is_file(), script
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for code in code_of(text):
        assert set(re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE)) <= set(targets), code


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_page_says_what_ran_its_commands(page: Path) -> None:
    told = page.read_text(encoding="utf-8").split(CHECKED + "\n")
    assert len(told) == 2, f"a page ends with {CHECKED!r}"
    assert re.search(r"\btests?\b|by hand", told[1])
