"""Checks the pages against the code: commands, options, links, paths, and what measurements.md covers."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lookalike import app

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "llms.txt")), *DOCS]
MEASUREMENTS = ROOT / "docs" / "measurements.md"
WITHOUT_COMMANDS = {"design.md", "glossary.md", "hardening.md", "index.md", "measurements.md"}
MAX_LINE_LENGTH = 120

_COMMAND = re.compile(
    r"(?<![\w:/.-])(?<!from )(?:fresh/bin/)?lookalike ((?:gallery rankings |gallery |keys )?[a-z]+)\b([^`\n#|;&>]*)"
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"(?:index|service|training|tests|docs|deploy|benchmarks|\.github)/[\w./-]*|[\w-]+\.(?:py|toml|txt)")


def code_of(page: str) -> list[str]:
    """Returns the blocks and spans of code; lines that end with a backslash are joined."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    return [*(block.replace("\\\n", " ") for block in blocks), *spans_of(page)]


def spans_of(page: str) -> list[str]:
    """Returns the inline code of a page."""
    prose = re.sub(r"^ *```\w*\n.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def commands_of(page: str) -> list[tuple[str, str]]:
    """Returns the name and the arguments of every `lookalike` command on a page."""
    return [(name, arguments) for code in code_of(page) for name, arguments in _COMMAND.findall(code)]


def options_of(name: str) -> set[str]:
    """Returns the options of a command; fails for an unknown command."""
    command: Any = get_command(app)
    for part in name.split():
        assert part in command.commands, f"there is no `lookalike {name}`"
        command = command.commands[part]
    names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return names | {"--help", "--debug"}


def anchor_of(heading: str) -> str:
    """Returns the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def headings_of(page: Path) -> list[str]:
    """Returns the headings of a page, the title first."""
    prose = re.sub(r"^ *```\w*\n.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)$", prose, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_of_a_page_exists(page: Path) -> None:
    for name, arguments in commands_of(page.read_text(encoding="utf-8")):
        options = {word.split("=")[0] for word in shlex.split(arguments) if re.match(r"--?[a-z]", word)}
        assert options <= options_of(name), f"lookalike {name}{arguments}"


def test_the_commands_of_the_pages_are_found() -> None:
    names = {name for page in PAGES for name, _ in commands_of(page.read_text(encoding="utf-8"))}
    assert names >= {"train", "export", "reindex", "serve", "gallery restore", "keys create"}
    with pytest.raises(AssertionError, match="no `lookalike gallery mend`"):
        options_of("gallery mend")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_script_and_make_target_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in _LINK.findall(text):
        path, _, anchor = link.partition("#")
        if not path.startswith(("http:", "https:")):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in map(anchor_of, headings_of(target)), link
    for script in re.findall(r"\bbenchmarks/\w+\.py\b|\btests/[\w/]+\.py\b", text):
        assert (ROOT / script).is_file(), script
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for code in code_of(text):
        assert set(re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE)) <= set(targets), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_a_page_is_too_long(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE_LENGTH] == []


@pytest.mark.parametrize("page", [ROOT / "docs" / "design.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    paths = [span for span in spans_of(page.read_text(encoding="utf-8")) if _PATH.fullmatch(span)]
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists() and not (page.parent / path).exists()] == []


@pytest.mark.parametrize(
    "page", [page for page in DOCS if page.name not in WITHOUT_COMMANDS], ids=lambda page: page.name
)
def test_measurements_has_a_section_for_every_page_with_commands(page: Path) -> None:
    title = headings_of(page)[0]
    parts = re.split(r"^## (.+)\n", MEASUREMENTS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert title in sections
    assert "**Tests**:" in sections[title]
    assert "**Not run**" in sections[title]


def test_every_attack_is_held_by_tests_that_exist() -> None:
    text = (ROOT / "docs" / "hardening.md").read_text(encoding="utf-8")
    held: set[int] = set()
    for numbers, entry in re.findall(r"^- ([\d, ]+): ((?:.+\n)(?:  .+\n)*)", text, re.MULTILINE):
        held.update(map(int, numbers.split(", ")))
        path = None
        for span in spans_of(entry):
            if span.endswith(".py"):
                path = ROOT / "tests" / span
                continue
            assert path and re.search(rf"def {span}\(", path.read_text(encoding="utf-8")), span
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert rows == list(range(1, len(rows) + 1)) and len(rows) > 50
    assert held == set(rows)


def test_the_glossary_is_in_alphabetical_order() -> None:
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(terms) > 30
    assert terms == sorted(terms, key=str.lower)


def test_the_site_lists_every_page() -> None:
    listed = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    assert sorted(listed) == [page.name for page in DOCS]
